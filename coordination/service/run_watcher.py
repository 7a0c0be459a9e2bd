"""Watch one run: poll it, publish snapshots, answer queries.

Used on one event loop in this order: `open` once, `poll_once` again and again (or `run`, which does
that), `close` last. `queries` may be used at any time in between. A watcher is never needed to read a
run. It may be killed at any moment; another one continues from the newest snapshot, or from nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from smdist.coordination.service.leadership import PublishIntervals
from smdist.coordination.service.poll_schedule import LIVE, PollIntervals, WatchPolicy
from smdist.coordination.service.publisher import SnapshotPublisher
from smdist.coordination.service.run_follower import (
    MakePoller,
    RunFollower,
    WatchSettings,
    read_run,
)
from smdist.coordination.service.run_queries import RunQueries, WatchedRun
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.membership import DEFAULT_TIMEOUTS, LivenessTimeouts
from smdist.coordination.view.status import RunState
from smdist.errors import CorruptObject, NoSuchRun, SmdistError, Superseded
from smdist.storage import open_store
from smdist.storage.store import Store

if TYPE_CHECKING:
    from smdist.coordination.service.hint_server import InboxAddress

__all__ = ["RunWatcher"]

_CONCURRENCY = 64  # requests at a time, so as many ranks
_REQUEST_S = 10.0  # for a request and its retries: a failure is reported, later polls retry it
_MIN_PAUSE_S = 0.05  # between two polls, however many hints come
_MAX_PAUSE_S = 30.0
_REFRESH_S = 1.0  # how long the answer for a finished run is used without looking again


class RunWatcher:
    """Follows one run and publishes its snapshots."""

    def __init__(
        self,
        url: str,
        *,
        store: Store | None = None,
        interval_s: float = 1.0,
        timeouts: LivenessTimeouts = DEFAULT_TIMEOUTS,
        now: Callable[[], float] = time.time,
        writer: str | None = None,
        take_over: bool = False,
        lease_s: float = 30.0,
        keep_s: float = 900.0,
        inbox: InboxAddress | None = None,
        make_poller: MakePoller = StorePoller,
        policy: WatchPolicy = LIVE,
    ) -> None:
        """Create a watcher; nothing is read before `open`.

        `writer` names the owner of the lease: a restart under the same name need not wait for it.
        Give an id that outlives the process, such as an actor's. A given `store` is not closed.
        `keep_s`: how long snapshots stay after they were replaced. `inbox`: where uploaders may send
        hints.
        """
        self._owns_store = store is None
        self._store = store or open_store(url, deadline_s=_REQUEST_S, concurrency=_CONCURRENCY)
        self._now, self._take_over = now, take_over
        heartbeat_s = timeouts.lost_after_s / 4
        intervals = PollIntervals(interval_s, heartbeat_s=heartbeat_s, discover_s=5 * interval_s)
        self._settings = WatchSettings(timeouts, now, intervals, policy, make_poller)
        publisher = SnapshotPublisher(
            self._store,
            owner=writer,
            now=now,
            intervals=PublishIntervals(interval_s, lease_s, heartbeat_s),
            keep_s=keep_s,
            inbox=inbox,
        )
        self._run = WatchedRun(url, publisher, self._new_follower(publisher))
        self.queries = RunQueries(self._run, now)
        self._check_run_at = 0.0
        self._failures = 0
        self._has_new_data = False
        self._refreshed_at = 0.0
        self._polling = asyncio.Lock()
        self._wake = asyncio.Event()

    @property
    def url(self) -> str:
        return self._run.url

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def state(self) -> RunState:
        return self._run.state

    @property
    def follower(self) -> RunFollower:
        return self._run.follower

    @property
    def publisher(self) -> SnapshotPublisher:
        return self._run.publisher

    def mark_unavailable(self, state: RunState, detail: str) -> None:
        """Note why the run could not be opened."""
        self._run.set_state(state, detail)

    def _new_follower(self, publisher: SnapshotPublisher) -> RunFollower:
        return RunFollower(self._store, self._settings, publisher.compact)

    def _start_over(self) -> None:
        """Forget everything that is known of the run."""
        self.publisher.reset()
        self._run.follower = self._new_follower(self.publisher)
        self._has_new_data, self._refreshed_at = False, 0.0

    # -- opening and closing ---------------------------------------------------------------------

    async def open(self) -> None:
        """Load the newest snapshot and acquire the lease.

        A run whose last snapshot is final is opened for queries only; nothing is claimed or written.
        Raise NoSuchRun (call again later), AlreadyCoordinated (another coordinator holds the lease)
        or StoreError (the store cannot be read).
        """
        run, publisher = self._run, self.publisher
        run.run_id = (await read_run(self._store)).run_id
        self._check_run_at = self._now() + self._settings.intervals.discover_s
        if run.state is RunState.WAITING:
            run.state = RunState.OPENING
        pointer = await publisher.read_pointer()
        if pointer is not None and pointer.final:
            loaded = await self.follower.load(run.run_id, pointer)
            if loaded and not self.follower.trouble and await self._is_still_finished():
                await publisher.begin_finished(self.follower)
                run.set_state(RunState.FINISHED)
                return
        await publisher.acquire(take_over=self._take_over)
        newest = publisher.pointer
        if newest is not None and (newest != pointer or not newest.final):
            await self.follower.load(run.run_id, newest)
        run.set_state(RunState.WATCHING)
        await publisher.begin(self.follower)

    async def _is_still_finished(self) -> bool:
        has_more = await self.follower.has_more()
        return (
            not has_more and not self.follower.poller.troubles and self.follower.all_ranks_final()
        )

    async def close(self) -> None:
        """Give back the lease. Facts that are in no snapshot yet are read again by the next watcher."""
        async with self._polling:
            if self.state in (RunState.WATCHING, RunState.OPENING):
                with contextlib.suppress(SmdistError, OSError):
                    await self.publisher.release()
                self._run.set_state(RunState.STOPPED, "the coordinator was stopped")
            if self._owns_store:
                await self._store.close()

    # -- polling ---------------------------------------------------------------------------------

    async def poll_once(self) -> bool:
        """Read and apply what is new, publish a snapshot if one is due; return whether it was.

        Errors of the store are reported by `status`, not raised. Raise Superseded if another
        coordinator took over. The state is WAITING afterwards if the run was removed: call `open`.
        """
        async with self._polling:
            if self.state is not RunState.WATCHING:
                return False
            if self._now() >= self._check_run_at and not await self._is_same_run():
                return False
            try:
                await self._read_new_facts()
                written = await self.publish_if_due()
            except Superseded as error:
                self._run.set_state(RunState.SUPERSEDED, str(error))
                raise
            except (SmdistError, OSError) as error:
                self._failures += 1
                self._run.trouble = f"no snapshot can be written: {error}"
                return False
            self._failures = self._failures + 1 if self.follower.poller.is_failing else 0
            return written

    async def publish_if_due(self) -> bool:
        """Publish a snapshot of what was read, if one is due; return whether it was."""
        written = await self.publisher.publish_if_due(self.run_id, self.follower)
        if written:
            self._run.trouble = ""
        if self.publisher.final:
            self._run.set_state(RunState.FINISHED)
        return written

    async def _read_new_facts(self) -> None:
        try:
            await self.follower.poll(self.publisher.renew, self.publisher.intervals.renew_s)
        except CorruptObject:
            self._start_over()  # more ranks than can be reported
            raise
        finally:
            self._run.notify()

    async def _is_same_run(self) -> bool:
        """Check that the run is still there; start over if it was removed or replaced.

        Snapshots name their run, so a reader never takes one for that of the new run.
        """
        run = self._run
        poller, discover_s = self.follower.poller, self._settings.intervals.discover_s
        self._check_run_at = self._now() + max(discover_s, poller.quiet_s)
        try:
            found = (await read_run(self._store)).run_id
        except NoSuchRun:
            found = ""
        except (SmdistError, OSError):
            return True  # nothing is known to have changed
        if found == run.run_id:
            return True
        what = f"run {found} is there now" if found else "its run.json is gone"
        run.replaced = f"run {run.run_id} was removed while it was watched: {what}"
        self._start_over()
        run.trouble = ""
        run.set_state(RunState.WAITING, run.replaced)
        return False

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until stopped, superseded (raises), or the run has ended and a snapshot says so."""
        while not stop.is_set() and self.state is RunState.WATCHING:
            await self.poll_once()
            if self.state is RunState.WATCHING:
                await self._pause(stop)

    async def _pause(self, stop: asyncio.Event) -> None:
        interval_s = self.publisher.intervals.interval_s
        due_in_s = self.follower.poller.next_due() - self._now()
        wait_s = min(max(due_in_s, _MIN_PAUSE_S), interval_s, self.publisher.intervals.renew_s)
        if self._failures:
            wait_s = min(interval_s * 2.0 ** min(self._failures, 16), _MAX_PAUSE_S)
        else:
            await asyncio.sleep(min(_MIN_PAUSE_S, interval_s))
        await self.wait(stop, wait_s)

    async def wait(self, stop: asyncio.Event, seconds: float) -> None:
        """Wait that long, or until stopped or a hint arrives."""
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self._wake)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._wake.clear()

    def hint(self, worker: str, attempt: int, seq: int) -> None:
        """Read a rank now: its manifest `seq` was reported as stored."""
        self.follower.poller.hint(worker, attempt, seq)
        self._wake.set()

    # -- a finished run --------------------------------------------------------------------------

    async def has_new_data(self) -> bool:
        """Check whether a finished run has more: new ranks, or recovered data of lost ones.

        Also True if another run took its place; the state is WAITING then.
        """
        async with self._polling:
            if not self._has_new_data:
                same = await self._is_same_run()
                self._has_new_data = not same or await self.follower.has_more()
                self._refreshed_at = self._now()
                if not self._has_new_data:
                    await self.publisher.clean_up()
            return self._has_new_data

    async def refresh_if_finished(self) -> bool:
        """Check `has_new_data` for a query, at most once a second, and wake up the owner's task."""
        valid_s = min(_REFRESH_S, self.publisher.intervals.interval_s)
        is_valid = self._now() < self._refreshed_at + valid_s
        found = self._has_new_data if is_valid else await self.has_new_data()
        if found:
            self._wake.set()
        return found
