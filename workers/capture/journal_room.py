"""Append records to the journal within the limits of buffer and file system.

A record without values that finds no room is kept in memory, together with everything after it:
nothing overtakes it. A part without room is refused instead, since its bytes take much more. The kept
records therefore tell what was dropped. Not thread-safe: a `Capture` calls it under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from smdist.errors import SpoolUnavailable
from smdist.format.journal_records import Record
from smdist.workers.capture.buffer import CaptureBuffer
from smdist.workers.capture.deferred_records import DeferredRecords
from smdist.workers.capture.part_plan import PartPlan
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalFileFull, JournalWriter
from smdist.workers.spool.spool import Doorbell

__all__ = ["BufferLimitReached", "JournalRoom"]

MakeRecord = Callable[[int], Record]  # from the number of its kind

_RETRY_S = 0.5  # between two attempts to create a journal file on a full file system
_MAX_KEPT_BYTES = 1 << 20


class BufferLimitReached(Exception):
    """The limit of the buffer leaves no room for a part or its record."""


class JournalRoom:
    def __init__(
        self, journal: JournalWriter, buffer: CaptureBuffer, ack_page: AckPage, doorbell: Doorbell
    ) -> None:
        self._journal, self._buffer = journal, buffer
        self._ack_page, self._doorbell = ack_page, doorbell
        self.kinds: dict[PartPlan, int] = {}  # declared in the current journal file, with numbers
        self._declared_in = journal.file_index
        max_bytes = min(buffer.margin_bytes // 2, _MAX_KEPT_BYTES)
        self._kept = DeferredRecords(max_bytes, journal.size_of)
        self.obstacle = ""  # why records are kept; empty when none are
        self._error_type: type[Exception] = BufferLimitReached
        self._retry_unless = (-1, 0.0)  # acknowledged ordinal at the last attempt, and until when
        self._make_room(())

    @property
    def kept(self) -> int:
        """Return the number of records that have found no room so far."""
        return len(self._kept)

    def append(self, record: Record) -> None:
        """Append `record`, or keep it until there is room."""
        try:
            if not self.obstacle or self.write_kept():
                self._append_alone(record)
                return
        except (BufferLimitReached, SpoolUnavailable) as error:
            self.obstacle, self._error_type = str(error), type(error)
        self._kept.add(record)
        self.kinds.clear()  # gradients must not overtake it on their short path

    def append_part(self, plan: PartPlan, make_record: MakeRecord, *, values: bool = False) -> int:
        """Append the record of a part and return its ordinal; declare its kind first if needed.

        Set `values` if the record holds the values itself. Raise BufferLimitReached or
        SpoolUnavailable when there is no room.
        """
        if self.obstacle and not self.write_kept():
            raise self._error_type(self.obstacle)
        try:
            return self._append_declared(plan, make_record)
        except JournalFileFull:
            self._make_room((plan.declaration(0), make_record(0)), values=values)
            return self._append_declared(plan, make_record)

    def write_kept(self) -> bool:
        """Try to write the kept records. Return whether none is left."""
        if not self._kept:
            self.obstacle = ""
            return True
        acked, now = self._ack_page.acked, time.monotonic()
        if acked == self._retry_unless[0] and now < self._retry_unless[1]:
            return False
        self._retry_unless = (acked, now + _RETRY_S)
        try:
            while (record := self._kept.first()) is not None:
                self._append_alone(record)
                self._kept.remove_first()
        except (BufferLimitReached, SpoolUnavailable) as error:
            self.obstacle, self._error_type = str(error), type(error)
            return False
        self.obstacle = ""
        self._doorbell.ring()
        return True

    def repair(self) -> None:
        """Forget declarations of another file. Called after the journal's own repair."""
        if self._declared_in != self._journal.file_index:
            self._forget_kinds()

    def _forget_kinds(self) -> None:
        self.kinds.clear()
        self._declared_in = self._journal.file_index

    def _append_alone(self, record: Record) -> None:
        try:
            self._journal.append(record)
        except JournalFileFull:
            self._make_room((record,))
            self._journal.append(record)

    def _append_declared(self, plan: PartPlan, make_record: MakeRecord) -> int:
        kind = self.kinds.get(plan)
        if kind is None:
            kind = len(self.kinds)
            self._journal.append(plan.declaration(kind))
            self.kinds[plan] = kind
        return self._journal.append(make_record(kind))

    def _make_room(self, records: tuple[Record, ...], *, values: bool = False) -> None:
        journal, buffer = self._journal, self._buffer
        need = journal.size_of(records)
        buffer.reclaim(self._ack_page.acked)
        allowed = buffer.allow_journal_bytes(
            need, journal.written_bytes, journal.next_ordinal, values=values
        )
        if allowed < need:
            raise BufferLimitReached(f"the buffer of {buffer.limit_bytes} bytes was full")
        if not journal.fits(need):
            try:
                journal.make_room(records)
            except OSError as error:
                if error.errno is None:  # raised by a signal handler, such as TimeoutError
                    raise
                raise SpoolUnavailable(f"cannot continue the journal: {error}") from error
            self._forget_kinds()
        journal.limit_growth(allowed)
