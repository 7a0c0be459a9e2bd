"""Read journal records, hold them until they are batched, and track the open step and the end."""

from __future__ import annotations

from smdist.format.journal_records import Close, Drop, End, Inline, Part, Piece, Record
from smdist.format.manifest import Heartbeat
from smdist.identity import StepRef
from smdist.workers.spool.journal import JournalReader
from smdist.workers.spool.spool import SpoolInfo
from smdist.workers.upload.batch import without
from smdist.workers.upload.batching import Pending
from smdist.workers.upload.commit import Ending

__all__ = ["Intake"]

_AT_ONCE = 16  # records read before it is asked whether more may be held


class Intake:
    def __init__(self, info: SpoolInfo) -> None:
        self._info = info
        self.pending = Pending()
        self.end: End | None = None
        self._step = -1
        self._open: StepRef | None = None
        self._closed: StepRef | None = None

    def read(self, journal: JournalReader, now: float, *, ended: bool = False) -> bool:
        """Read new records up to the memory limit; return whether the journal has no more.

        `ended`: the training process is gone.
        """
        while not self.pending.full:
            pieces = [self._sound(piece) for piece in journal.read(_AT_ONCE, ended=ended)]
            self.pending.add(pieces, now)
            if len(pieces) < _AT_ONCE:
                return True
        return False

    def _sound(self, piece: Piece) -> Piece:
        try:
            self._note(piece.record)
        except ValueError as error:  # of a mode that does not exist
            return without(piece, error)
        return piece

    def _note(self, record: Record) -> None:
        if isinstance(record, End):
            self.end = record
        elif isinstance(record, Close):
            self._closed, self._open = record.ref, None
            self._step = max(self._step, record.step)
        elif isinstance(record, (Part, Inline, Drop)):
            if record.ref != self._closed:  # else: a late part
                self._open = record.ref
            self._step = max(self._step, record.step)

    def heartbeat(self, now: float, bytes_in_flight: int) -> Heartbeat:
        session = self._info.session
        return Heartbeat(
            session=session.session,
            rank=session.rank,
            attempt=session.attempt,
            time=now,
            interval_s=self._info.upload.heartbeat_s,
            step=self._step,
            pending_bytes=self.pending.nbytes + bytes_in_flight,
        )

    def ending(self) -> Ending:
        """Return how the rank ended, given that no more records will come."""
        if self.end is not None:
            return Ending("ended", self.end.reason)
        reason = f"process {self._info.trainer_pid} on {self._info.session.host} died without closing its hook"
        if self._open is not None:
            mode, mode_step, _ = self._open
            return Ending("lost", f"{reason}, within step {mode_step} of {mode.name}")
        return Ending("lost", reason)
