"""Send what the training process writes to the journal, until all of it is stored.

The loop wakes when the doorbell rings, when a batch is old enough, when one was committed, and when the
training process exits. It ends after the `End` record, or after that exit, once everything is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smdist.format.journal_records import Piece
from smdist.limits import MAX_UNCOMMITTED_SEGMENTS
from smdist.storage.store import HasParts
from smdist.workers.spool.journal import JournalReader
from smdist.workers.spool.spool import Doorbell, Spool, SpoolInfo
from smdist.workers.upload.batch import Arenas, Batch, nothing, prepare, without
from smdist.workers.upload.batching import decide
from smdist.workers.upload.commit import Committer, Ending
from smdist.workers.upload.intake import Intake
from smdist.workers.upload.retry import Retrier, RetryDeadlineExceeded

__all__ = ["UploadLoop"]

_MAX_IN_FLIGHT = MAX_UNCOMMITTED_SEGMENTS  # batches, each mostly one request; a new one only below three full ones' bytes
_MIN_POLL_S = 0.005  # between two looks at the journal, however often the bell rings
_MAX_POLL_S = 1.0  # look at least so often: parts of an open step ring no bell


@dataclass
class UploadLoop:
    """Call `run` once. `info` is that of the spool after the rank has joined the run.

    `progress` is told of every batch that was committed. Set `wake` when `trainer_gone` was set or
    `drains` has changed: whether everything is to be written out at once.
    """

    spool: Spool
    info: SpoolInfo
    intake: Intake
    committer: Committer
    retrier: Retrier
    progress: Callable[[Batch], None]
    wake: asyncio.Event
    trainer_gone: asyncio.Event
    drains: Callable[[], bool]
    life: str = field(default_factory=lambda: secrets.token_hex(4))

    def __post_init__(self) -> None:
        self._arenas = Arenas(self.spool)

    async def run(self, upto: int) -> Ending:
        """Upload the records from `upto` on; return how the rank ended."""
        async with contextlib.AsyncExitStack() as stack:
            journal = stack.enter_context(contextlib.closing(JournalReader(self.spool, upto)))
            doorbell = stack.enter_context(contextlib.closing(Doorbell(self.spool)))
            stack.callback(self._arenas.close)
            stack.push_async_callback(self.committer.close)
            return await self._loop(journal, doorbell, upto)

    async def _loop(self, journal: JournalReader, doorbell: Doorbell, upto: int) -> Ending:
        pending, ending = self.intake.pending, None
        while True:
            self.wake.clear()
            doorbell.drain()
            # Asked before reading: what the training process wrote before it died is read then.
            gone, now = self.trainer_gone.is_set(), time.monotonic()
            whole = self.intake.read(journal, now, ended=gone)
            if self.intake.end is not None:
                self.retrier.set_idle_deadline(self.info.upload.drain_deadline_s)
            self._acknowledge(journal)
            if ending is not None and not self.committer.in_flight:
                return ending
            wake_at = None
            if ending is None and self._has_room():
                over = gone or self.intake.end is not None
                cut, wake_at = decide(pending, self.info.upload, now, drain=over or self.drains())
                if cut is not None or (over and whole and not pending):
                    pieces = pending.take(cut) if cut is not None else ()
                    if over and whole and not pending:
                        ending = self.intake.ending()
                    upto = await self._launch(pieces, upto, ending)
                    continue
            await self._sleep(doorbell, wake_at)

    def _has_room(self) -> bool:
        most_bytes = (_MAX_IN_FLIGHT - 1) * self.info.upload.segment_bytes
        committer = self.committer
        return committer.in_flight < _MAX_IN_FLIGHT and committer.bytes_in_flight < most_bytes

    def _acknowledge(self, journal: JournalReader) -> None:
        for batch in self.committer.finished():
            journal.remove_before(batch.news.upto)
            self._arenas.forget()
            self.progress(batch)

    async def _launch(self, pieces: Sequence[Piece], upto: int, ending: Ending | None) -> int:
        """Send `pieces` on their way, usually as one batch; where the next one begins."""
        committer = self.committer
        if not pieces:
            committer.launch(nothing(upto, committer.seq), ending, self.wake.set)
        while pieces:
            batch = await self._prepare(pieces)
            pieces = [piece for piece in pieces if piece.ordinal >= batch.news.upto]
            committer.launch(batch, None if pieces else ending, self.wake.set)
            upto = batch.news.upto
        return upto

    async def _prepare(self, pieces: Sequence[Piece]) -> Batch:
        """Prepare a batch of all `pieces`, or of those before the first invalid one."""
        run_id, session = self.spool.info.run.run_id, self.info.session
        whose = (run_id, session, self.committer.seq, self.life)
        while True:
            work = functools.partial(prepare, pieces, self._arenas, *whose)
            try:
                return await self.retrier.run(
                    "reading the spool",
                    functools.partial(asyncio.to_thread, work),
                    retry_on=(OSError, MemoryError),
                )
            except RetryDeadlineExceeded:
                raise
            except Exception as error:  # noqa: BLE001 - no record may stop those behind it
                if len(pieces) > 1:
                    pieces = pieces[: len(pieces) // 2]
                else:
                    pieces = [without(pieces[0], error)]

    async def _sleep(self, doorbell: Doorbell, wake_at: float | None) -> None:
        store = self.committer.store
        if isinstance(store, HasParts):
            self.retrier.note_progress(store.parts_stored)
        self.retrier.raise_if_expired()
        wait_s = _MAX_POLL_S if wake_at is None else min(wake_at - time.monotonic(), _MAX_POLL_S)
        loop = asyncio.get_running_loop()
        loop.add_reader(doorbell, self.wake.set)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.wake.wait(), max(wait_s, 0.0))
        finally:
            loop.remove_reader(doorbell)  # it rings until it is drained
        await asyncio.sleep(_MIN_POLL_S)
