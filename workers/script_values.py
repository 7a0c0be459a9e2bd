"""Values that a script hands over itself: stored at the current step, whatever the interval.

The current step is the last one that began in the current mode. A value that comes before the
mode's first step belongs to that step, and is kept here until it begins: only then is its number
known, since the mode may still change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from smdist.identity import ModeKeys
from smdist.planning import Planner, TensorPlan
from smdist.workers.host import Host
from smdist.workers.outlet import Sink
from smdist.workers.recorder import Facts, Recorder
from smdist.workers.steps import AT_ONCE, StepClock

__all__ = ["Reading", "ScriptValues"]

T = TypeVar("T")


@dataclass(frozen=True)
class Reading(Generic[T]):
    """How a framework's tensors are read."""

    host: Host[T]
    describe: Callable[[T], Facts]
    value: Callable[[object], T]  # of what a script hands over; raises what it cannot take
    copy: Callable[[T], T]


@dataclass(frozen=True)
class _Held(Generic[T]):
    name: str
    value: T
    plan: TensorPlan


class ScriptValues(Generic[T]):
    def __init__(
        self,
        reading: Reading[T],
        clock: StepClock,
        planner: Planner,
        recorder: Recorder[T],
        sink: Callable[[], Sink[T] | None],
    ) -> None:
        self._reading, self._clock, self._planner = reading, clock, planner
        self._recorder, self._sink = recorder, sink
        self._held: dict[ModeKeys, list[_Held[T]]] = {}

    @property
    def any_held(self) -> bool:
        return bool(self._held)

    def save(self, name: str, given: object, collections: Iterable[str], scalar: bool) -> None:
        value = self._reading.value(given)
        shape = self._reading.describe(value)[1]
        if scalar and shape not in ((), (1,)):
            raise ValueError(f"{name} is to be one number, not a tensor of shape {list(shape)}")
        plan = self._planner.explicit(name, collections)
        if self._clock.has_step:
            self._write(_Held(name, value, plan))
        else:
            held = _Held(name, self._reading.copy(value), plan)
            self._held.setdefault(self._clock.mode, []).append(held)
        self._clock.due = AT_ONCE  # the next step has to close this one

    def release(self) -> None:
        """The current mode has a step: what waited for one goes there."""
        for held in self._held.pop(self._clock.mode, ()):
            self._write(held)

    def release_all(self) -> None:
        """No more steps will come: each mode's first one would have been the next."""
        for mode in tuple(self._held):
            self._clock.set_mode(mode)
            self.release()

    def clear(self) -> None:
        self._held.clear()

    def _write(self, held: _Held[T]) -> None:
        sink = self._sink()
        if sink is not None:
            self._recorder.save(sink, self._clock.ref, held.name, held.value, held.plan)
