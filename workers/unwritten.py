"""Records that the journal has no room for: kept until it has, the last of them only counted.

A step whose drops are not recorded must not look whole. So once no more is kept, neither drops nor
closes are, but for one drop of the last step: that step may go on in the journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from smdist.record import Close, Drop, End, Flush, Record, Trouble

__all__ = ["Unwritten"]


class Unwritten:
    """Its owner serialises calls."""

    def __init__(self, most_bytes: int, size_of: Callable[[tuple[Record, ...]], int]) -> None:
        self._most_bytes, self._size_of = most_bytes, size_of
        self.clear()

    def clear(self) -> None:
        self._records: list[Record] = []
        self._nbytes = 0
        self._steps: tuple[int, int] | None = None  # first and last of those only counted
        self._last: Drop | None = None

    def __bool__(self) -> bool:
        return bool(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, record: Record) -> None:
        if isinstance(record, Flush):
            return  # there is nothing in it
        nbytes = self._size_of((record,))
        if not isinstance(record, (Drop, Close)):
            self._records.append(record)
        elif self._steps is None and self._nbytes + nbytes <= self._most_bytes:
            self._records.append(record)
            self._nbytes += nbytes
        else:
            self._count(record)

    def _count(self, record: Drop | Close) -> None:
        first = record.step if self._steps is None else self._steps[0]
        if self._steps is None:
            self._records.append(Trouble("", record.step, time.time()))
        self._steps = (first, record.step)
        if isinstance(record, Drop):
            start = (record.mode, record.mode_step, record.step, record.time)
            self._last = Drop(*start, record.names[:1], record.nbytes, record.reason)
        elif self._last is not None and self._last.step == record.step:
            self._last = None  # over, and without its close it never looks whole

    def records(self) -> tuple[Record, ...]:
        """In their order; all of them fit into `most_bytes` and little more."""
        if self._steps is None:
            return tuple(self._records)
        first, last = self._steps
        note = (
            f"the journal had no room for long: what of steps {first} to {last} was dropped is not "
            "listed"
        )
        told = [
            Trouble(note, record.step, record.time)
            if isinstance(record, Trouble) and not record.message
            else record
            for record in self._records
        ]
        if self._last is not None:
            told.insert(len(told) - isinstance(told[-1], End), self._last)
        return tuple(told)
