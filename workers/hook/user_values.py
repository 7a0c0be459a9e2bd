"""Save values that a script passes itself: at the current step, whatever the interval.

The current step is the last one that began in the current mode. A value before the mode's first step
belongs to that step. A value before any step belongs to the first one, whatever its mode. It is held here
until that step begins and its number is known. Until then it does not survive the death of the process.

Steps of a mode may never begin: the evaluation of a loop with a tape is not seen. A second value of the
same name while the first one is held shows that. From then on values begin the steps of that mode: a
repeated name does, and a value after a step of another mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from smdist.identity import ModeKeys, StepRef
from smdist.messages import encodable
from smdist.planning import Planner, TensorPlan
from smdist.workers.capture.tensor_access import TensorAccess
from smdist.workers.hook.capture_session import Sink
from smdist.workers.hook.recorder import Recorder, TensorMeta
from smdist.workers.hook.step_clock import NEXT_STEP, StepClock

__all__ = ["TensorAdapter", "UserValues"]

T = TypeVar("T")


@dataclass(frozen=True)
class TensorAdapter(Generic[T]):
    """How the tensors of a framework are read."""

    access: TensorAccess[T]
    describe: Callable[[T], TensorMeta]
    value: Callable[[object], T]  # converts a value of the script, or raises
    copy: Callable[[T], T]


@dataclass(frozen=True)
class _Held(Generic[T]):
    name: str
    value: T
    plan: TensorPlan
    after: int = -1  # the last step when it was saved


class _Last(NamedTuple):
    """The last step that was begun by values."""

    after: int  # the last step before they were saved
    names: frozenset[str]


class UserValues(Generic[T]):
    def __init__(
        self,
        reading: TensorAdapter[T],
        clock: StepClock,
        planner: Planner,
        recorder: Recorder[T],
        sink: Callable[[], Sink[T] | None],
        warn: Callable[[str], None],
    ) -> None:
        self._reading, self._clock, self._planner = reading, clock, planner
        self._recorder, self._sink, self._warn = recorder, sink, warn
        self._written: tuple[StepRef | None, set[str]] = (
            None,
            set(),
        )  # names saved in the last step
        self._held: dict[
            ModeKeys | None, list[_Held[T]]
        ] = {}  # None: for the first step of any mode
        self._paced: dict[ModeKeys, _Last] = {}  # modes whose steps are begun by values

    @property
    def any_held(self) -> bool:
        return bool(self._held)

    def save(self, name: str, given: object, collections: Iterable[str], scalar: bool) -> None:
        """Save `given` at the current step, or hold it until its step begins."""
        name = self._encodable(name)
        collections = [self._encodable(collection) for collection in collections]
        value = self._reading.value(given)
        shape = self._reading.describe(value)[1]
        if scalar and shape not in ((), (1,)):
            raise ValueError(f"{name} must be one number, not a tensor of shape {list(shape)}")
        plan = self._planner.explicit(name, collections)
        self._pace(name)
        if self._clock.has_step:
            self._write(_Held(name, value, plan))
        else:
            held = _Held(name, self._reading.copy(value), plan, self._clock.step)
            mode = self._clock.mode if self._clock.step >= 0 else None
            self._held.setdefault(mode, []).append(held)
        self._clock.due = NEXT_STEP  # the next step has to close this one

    def _pace(self, name: str) -> None:
        """Begin a step for the value `name` if nothing else begins the steps of this mode."""
        clock = self._clock
        mode, now = clock.mode, clock.step
        last = self._paced.get(mode)
        if last is None:
            if all(held.name != name for held in self._held.get(mode, ())):
                return
            last = _Last(-1, frozenset())
            for held in self._take_held(mode):  # their step never began
                last = self._step_for(held.name, held.after, last)
                self._write(held)
        self._paced[mode] = self._step_for(name, now, last)._replace(after=clock.step)

    def _step_for(self, name: str, after: int, last: _Last) -> _Last:
        if after == last.after and name not in last.names:
            return last._replace(names=last.names | {name})
        self._clock.begin(report=False)
        return _Last(after, frozenset({name}))

    def _encodable(self, name: str) -> str:
        written = encodable(name)
        if written != name:
            self._warn(
                f"The name {written} contains an unpaired surrogate and is saved with that escape. Decode "
                "names from bytes with errors='replace'."
            )
        return written

    def release(self) -> None:
        """Save what was held for the current mode's step, which has begun."""
        self._paced.pop(self._clock.mode, None)
        for mode in (None, self._clock.mode):
            for held in self._take_held(mode):
                self._write(held)

    def _take_held(self, mode: ModeKeys | None) -> Iterator[_Held[T]]:
        """Yield what is held for `mode`; each is dropped after it was written, so an exception loses none."""
        held = self._held.get(mode, [])
        while held:
            yield held[0]
            del held[0]
        self._held.pop(mode, None)

    def release_all(self) -> None:
        """Save everything held at the end: the first step of each mode would have been the next."""
        for mode in tuple(self._held):
            self._clock.set_mode(self._clock.mode if mode is None else mode)
            self.release()

    def clear(self) -> None:
        self._held.clear()
        self._paced.clear()

    def _write(self, held: _Held[T]) -> None:
        sink = self._sink()
        if sink is None:
            return
        ref = self._clock.ref
        if self._written[0] != ref:
            self._written = (ref, set())
        if held.name in self._written[1]:
            self._warn(
                f"{held.name} was saved more than once in a step; the trial shows the last value. Call "
                "save_*() after the forward pass, or end steps with hook.step()."
            )
        self._recorder.save(sink, ref, held.name, held.value, held.plan)
        self._written[1].add(held.name)
