"""One run, watched: new facts are read and folded, snapshots written, questions answered.

Used on one event loop, in this order: `open` once, `turn` again and again (or `run`, which does
it), `close` last. Questions (`status`, `missing`, ...) may be asked at any time between. Nothing
here is needed to read a run: whoever is killed at any moment is replaced by another one, which
goes on from the newest snapshot, or from nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from smdist.coordination.service.leadership import PendingFacts, PublishIntervals, snapshot_due
from smdist.coordination.service.lease import Lease
from smdist.coordination.service.snapshot_cleanup import SnapshotCleaner
from smdist.coordination.service.store_poller import PollCounts, PollIntervals, StorePoller
from smdist.coordination.snapshot.pack import PackedSnapshot, compact_view, load_view, pack
from smdist.coordination.view.describe import attempt_lines, latest_complete, rank_lines, waited_for
from smdist.coordination.view.membership import (
    DEFAULT_TIMEOUTS,
    LivenessTimeouts,
    RankReport,
    check_absent_ranks,
    expected_ranks,
    finished,
    rank_reports,
)
from smdist.coordination.view.run_view import Fact, StepKey, View, add
from smdist.coordination.view.status import RunState, RunStatus, StepReport
from smdist.coordination.view.step_index import StepIndex
from smdist.errors import (
    CoordinationError,
    CorruptObject,
    NoSuchRun,
    ObjectNotFound,
    SmdistError,
    StepNotYetAvailable,
    StepUnavailable,
    Superseded,
    WaitTimeout,
)
from smdist.format.intervals import subtract, to_intervals
from smdist.format.manifest import Heartbeat, RankManifest, Run
from smdist.identity import ModeKeys
from smdist.storage import open_store
from smdist.storage.run_objects import RunObjects
from smdist.storage.store import Store

if TYPE_CHECKING:
    from smdist.coordination.service.hint_server import InboxAddress

__all__ = ["RunWatcher"]

GLOBAL = ModeKeys.GLOBAL

_AT_ONCE = 64  # requests: as many ranks are asked at once
_REQUEST_S = 10.0  # for one request and its retries: what fails is seen, and tried again later
_BREATH_S = 0.05  # between two turns, however many hints come
_ASKED_S = 1.0  # how long an answer of a run that has finished stays true unasked
_MOST_PAUSE_S = 30.0
_MOST_TROUBLES = 20
_MOST_LOOSE = 100_000

MakePoller = Callable[
    [Store, Callable[[Fact], None], Callable[[], float], PollIntervals], StorePoller
]


class RunWatcher:
    def __init__(
        self,
        url: str,
        *,
        store: Store | None = None,
        interval_s: float = 1.0,
        patience: LivenessTimeouts = DEFAULT_TIMEOUTS,
        now: Callable[[], float] = time.time,
        writer: str | None = None,
        take_over: bool = False,
        lease_s: float = 30.0,
        keep_s: float = 900.0,
        inbox: InboxAddress | None = None,
        follow: MakePoller = StorePoller,
    ) -> None:
        """`writer` names who may come back: a restart under the same name waits for no lease.

        Give an actor's id, which outlives its process; left out, every watcher is a stranger.
        A given `store` stays the caller's. `keep_s`: how long snapshots stay after they were
        replaced. `inbox`: where uploaders may say that there is more. `follow` makes what reads
        for it.
        """
        self.url, self._own = url, store is None
        self._store = (
            store
            if store is not None
            else open_store(url, deadline_s=_REQUEST_S, concurrency=_AT_ONCE)
        )
        self._patience, self._now, self._take_over = patience, now, take_over
        self._inbox = inbox
        beat_s = patience.lost_after_s / 4
        self._cadence = PublishIntervals(interval_s, lease_s, beat_s)
        self._tenure = Lease(self._store, owner=writer, now=now, cadence=self._cadence)
        self._keep_s, self._follow_with = keep_s, follow
        self._rhythm = PollIntervals(interval_s, beat_s=beat_s, discover_s=5 * interval_s)
        self._run: Run | None = None
        self._run_due_at = 0.0
        self._replaced = ""
        self._state: RunState = "waiting"
        self._detail = self._trouble = ""
        self._failures = 0
        self._forget()
        self._turning = asyncio.Lock()
        self._wake, self._news = asyncio.Event(), asyncio.Event()

    def _forget(self) -> None:
        """Nothing is known of the run."""
        self._sweeper = SnapshotCleaner(self._store, self._now, self._keep_s)
        self._follow = self._follow_with(self._store, self._take, self._now, self._rhythm)
        self._view, self._book = View(), StepIndex()
        self._fresh: list[Fact] = []  # read, and not folded yet
        self._facts = self._beats = 0  # since the last snapshot
        self._loose = 0  # entries that are not in columns yet
        self._packed: PackedSnapshot | None = None
        self._written_at: float | None = None
        self._final = self._looked = self._resumed = False
        self._asked_at = 0.0
        self._manifests = 0

    # -- the life of a watcher -------------------------------------------------------------------

    async def open(self) -> None:
        """NoSuchRun: call again later. AlreadyCoordinated: another one holds the lease.

        A run that has ended, and of which the last snapshot says so, is opened to be asked about;
        nothing is claimed or written then. StoreError: the store cannot be read at all.
        """
        self._run = await self._read_run()
        self._run_due_at = self._now() + self._rhythm.discover_s
        if self._state == "waiting":
            self._state = "opening"
        pointer = await self._tenure.look()
        if pointer is not None and pointer.final and await self._load():
            found = PollCounts()
            await self._follow.look_again(found)
            if not found.facts and not self._follow.troubles and self._all_said():
                self._final = True
                self._become("finished", "")
                with contextlib.suppress(SmdistError, OSError):
                    await self._sweeper.inherit(pointer, self._chunks())
                    await self._sweeper.finished()
                return
        await self._tenure.begin(take_over=self._take_over)
        if self._tenure.pointer != pointer or not (pointer and pointer.final):
            await self._load()
        self._become("watching", "")
        with contextlib.suppress(SmdistError, OSError):  # a courtesy each
            await self._sweeper.inherit(self._tenure.pointer, self._chunks())
            if self._inbox is not None:
                await self._inbox.announce(self._store, self._tenure.epoch, self._now())

    async def _read_run(self) -> Run:
        try:
            return await RunObjects(self._store).run()
        except ObjectNotFound:
            raise NoSuchRun(self.url) from None

    async def _is_same(self) -> bool:
        """Whether the run is still there; if another one, or none, took its place, forget it.

        Its snapshots meanwhile bear its id, so that nobody takes them for those of the new one.
        """
        assert self._run is not None
        self._run_due_at = self._now() + max(self._rhythm.discover_s, self._follow.quiet_s)
        try:
            now_there = (await self._read_run()).run_id
        except NoSuchRun:
            now_there = ""
        except (SmdistError, OSError):
            return True  # whatever ails the store, or the object: nothing is known to have changed
        if now_there == self._run.run_id:
            return True
        what = f"run {now_there} took its place" if now_there else "its run.json is gone"
        self._replaced = f"run {self._run.run_id} was removed while it was watched: {what}"
        self._forget()
        self._trouble = ""
        self._become("waiting", self._replaced)
        return False

    async def _load(self) -> bool:
        """Begin with the newest snapshot; with nothing if it cannot be read, as facts remain."""
        pointer = self._tenure.pointer
        if pointer is None:
            return False
        try:
            loaded = await load_view(self._store, pointer)
            check_absent_ranks(self.url, loaded.view)
        except (SmdistError, OSError, ValueError) as error:
            self._trouble = f"snapshot {pointer.number} cannot be read, all is read anew: {error}"
            return False
        if loaded.head.run_id != self.run_id:
            self._trouble = f"snapshot {pointer.number} is of run {loaded.head.run_id}, another one"
            return False
        self._view, self._book = loaded.view, StepIndex()
        self._book.load(self._view)
        self._follow.adopt(self._view, loaded.layouts, self._book.layouts())
        return True

    def _chunks(self) -> list[str]:
        return [c.ref.key for sealed in self._view.sealed.values() for c in sealed.chunks]

    async def poll_once(self) -> bool:
        """One look: read what is new, fold it, write a snapshot if one is due; whether one was.

        Never raises for what a store does. Superseded: this watcher writes no more. State "waiting"
        afterwards: the run was removed; `open` begins with the one that is there, once there is.
        """
        async with self._turning:
            if self._state != "watching":
                return False
            if self._now() >= self._run_due_at and not await self._is_same():
                return False
            try:
                await self._poll()
                self._looked = True
                written = await self._write()
            except Superseded as error:
                self._become("superseded", str(error))
                raise
            except (SmdistError, OSError) as error:
                self._failures += 1
                self._trouble = f"a snapshot cannot be written: {error}"
                return False
            self._failures = self._failures + 1 if self._follow.failing else 0
            return written

    async def _poll(self) -> None:
        """Read and fold what is new. A backlog takes a while; the lease is to be held meanwhile."""
        polling = asyncio.ensure_future(self._follow.poll())
        try:
            while not (await asyncio.wait([polling], timeout=self._cadence.renew_s))[0]:
                await self._tenure.renew()
            self._facts += polling.result().layouts
        finally:
            if not polling.done():
                polling.cancel()
                await asyncio.wait([polling])
            self._fold()

    async def run(self, stop: asyncio.Event) -> None:
        """Turns until stopped, superseded (raises), or the run is finished and that is written."""
        while not stop.is_set() and self._state == "watching":
            await self.poll_once()
            if self._state == "watching":
                await self._pause(stop)

    async def _pause(self, stop: asyncio.Event) -> None:
        interval_s = self._cadence.interval_s
        wait_s = min(max(self._follow.next_due() - self._now(), _BREATH_S), interval_s)
        wait_s = min(wait_s, self._cadence.renew_s)
        if self._failures:
            wait_s = min(interval_s * 2.0 ** min(self._failures, 16), _MOST_PAUSE_S)
        else:
            await asyncio.sleep(min(_BREATH_S, interval_s))
        await self.wait(stop, wait_s)

    async def wait(self, stop: asyncio.Event, seconds: float) -> None:
        """Wait that long; less when there is a hint."""
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self._wake)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._wake.clear()

    def mark_unavailable(self, state: RunState, detail: str) -> None:
        """For its owner: why it could not be opened."""
        self._become(state, detail)

    async def has_new_data(self) -> bool:
        """Whether there is more than when the run had finished: ranks, or what was recovered.

        Also when there is another run in its place: its state is "waiting" then.
        """
        async with self._turning:
            if not self._resumed:
                found = PollCounts()
                same = await self._is_same()
                if same:
                    await self._follow.look_again(found)
                self._resumed = not same or found.facts > 0
                self._asked_at = self._now()
                if not self._resumed:
                    await self._sweeper.finished()
            return self._resumed

    async def refresh_if_finished(self) -> bool:
        """Of a run that has finished: `resumed`, for who asks now. Its owner is told, too."""
        fresh = self._now() < self._asked_at + min(_ASKED_S, self._cadence.interval_s)
        found = self._resumed if fresh else await self.has_new_data()
        if found:
            self._wake.set()
        return found

    async def close(self) -> None:
        """Hand back the lease. What was folded and not written yet is read again by the next."""
        async with self._turning:
            if self._state in ("watching", "opening"):
                with contextlib.suppress(SmdistError, OSError):
                    await self._leave()
                self._become("stopped", "it was told to")
            if self._own:
                await self._store.close()

    async def _leave(self) -> None:
        if self._inbox is not None:
            await self._inbox.withdraw(self._store)
        if self._tenure.epoch:
            await self._tenure.release()

    def _become(self, state: RunState, detail: str) -> None:
        self._state, self._detail = state, detail
        self._tell()

    # -- a turn ----------------------------------------------------------------------------------

    def _take(self, fact: Fact) -> None:
        """Until `_fold` nobody sees it: who asks in the middle of a look gets what the last one found."""
        self._fresh.append(fact)
        if isinstance(fact, Heartbeat):
            self._beats += 1
            return
        self._facts += 1
        if isinstance(fact, RankManifest):
            self._manifests += 1
            self._loose += len(fact.steps)
            if self._loose >= _MOST_LOOSE:
                self._fold()
                self._compact()

    def _compact(self) -> None:
        """A backlog is read faster than snapshots are written, or none can be written."""
        tenure = self._tenure
        self._view = compact_view(
            self._view, epoch=tenure.epoch, number=tenure.next_number(), writer=tenure.writer
        )
        self._loose = 0

    def _fold(self) -> None:
        fresh, self._fresh = self._fresh, []
        touched: dict[int, set[StepKey]] = {}
        for fact in fresh:
            add(self._view, fact)
        try:
            check_absent_ranks(self.url, self._view)
        except CorruptObject:
            self._forget()  # it would be too large to tell of
            raise
        for fact in fresh:
            keys = touched.setdefault(fact.attempt, set())
            if isinstance(fact, RankManifest):
                keys.update((entry.mode, entry.mode_step) for entry in fact.steps)
                keys.update((drop.mode, drop.mode_step) for drop in fact.dropped)
        self._book.update(self._view, touched)
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _has_ended(self) -> bool:
        """Every rank has said its last word. One that fell silent may come back, whenever it is."""
        now, view, follow = self._now(), self._view, self._follow
        silence = now - max((track.heard_at for track in follow.tracks.values()), default=now)
        if not (follow.settled and self._all_said()):
            return False
        if not finished(view, now, self._patience, follow.hearing()):
            return False
        newest = view.attempts[max(view.attempts)]
        heads = [known.head for known in newest.values()]
        clean = all(head and head.state == "ended" and not head.reason for head in heads)
        # A job that failed may be started again at once, by torchrun for example.
        return (clean and not self._absent()) or silence > self._patience.lost_after_s

    def _all_said(self) -> bool:
        return all(track.final for track in self._follow.tracks.values())

    def _absent(self) -> bool:
        newest = max(self._view.attempts)
        known = to_intervals(self._view.attempts[newest])
        return bool(subtract(expected_ranks(self._view, newest).intervals, known))

    async def _write(self) -> bool:
        now, tenure = self._now(), self._tenure
        final = self._has_ended()
        pending = PendingFacts(self._facts, self._beats, final)
        if not snapshot_due(pending, self._written_at, now, self._cadence):
            await tenure.renew()
            return False
        assert self._run is not None
        packed = pack(
            self._view,
            self._packed,
            run_id=self._run.run_id,
            epoch=tenure.epoch,
            number=tenure.next_number(),
            writer=tenure.writer,
            now=now,
            interval_s=self._cadence.interval_s,
            final=final,
            layouts=self._follow.layouts,
        )
        await tenure.publish(packed)
        self._packed, self._view, self._written_at = packed, packed.view, now
        self._facts = self._beats = self._loose = 0
        self._trouble, self._final = "", final
        await self._sweeper.published(packed)
        if final:
            await self._sweeper.finished()
            with contextlib.suppress(SmdistError, OSError):
                await self._leave()
            self._become("finished", "")
        return True

    # -- questions -------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        return self._state

    @property
    def run_id(self) -> str:
        return self._run.run_id if self._run is not None else ""

    @property
    def view(self) -> View:
        """What is known by now; not to be changed, and another one after the next turn."""
        return self._view

    def hint(self, worker: str, attempt: int, seq: int) -> None:
        """That manifest is said to be there: look at the rank now."""
        self._follow.hint(worker, attempt, seq)
        self._wake.set()

    def _reports(self) -> dict[int, dict[int, RankReport]]:
        now, view, hearing = self._now(), self._view, self._follow.hearing()
        return {
            attempt: rank_reports(view, attempt, now, self._patience, hearing)
            for attempt in sorted(view.attempts)
        }

    def latest_complete_step(self, mode: ModeKeys = GLOBAL) -> int:
        """-1 when there is none."""
        return self._book.latest_complete(mode)

    def step(self, step: int, mode: ModeKeys = GLOBAL) -> StepReport:
        return self._book.report(self._view, self._reports(), step, mode)

    def missing(self, step: int, mode: ModeKeys = GLOBAL) -> dict[int, str]:
        """Rank -> reason; empty when complete. StepUnavailable, StepNotYetAvailable."""
        report = self.step(step, mode)
        if report.attempt < 0:
            known = report.standing == "not saved"
            raise (StepUnavailable if known else StepNotYetAvailable)(step, mode)
        return report.missing

    async def wait_for_step(
        self, step: int, mode: ModeKeys = GLOBAL, timeout_s: float = 60.0
    ) -> StepReport:
        """How the step stands once nothing more of it is expected: complete, partial, not saved.

        WaitTimeout names who is missing; CoordinationError: nobody watches the run any more.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            news = self._news
            report = self.step(step, mode)
            if report.standing != "pending":
                return report
            if self._state in ("superseded", "stopped", "failed"):
                raise CoordinationError(f"{self.url} is not watched any more: {self._detail}")
            left_s = deadline - loop.time()
            if left_s <= 0:
                latest = self.latest_complete_step(mode)
                raise WaitTimeout(f"{self.url}: {waited_for(report, latest)}")
            # Time alone changes the answer too: a rank is given up.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), min(left_s, 1.0))

    def status(self) -> RunStatus:
        reports, pointer, book = self._reports(), self._tenure.pointer, self._book
        troubles = [text for text in (self._replaced, self._trouble) if text]
        troubles += list(self._follow.troubles.values())[:_MOST_TROUBLES]
        return RunStatus(
            url=self.url,
            run_id=self.run_id,
            # Until the first look it has nothing to tell, which is not the same as nothing there.
            state="opening" if self._state == "watching" and not self._looked else self._state,
            detail=self._detail,
            time=self._now(),
            writer=self._tenure.writer,
            epoch=pointer.epoch if pointer else 0,
            number=pointer.number if pointer else 0,
            snapshot_time=pointer.time if pointer else 0.0,
            final=self._final,
            attempts=attempt_lines(self._view, reports),
            ranks=rank_lines(reports),
            latest_complete=latest_complete(book),
            last_step=book.last_step,
            steps=len(book),
            complete_steps=book.complete,
            manifests=self._manifests,
            hints=self._follow.hints,
            troubles=tuple(troubles),
        )
