"""Records that the journal has no room for: kept until it has, and of most steps only their numbers.

A step whose drops are not recorded must not look whole, nor as if it had never been due. So once no more
is kept in full, drops and closes become a drop of their step that lists no names. Steps at one distance
from each other, as a schedule makes them, take no more room than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from smdist.format.journal_records import Close, Drop, Flush, Record

__all__ = ["Unwritten"]

_REASON = "the journal had no room for long: what was dropped of this step is not listed"
_MOST_RUNS = 10_000


def _extended(run: Drop, mode_step: int, step: int) -> Drop | None:
    """`run` with one more step; None if that is not as far from its last one as those are."""
    last = run.steps - 1
    if (run.mode_step + last * run.mode_stride, run.step + last * run.stride) == (mode_step, step):
        return run
    strides = (
        (run.mode_stride, run.stride) if last else (mode_step - run.mode_step, step - run.step)
    )
    mode_stride, stride = strides
    expected = (run.mode_step + run.steps * mode_stride, run.step + run.steps * stride)
    if expected != (mode_step, step):
        return None
    return msgspec.structs.replace(run, mode_stride=mode_stride, stride=stride, steps=run.steps + 1)


class Unwritten:
    """Its owner serialises calls; those that change something do it at one stroke."""

    def __init__(self, most_bytes: int, size_of: Callable[[tuple[Record, ...]], int]) -> None:
        self._most_bytes, self._size_of = most_bytes, size_of
        self._records: deque[Record] = deque()
        self._nbytes = 0
        self._runs: list[Drop] = []
        self._current: dict[int, int] = {}  # mode -> which run goes on
        self._later: deque[Record] = deque()  # what came after the first of them

    def __bool__(self) -> bool:
        return bool(self._records or self._runs or self._later)

    def __len__(self) -> int:
        return len(self._records) + len(self._runs) + len(self._later)

    def keep(self, record: Record) -> None:
        if isinstance(record, Flush):
            return  # there is nothing in it
        if not isinstance(record, (Drop, Close)):
            (self._later if self._runs else self._records).append(record)
            return
        nbytes = self._size_of((record,))
        if not self._runs and self._nbytes + nbytes <= self._most_bytes:
            self._records.append(record)
            self._nbytes += nbytes
        else:
            self._count(record)

    def _count(self, record: Drop | Close) -> None:
        numbers = (record.mode_step, record.step)
        index = self._current.get(record.mode, len(self._runs))
        run = _extended(self._runs[index], *numbers) if index < len(self._runs) else None
        if run is not None:
            self._runs[index] = run
        elif len(self._runs) < _MOST_RUNS:
            self._runs.append(Drop(record.mode, *numbers, record.time, (), 0, _REASON))
            self._current[record.mode] = len(self._runs) - 1

    def first(self) -> Record | None:
        """What is to be written next."""
        return next((some[0] for some in (self._records, self._runs, self._later) if some), None)

    def written(self) -> None:
        """The first one is."""
        self._current.clear()  # what comes from now on begins another run
        if self._records:
            self._records.popleft()
        elif self._runs:
            del self._runs[0]
        else:
            self._later.popleft()
        if not self:
            self._nbytes = 0
