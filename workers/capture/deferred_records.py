"""Records that the journal has no room for, kept in memory until it has.

A step whose drops are not recorded must not look complete, nor as if it had never been due. Records
are kept in full up to a limit. After that, drops and closes become one drop per step without names.
Steps at equal distances, as a schedule makes them, share one record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from smdist.format.journal_records import Close, Drop, Flush, Record

__all__ = ["DeferredRecords"]

_REASON = "the journal had no room for long: what was dropped of this step is not listed"
_MAX_RUNS = 10_000


class DeferredRecords:
    """Not thread-safe: the owner serialises calls. Each change is a single assignment or call."""

    def __init__(self, max_bytes: int, size_of: Callable[[tuple[Record, ...]], int]) -> None:
        self._max_bytes, self._size_of = max_bytes, size_of
        self._records: deque[Record] = deque()
        self._nbytes = 0
        self._runs: list[Drop] = []
        self._open_runs: dict[int, int] = {}  # mode -> index of the run that may be extended
        self._later: deque[Record] = deque()  # records after the first run

    def __bool__(self) -> bool:
        return bool(self._records or self._runs or self._later)

    def __len__(self) -> int:
        return len(self._records) + len(self._runs) + len(self._later)

    def add(self, record: Record) -> None:
        if isinstance(record, Flush):
            return  # it holds no information
        if not isinstance(record, (Drop, Close)):
            (self._later if self._runs else self._records).append(record)
            return
        nbytes = self._size_of((record,))
        if not self._runs and self._nbytes + nbytes <= self._max_bytes:
            self._records.append(record)
            self._nbytes += nbytes
        else:
            self._coalesce(record)

    def _coalesce(self, record: Drop | Close) -> None:
        """Keep only the step of `record`, in the run of its mode."""
        numbers = (record.mode_step, record.step)
        index = self._open_runs.get(record.mode, len(self._runs))
        run = _extended(self._runs[index], *numbers) if index < len(self._runs) else None
        if run is not None:
            self._runs[index] = run
        elif len(self._runs) < _MAX_RUNS:
            self._runs.append(Drop(record.mode, *numbers, record.time, (), 0, _REASON))
            self._open_runs[record.mode] = len(self._runs) - 1

    def first(self) -> Record | None:
        """Return the record to be written next."""
        return next((some[0] for some in (self._records, self._runs, self._later) if some), None)

    def remove_first(self) -> None:
        """Forget the first record: it is written."""
        self._open_runs.clear()  # later steps begin another run
        if self._records:
            self._records.popleft()
        elif self._runs:
            del self._runs[0]
        else:
            self._later.popleft()
        if not self:
            self._nbytes = 0


def _extended(run: Drop, mode_step: int, step: int) -> Drop | None:
    """Return `run` with one more step, None if the distance to its last step differs."""
    last = run.steps - 1
    if (run.mode_step + last * run.mode_stride, run.step + last * run.stride) == (mode_step, step):
        return run
    mode_stride, stride = (
        (run.mode_stride, run.stride) if last else (mode_step - run.mode_step, step - run.step)
    )
    expected = (run.mode_step + run.steps * mode_stride, run.step + run.steps * stride)
    if expected != (mode_step, step):
        return None
    return msgspec.structs.replace(run, mode_stride=mode_stride, stride=stride, steps=run.steps + 1)
