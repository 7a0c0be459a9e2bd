"""Upload one spool: from where the store says it stands to the last manifest of the rank.

`Uploader.run` is called once, on one event loop, by the uploader process (`entry_point.py`) or by
`smdist recover`. It opens the store, joins the run, finds the resume point, runs the loop and finishes.

The loop wakes when the doorbell rings, when a batch is old enough, when one was committed, and when the
training process exits. It ends after the `End` record, or after that exit, once everything is stored. The
last uploader of a run then merges the run (`final_merge.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import shlex
import time
from collections.abc import Callable, Coroutine, Sequence

from smdist.errors import SmdistError
from smdist.format.journal_records import End, Piece
from smdist.format.manifest import RankManifest, heartbeat_key
from smdist.format.stored_json import encode
from smdist.identity import worker_name
from smdist.limits import MAX_UNCOMMITTED_SEGMENTS
from smdist.messages import readable_bytes
from smdist.processes import is_stopped, watch_exit
from smdist.storage import open_store
from smdist.storage.store import HasParts, Store
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalReader
from smdist.workers.spool.spool import Doorbell, Spool
from smdist.workers.upload.batch import Arenas, Batch, captured_bytes, nothing, prepare, without
from smdist.workers.upload.batching import decide
from smdist.workers.upload.commit import (
    Committer,
    Ending,
    LateManifestFound,
    ResumePoint,
    resume_point,
    sweep_dangling,
)
from smdist.workers.upload.final_merge import Rank, merge_if_last, not_merged
from smdist.workers.upload.hint_sender import Announcer
from smdist.workers.upload.intake import Intake
from smdist.workers.upload.manifest_spans import Rolling
from smdist.workers.upload.retry import Retrier, RetryDeadlineExceeded
from smdist.workers.upload.run_guard import RunGuard, join
from smdist.workers.upload.summaries import Summary

__all__ = ["Uploader"]

_MAX_IN_FLIGHT = MAX_UNCOMMITTED_SEGMENTS  # batches, each mostly one request; a new one only below three full ones' bytes
_MIN_POLL_S = 0.005  # between two looks at the journal, however often the bell rings
_MAX_POLL_S = 1.0  # look at least so often: parts of an open step ring no bell
_DEADLINE_S = (
    10.0  # of one request and its retries; retrier, which tells the user, goes on from there
)
_SUMMARY_S = 30.0
_MERGE_S = 60.0
_DETACH_S = 1.0  # what takes longer once the training process is gone is done in the background
_END_POLL_S = 0.2
_SHUTDOWN_GRACE_S = 5.0  # for a heartbeat that is being written at the end


class Uploader:
    """Call `run` once. The caller holds the spool's lock; the spool is gone when it returns."""

    def __init__(
        self,
        spool: Spool,
        say: Callable[[str], None],
        progress: Callable[[Batch], None] = lambda _batch: None,
        detach: Callable[[str], None] = lambda _message: None,
        *,
        trusts: bool = True,
    ) -> None:
        """`progress` is told of every batch that was committed.

        `detach` is called once if the training process is gone and there is still work to do, with
        what to say of that; whoever waits for the end of the job's output waits for us until then.
        `trusts`: the place is the right one even if the run is not there, as with the environment of
        the job.
        """
        self._trusts = trusts
        self._spool, self._info, self._options = spool, spool.info, spool.info.upload
        self._say, self._progress, self._detach = say, progress, detach
        self.shutdown_requests = 0
        self._begin()

    def _begin(self) -> None:
        """Start over with nothing known of the store."""
        self._ack_page = AckPage(self._spool.path / "ack_page")
        self._guard: RunGuard | None = None
        self._intake = Intake(self._info)
        self._arenas = Arenas(self._spool)
        self._retrier = Retrier(self._ack_page, self._say, self._pending_bytes)
        self._wake = asyncio.Event()
        self._gone = asyncio.Event()  # the training process
        self._stopping = asyncio.Event()
        self._life = secrets.token_hex(4)
        self._committer: Committer | None = None
        self._summary = Summary(self._info.session)
        self._layouts: set[str] = set()
        self._merging: asyncio.Task[str] | None = None

    def request_shutdown(self) -> None:
        """Write everything out now and from now on. Asked again: stop, stored or not."""
        self.shutdown_requests += 1
        if self._merging is not None:
            self._merging.cancel()
        if self.shutdown_requests > 1:
            self._retrier.stop()
        self._wake.set()

    async def run(self, *, trainer_gone: bool = False) -> Ending:
        """How the rank ended. `trainer_gone`: the caller knows that, whatever runs by its number.

        RetryDeadlineExceeded when the store refused, or said nothing, for the whole of the deadline; ForeignObject when
        it is not ours, RankRejected when that cannot change.
        """
        while True:
            try:
                return await self._run_once(trainer_gone)
            except LateManifestFound:  # noqa: PERF203
                self._begin()
                if self.shutdown_requests > 1:
                    self._retrier.stop()

    async def _run_once(self, trainer_gone: bool) -> Ending:
        async with contextlib.AsyncExitStack() as afterwards:
            async with contextlib.AsyncExitStack() as stack:
                store, ending = await self._work(stack, afterwards, trainer_gone)
            self._spool.remove()
            if not self.shutdown_requests:
                releasing = asyncio.ensure_future(self._release_pipes())
                try:
                    await self._merge(store)
                finally:
                    releasing.cancel()
            return ending

    async def _work(
        self,
        stack: contextlib.AsyncExitStack,
        afterwards: contextlib.AsyncExitStack,
        trainer_gone: bool,
    ) -> tuple[Store, Ending]:
        stack.callback(self._ack_page.close)
        succeeds = self._ack_page.uploader_pid != 0
        self._ack_page.uploader_pid = os.getpid()
        if trainer_gone:
            self._gone.set()
        else:
            watch = watch_exit(self._info.trainer_pid, self._info.trainer_start)
            self._gone = await stack.enter_async_context(watch)
        self._in_background(stack, self._on_trainer_exit())
        store = await self._retrier.run("opening the store", self._open_store)
        afterwards.push_async_callback(store.close)
        await self._join(store)
        if self._guard is not None:
            self._in_background(stack, self._guard.follow_contested_run(self._stopping))
        start = await self._retrier.run(
            "reading the store",
            lambda: resume_point(store, self._info.session, tidy=succeeds),
        )
        if start.last is None or start.last.state == "active":
            self._in_background(stack, self._heartbeat_loop(store))
            announcer = Announcer(store, lambda: self._spool.info.run.run_id, self._info.session)
            stack.push_async_callback(announcer.close)
            rolling = Rolling(store, self._summary)
            stack.push_async_callback(rolling.close)
            committer = self._make_committer(store, start, announcer, rolling, succeeds=succeeds)
            ending = await self._upload(committer, start, stack)
            await committer.verify_before_exit()
            await rolling.close()
        else:
            self._catch_up(start)
            ending = Ending(start.last.state, start.last.reason)
        await self._summarise(store, start)
        await sweep_dangling(store, self._info.session, self._retrier)
        self._ack_page.last_error, self._ack_page.uploader_pid = "", 0
        return store, ending

    async def _join(self, store: Store) -> None:
        trusts, say = self._trusts, self._say
        watching = asyncio.get_running_loop().create_task(self._watch_for_end_record())
        try:
            self._guard = await join(
                store, self._spool, self._retrier, say, is_right_location=trusts
            )
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        info = self._info = self._spool.info
        self._intake, self._summary = Intake(info), Summary(info.session)

    async def _watch_for_end_record(self) -> None:
        """Notice that the hook was closed, even before the rank has joined the run."""
        journal, ended = JournalReader(self._spool, self._ack_page.acked), False
        try:
            while not ended:
                pieces = journal.read(1000)
                ended = any(isinstance(piece.record, End) for piece in pieces)
                await asyncio.sleep(0 if pieces else _END_POLL_S)
        finally:
            journal.close()
        self._retrier.set_idle_deadline(self._options.drain_deadline_s)

    async def _open_store(self) -> Store:
        place = self._info.place or self._info.out_dir
        opening = functools.partial(open_store, place, deadline_s=_DEADLINE_S)
        return await asyncio.to_thread(opening)

    def _make_committer(
        self,
        store: Store,
        start: ResumePoint,
        announcer: Announcer,
        rolling: Rolling,
        *,
        succeeds: bool,
    ) -> Committer:
        losses = 0

        def note(manifest: RankManifest) -> None:
            nonlocal losses
            if (
                committer.run_removals != losses
            ):  # it was put before, or after, the place was emptied
                losses = committer.run_removals
                self._summary.forget()
            else:
                self._summary.note(manifest)
                rolling.stored(manifest)
            self._layouts.update(entry.layout for entry in manifest.steps if entry.layout)
            announcer.stored(manifest.seq)

        committer = self._committer = Committer(
            store,
            self._info.session,
            self._ack_page,
            self._retrier,
            start,
            self._options.attach_bytes,
            note,
            succeeds=succeeds,
            guard=self._guard,
        )
        return committer

    async def _upload(
        self, committer: Committer, start: ResumePoint, stack: contextlib.AsyncExitStack
    ) -> Ending:
        self._catch_up(start)
        upto = self._ack_page.acked
        journal = JournalReader(self._spool, upto)
        stack.callback(journal.close)
        doorbell = Doorbell(self._spool)
        stack.callback(doorbell.close)
        stack.callback(self._arenas.close)
        stack.push_async_callback(committer.close)
        return await self._loop(journal, doorbell, committer, upto)

    def _catch_up(self, start: ResumePoint) -> None:
        """Acknowledge what an earlier uploader stored before it could acknowledge it itself."""
        ack_page = self._ack_page
        if start.last is not None and start.upto > ack_page.acked:
            nbytes = captured_bytes(self._spool, ack_page.acked, start.upto)
            ack_page.add_stored(nbytes, sum(entry.closed for entry in start.last.steps))
        ack_page.acked = max(start.upto, ack_page.acked)

    async def _summarise(self, store: Store, start: ResumePoint) -> None:
        """Leave readers one object instead of many. They can do without."""
        if self._committer is not None and self._committer.run_removals:
            return  # we remember manifests that are no longer there

        async def write() -> None:
            count = start.seq if self._committer is None else self._committer.seq
            written = self._committer is not None or not await self._summary.exists(store)
            if written:
                self._summary.session = self._spool.info.session
                await self._summary.write(store, count)
            # `run.json` may have been replaced before the summary was in the store.
            if self._guard is not None:
                stored = self._summary.session if written else None
                await self._guard.follow_run_with_summary(stored)

        bearable = (SmdistError, OSError, ValueError, asyncio.TimeoutError)
        with contextlib.suppress(*bearable):
            await asyncio.wait_for(write(), _SUMMARY_S)

    async def _merge(self, store: Store) -> None:
        """Once our rank is through, and only if all are. It is left at any moment without harm."""
        rank = Rank(self._info.session, len(self._layouts), self._summary.nbytes)
        task = self._merging = asyncio.ensure_future(merge_if_last(store, rank))
        try:
            in_time, _ = await asyncio.wait([task], timeout=_MERGE_S)
        finally:
            task.cancel()
        # Time to give back the right to write, should it hold it.
        await asyncio.wait([task], timeout=_SHUTDOWN_GRACE_S)
        note = ""
        if not in_time:
            note = not_merged(store, f"that took longer than {_MERGE_S:.0f} s")
        elif not task.cancelled():
            error = task.exception()
            note = task.result() if error is None else not_merged(store, repr(error))
        if note:
            self._say(note)

    # -- the loop --------------------------------------------------------------------------------

    async def _loop(
        self, journal: JournalReader, doorbell: Doorbell, committer: Committer, upto: int
    ) -> Ending:
        pending, ending = self._intake.pending, None
        while True:
            self._wake.clear()
            doorbell.drain()
            # Asked before reading: what the training process wrote before it died is read then.
            gone, now = self._gone.is_set(), time.monotonic()
            whole = self._intake.read(journal, now, ended=gone)
            if self._intake.end is not None:
                self._retrier.set_idle_deadline(self._options.drain_deadline_s)
            self._acknowledge(committer, journal)
            if ending is not None and not committer.in_flight:
                return ending
            wake_at = None
            if ending is None and self._has_room(committer):
                over = gone or self._intake.end is not None
                limits = self._options
                cut, wake_at = decide(
                    pending, limits, now, drain=over or self.shutdown_requests > 0
                )
                if cut is not None or (over and whole and not pending):
                    pieces = pending.take(cut) if cut is not None else ()
                    if over and whole and not pending:
                        ending = self._intake.ending()
                    upto = await self._launch(pieces, committer, upto, ending)
                    continue
            await self._sleep(committer.store, doorbell, wake_at)

    def _has_room(self, committer: Committer) -> bool:
        most_bytes = (_MAX_IN_FLIGHT - 1) * self._options.segment_bytes
        return committer.in_flight < _MAX_IN_FLIGHT and committer.bytes_in_flight < most_bytes

    def _acknowledge(self, committer: Committer, journal: JournalReader) -> None:
        for batch in committer.finished():
            journal.remove_before(batch.news.upto)
            self._arenas.forget()
            self._progress(batch)

    async def _launch(
        self, pieces: Sequence[Piece], committer: Committer, upto: int, ending: Ending | None
    ) -> int:
        """Send `pieces` on their way, usually as one batch; where the next one begins."""
        if not pieces:
            committer.launch(nothing(upto, committer.seq), ending, self._wake.set)
        while pieces:
            batch = await self._prepare(pieces, committer.seq)
            pieces = [piece for piece in pieces if piece.ordinal >= batch.news.upto]
            committer.launch(batch, None if pieces else ending, self._wake.set)
            upto = batch.news.upto
        return upto

    async def _prepare(self, pieces: Sequence[Piece], seq: int) -> Batch:
        """Prepare a batch of all `pieces`, or of those before the first invalid one."""
        run_id, session = self._spool.info.run.run_id, self._info.session
        whose = (run_id, session, seq, self._life)
        while True:
            work = functools.partial(prepare, pieces, self._arenas, *whose)
            try:
                return await self._retrier.run(
                    "reading the spool",
                    lambda work=work: asyncio.to_thread(work),  # type: ignore[misc]
                    retry_on=(OSError, MemoryError),
                )
            except RetryDeadlineExceeded:
                raise
            except Exception as error:  # noqa: BLE001 - no record may stop those behind it
                if len(pieces) > 1:
                    pieces = pieces[: len(pieces) // 2]
                else:
                    pieces = [without(pieces[0], error)]

    def _silence(self) -> str:
        if self.shutdown_requests > 1:
            return "told to stop"
        return f"the store has not answered for {self._options.drain_deadline_s:.0f} s"

    async def _sleep(self, store: Store, doorbell: Doorbell, wake_at: float | None) -> None:
        if isinstance(store, HasParts):
            self._retrier.note_progress(store.parts_stored)
        if self._retrier.expired:
            raise RetryDeadlineExceeded(self._ack_page.last_error or self._silence())
        wait_s = _MAX_POLL_S if wake_at is None else min(wake_at - time.monotonic(), _MAX_POLL_S)
        loop = asyncio.get_running_loop()
        loop.add_reader(doorbell, self._wake.set)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(wait_s, 0.0))
        finally:
            loop.remove_reader(doorbell)  # it rings until it is drained
        await asyncio.sleep(_MIN_POLL_S)

    # -- beside the loop -------------------------------------------------------------------------

    def _pending_bytes(self) -> int:
        return self._intake.pending.nbytes + (
            self._committer.bytes_in_flight if self._committer else 0
        )

    def _in_background(
        self, stack: contextlib.AsyncExitStack, work: Coroutine[None, None, None]
    ) -> None:
        """Run `work` until the stack is left. It ends by itself once `_stopping` is set."""
        task = asyncio.get_running_loop().create_task(work)

        async def stop() -> None:
            self._stopping.set()
            self._gone.set()
            await asyncio.wait([task], timeout=_SHUTDOWN_GRACE_S)
            task.cancel()

        stack.push_async_callback(stop)

    async def _on_trainer_exit(self) -> None:
        await self._gone.wait()
        self._retrier.set_idle_deadline(self._options.drain_deadline_s)
        self._wake.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _DETACH_S)
        if not self._stopping.is_set():
            waiting = readable_bytes(self._pending_bytes())
            self._detach(
                f"the process that trained is gone; {waiting} are not in {self._info.out_dir} yet and "
                f"are sent in the background, from {self._spool.path}. Should that end before all is "
                f"stored: smdist recover {shlex.quote(str(self._spool.path))}"
            )

    async def _release_pipes(self) -> None:
        """Nothing is left but to merge, which nobody waits for."""
        async with watch_exit(self._info.trainer_pid, self._info.trainer_start) as gone:
            await gone.wait()
            self._detach("")

    async def _heartbeat_loop(self, store: Store) -> None:
        """Say that the rank lives, unless a manifest has just said so. A stopped one does not."""
        session, interval_s = self._info.session, self._options.heartbeat_s
        key = heartbeat_key(worker_name(session.rank), session.attempt)
        while not self._stopping.is_set():
            spoken_at = self._committer.last_commit_at if self._committer else float("-inf")
            wait_s = spoken_at + interval_s - time.monotonic()
            if wait_s <= 0:
                if not is_stopped(self._info.trainer_pid):
                    await self._put_heartbeat(store, key)
                wait_s = interval_s
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)

    async def _put_heartbeat(self, store: Store, key: str) -> None:
        beat = self._intake.heartbeat(time.time(), self._pending_bytes())
        try:
            await store.put(key, (encode(beat, key),))
        except Exception as error:  # noqa: BLE001 - the next one comes soon
            self._retrier.failed(key, "writing the heartbeat", error, notify_user=False)
        else:
            self._retrier.succeeded(key)
