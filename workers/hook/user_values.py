"""Values that a script hands over itself: stored at the current step, whatever the interval.

The current step is the last one that began in the current mode. A value that comes before the
mode's first step belongs to that step, or before any step to the first one of all, whatever its
mode. It is kept here until that step begins, as only then is its number known: until then it does
not survive the death of the process.

Steps of a mode may never begin: nobody sees the evaluation of a loop with a tape. A value that comes
again while the one before still waits shows that. From then on values begin the steps of that mode
themselves: one that comes again does, and one that comes after a step of another mode.
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
    """How a framework's tensors are read."""

    access: TensorAccess[T]
    describe: Callable[[T], TensorMeta]
    value: Callable[[object], T]  # of what a script hands over; raises what it cannot take
    copy: Callable[[T], T]


@dataclass(frozen=True)
class _Held(Generic[T]):
    name: str
    value: T
    plan: TensorPlan
    after: int = -1  # the last step there was


class _Last(NamedTuple):
    """The last step that values began themselves."""

    after: int  # the last step there was when they came
    names: frozenset[str]


class UserValues(Generic[T]):
    def __init__(
        self,
        reading: TensorAdapter[T],
        clock: StepClock,
        planner: Planner,
        recorder: Recorder[T],
        sink: Callable[[], Sink[T] | None],
        trouble: Callable[[str], None],
    ) -> None:
        self._reading, self._clock, self._planner = reading, clock, planner
        self._recorder, self._sink, self._trouble = recorder, sink, trouble
        self._written: tuple[StepRef | None, set[str]] = (None, set())  # of the last step
        self._held: dict[ModeKeys | None, list[_Held[T]]] = {}  # None: for the first step of all
        self._paced: dict[ModeKeys, _Last] = {}  # modes in which values begin the steps

    @property
    def any_held(self) -> bool:
        return bool(self._held)

    def save(self, name: str, given: object, collections: Iterable[str], scalar: bool) -> None:
        name = self._written_as(name)
        collections = [self._written_as(collection) for collection in collections]
        value = self._reading.value(given)
        shape = self._reading.describe(value)[1]
        if scalar and shape not in ((), (1,)):
            raise ValueError(f"{name} is to be one number, not a tensor of shape {list(shape)}")
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
        """Begin a step, where nobody else does and a value called `name` needs one."""
        clock = self._clock
        mode, now = clock.mode, clock.step
        last = self._paced.get(mode)
        if last is None:
            if all(held.name != name for held in self._held.get(mode, ())):
                return
            last = _Last(-1, frozenset())
            for held in self._one_by_one(mode):  # in vain
                last = self._step_for(held.name, held.after, last)
                self._write(held)
        self._paced[mode] = self._step_for(name, now, last)._replace(after=clock.step)

    def _step_for(self, name: str, after: int, last: _Last) -> _Last:
        if after == last.after and name not in last.names:
            return last._replace(names=last.names | {name})
        self._clock.begin(report=False)
        return _Last(after, frozenset({name}))

    def _written_as(self, name: str) -> str:
        written = encodable(name)
        if written != name:
            self._trouble(
                f"the name {written} holds half of a surrogate pair, which cannot be written: it is "
                "saved with that escape; decode names from bytes with errors='replace'"
            )
        return written

    def release(self) -> None:
        """The current mode has a step: what waited for one goes there."""
        self._paced.pop(self._clock.mode, None)
        for mode in (None, self._clock.mode):
            for held in self._one_by_one(mode):
                self._write(held)

    def _one_by_one(self, mode: ModeKeys | None) -> Iterator[_Held[T]]:
        """What waits for a step of `mode`; each is forgotten once it is written, so none is lost."""
        held = self._held.get(mode, [])
        while held:
            yield held[0]
            del held[0]
        self._held.pop(mode, None)

    def release_all(self) -> None:
        """No more steps will come: each mode's first one would have been the next."""
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
            self._trouble(
                f"{held.name} was saved more than once in a step, and the trial shows the last "
                "value; a step begins with its forward: save behind that, or end steps with hook.step()"
            )
        self._recorder.save(sink, ref, held.name, held.value, held.plan)
        self._written[1].add(held.name)
