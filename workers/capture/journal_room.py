"""What a rank says, into its journal and in order, room or no room.

A record that finds no room is kept in memory, and everything after it, until there is some: nothing
overtakes it. A part without room is refused instead, as its bytes take much more; so the records that
are kept say what was dropped. Not thread-safe: a `Capture` calls it under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from smdist.errors import SpoolUnavailable
from smdist.format.journal_records import Record
from smdist.workers.capture.buffer import Buffer
from smdist.workers.capture.part_plan import PartPlan
from smdist.workers.capture.unwritten import Unwritten
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalFileFull, JournalWriter
from smdist.workers.spool.spool import Doorbell

__all__ = ["JournalRoomTaken", "Records"]

_AGAIN_S = 0.5  # between two tries to make a journal file where there was no room
_MOST_KEPT = 1 << 20


class JournalRoomTaken(Exception):
    """The limit of the buffer leaves no room in the journal."""


class Records:
    def __init__(
        self, journal: JournalWriter, buffer: Buffer, ack_page: AckPage, doorbell: Doorbell
    ) -> None:
        self._journal, self._buffer = journal, buffer
        self._ack_page, self._doorbell = ack_page, doorbell
        self.kinds: dict[PartPlan, int] = {}  # that the journal's file knows by number
        self._known_in = journal.generation  # which file that is
        most = min(buffer.margin_bytes // 2, _MOST_KEPT)
        self._kept = Unwritten(most, journal.size_of)
        self.obstacle = ""  # what keeps these from being written; empty: there are none
        self._refusal: type[Exception] = JournalRoomTaken  # of what kind it is
        self._tried = (-1, 0.0)  # how far the store was when they were last tried, and until when
        self._make_room(())

    @property
    def kept(self) -> int:
        """How many found no room so far."""
        return len(self._kept)

    def append(self, record: Record) -> None:
        """A record that is kept until there is room, should there be none."""
        try:
            if not self.obstacle or self.write_kept():
                self._append_alone(record)
                return
        except (JournalRoomTaken, SpoolUnavailable) as error:
            self.obstacle, self._refusal = str(error), type(error)
        self._kept.keep(record)
        self.kinds.clear()  # nothing overtakes it

    def append_of(
        self, plan: PartPlan, record_of: Callable[[int], Record], *, values: bool = False
    ) -> int:
        """Append a record of a part, declaring its kind first if this file does not know it.

        Where there is no room for it, JournalRoomTaken and SpoolUnavailable say why.
        """
        if self.obstacle and not self.write_kept():
            raise self._refusal(self.obstacle)
        try:
            return self._append_declared(plan, record_of)
        except JournalFileFull:
            self._make_room((plan.declaration(0), record_of(0)), values=values)
            return self._append_declared(plan, record_of)

    def write_kept(self) -> bool:
        """Whether all records that found no room are written by now."""
        if not self._kept:
            self.obstacle = ""
            return True
        acked, now = self._ack_page.acked, time.monotonic()
        if acked == self._tried[0] and now < self._tried[1]:
            return False
        self._tried = (acked, now + _AGAIN_S)
        try:
            while (record := self._kept.first()) is not None:
                self._append_alone(record)
                self._kept.written()
        except (JournalRoomTaken, SpoolUnavailable) as error:
            self.obstacle, self._refusal = str(error), type(error)
            return False
        self.obstacle = ""
        self._doorbell.ring()
        return True

    def settle(self) -> None:
        """After an exception, once the journal is settled: a kind is known where it was declared."""
        if self._known_in != self._journal.generation:
            self._forget_kinds()

    def _forget_kinds(self) -> None:
        self.kinds.clear()
        self._known_in = self._journal.generation

    def _append_alone(self, record: Record) -> None:
        try:
            self._journal.append(record)
        except JournalFileFull:
            self._make_room((record,))
            self._journal.append(record)

    def _append_declared(self, plan: PartPlan, record_of: Callable[[int], Record]) -> int:
        kind = self.kinds.get(plan)
        if kind is None:
            kind = len(self.kinds)
            self._journal.append(plan.declaration(kind))
            self.kinds[plan] = kind
        return self._journal.append(record_of(kind))

    def _make_room(self, records: tuple[Record, ...], *, values: bool = False) -> None:
        journal, buffer = self._journal, self._buffer
        need = journal.size_of(records)
        buffer.reclaim(self._ack_page.acked)
        granted = buffer.grant(need, journal.written, journal.next_ordinal, values=values)
        if granted < need:
            raise JournalRoomTaken(f"the buffer of {buffer.limit_bytes} bytes was full")
        if not journal.fits(need):
            try:
                journal.make_room(records)
            except OSError as error:
                if error.errno is None:  # a signal handler's, such as TimeoutError
                    raise
                raise SpoolUnavailable(f"cannot go on with the journal: {error}") from error
            self._forget_kinds()
        journal.allow(granted)
