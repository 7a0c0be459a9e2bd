"""What is known of one run: read new facts, apply them to a view, say whether the run has ended.

Used by one owner (`RunWatcher`, `merge_once`) on one event loop: `load` at most once, then `poll` as
often as needed. Facts that a poll finds are queued and applied together at its end, so that queries
in between see the state of the previous poll. Errors of the store are kept in `poller.troubles`;
`CorruptObject` is raised when the run claims more ranks than can be reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from smdist.coordination.service.leadership import PendingFacts
from smdist.coordination.service.poll_schedule import PollIntervals, WatchPolicy
from smdist.coordination.service.store_poller import PollCounts, RunPoller
from smdist.coordination.snapshot.head import Pointer
from smdist.coordination.snapshot.salvage import load_readable
from smdist.coordination.view.membership import (
    LivenessTimeouts,
    RankReport,
    check_absent_ranks,
    expected_ranks,
    finished,
    rank_reports,
)
from smdist.coordination.view.run_view import Fact, StepKey, View, add
from smdist.coordination.view.step_index import StepIndex
from smdist.errors import CoordinationError, NoSuchRun, ObjectNotFound, SmdistError
from smdist.format.intervals import subtract, to_intervals
from smdist.format.manifest import Heartbeat, RankManifest, Run
from smdist.storage.run_objects import RunObjects
from smdist.storage.store import Store

__all__ = ["MakePoller", "RunFollower", "WatchSettings", "read_run"]

_MAX_LOOSE_ENTRIES = 100_000  # more of them are moved into columns before the next snapshot

MakePoller = Callable[
    [Store, Callable[[Fact], None], Callable[[], float], PollIntervals, WatchPolicy], RunPoller
]


@dataclass(frozen=True)
class WatchSettings:
    """How a run is followed; the same for every follower that a watcher makes."""

    timeouts: LivenessTimeouts
    now: Callable[[], float]
    intervals: PollIntervals
    policy: WatchPolicy
    make_poller: MakePoller


class RunFollower:
    """The view of a run and the poller that feeds it. `compact` moves a view's entries into columns."""

    def __init__(
        self, store: Store, settings: WatchSettings, compact: Callable[[View], View]
    ) -> None:
        self._store, self._settings, self._compact = store, settings, compact
        self._now = settings.now
        self.poller = settings.make_poller(
            store, self._enqueue, settings.now, settings.intervals, settings.policy
        )
        self.view, self.index = View(), StepIndex()
        self.polled = False
        self.trouble = ""  # why the snapshot could not be used, or not all of it
        self.manifests_read = 0
        self._queue: list[Fact] = []
        self._new_facts = self._new_heartbeats = 0  # since the last snapshot
        self._loose_entries = 0  # step entries that are not in columns yet
        self._lost_view: View | None = None  # the ranks of a damaged snapshot

    async def load(self, run_id: str, pointer: Pointer) -> bool:
        """Start from a snapshot; return whether it was used.

        Of a damaged snapshot everything readable is kept, and the rest is read from the manifests.
        If nothing can be used the view stays empty, and all facts are read again.
        """
        url = self._store.url
        try:
            loaded = await load_readable(self._store, pointer)
            check_absent_ranks(url, loaded.view)
        except (SmdistError, OSError, ValueError) as error:
            self.trouble = f"snapshot {pointer.number} cannot be read, reading all again: {error}"
            return False
        if loaded.head.run_id != run_id:
            self.trouble = f"snapshot {pointer.number} belongs to run {loaded.head.run_id}"
            return False
        self.view, self.index = loaded.view, StepIndex()
        self.index.load(self.view)
        self.poller.resume_from(self.view, loaded.layouts, self.index.layouts(), loaded.reread)
        if loaded.damaged:
            self.trouble = loaded.describe_damage()
            self._lost_view = loaded.lost
            self._new_facts += 1  # the next snapshot replaces the damaged objects
        return True

    def check_recovered(self) -> None:
        """Raise CoordinationError if a snapshot now would know less than the damaged one.

        That is so when both a chunk of it and manifests that the chunk was made from are damaged.
        """
        if self._lost_view is None:
            return
        for attempt, rank, before in self._lost_view.ranks():
            known = self.view.rank(attempt, rank)
            if subtract(before.seen, known.seen if known is not None else ()):
                raise CoordinationError(
                    f"{self._store.url} was not merged: {self.trouble}, and worker_{rank} lacks "
                    "manifests to replace it. The run stays readable as before"
                )

    async def poll(self, renew: Callable[[], Awaitable[None]], every_s: float) -> None:
        """Read and apply what is new. Call `renew` meanwhile: reading a backlog takes a while."""
        polling = asyncio.ensure_future(self.poller.poll())
        try:
            while not (await asyncio.wait([polling], timeout=every_s))[0]:
                await renew()
            self._new_facts += polling.result().layouts
        finally:
            if not polling.done():
                polling.cancel()
                await asyncio.wait([polling])
            self.apply()
        self.polled = True

    async def has_more(self) -> bool:
        """Check whether a run that had ended has new ranks, or more of ranks that were lost."""
        found: PollCounts = await self.poller.check_for_more()
        return found.facts > 0

    def _enqueue(self, fact: Fact) -> None:
        self._queue.append(fact)
        if isinstance(fact, Heartbeat):
            self._new_heartbeats += 1
            return
        self._new_facts += 1
        if isinstance(fact, RankManifest):
            self.manifests_read += 1
            self._loose_entries += len(fact.steps)
            if self._loose_entries >= _MAX_LOOSE_ENTRIES:
                # A backlog is read faster than snapshots are written.
                self.apply()
                self.replace_view(self._compact(self.view))

    def apply(self) -> None:
        """Apply queued facts. CorruptObject: the run claims too many ranks to be reported."""
        facts, self._queue = self._queue, []
        touched: dict[int, set[StepKey]] = {}
        for fact in facts:
            add(self.view, fact)
        check_absent_ranks(self._store.url, self.view)
        for fact in facts:
            keys = touched.setdefault(fact.attempt, set())
            if isinstance(fact, RankManifest):
                keys.update((entry.mode, entry.mode_step) for entry in fact.steps)
                keys.update((drop.mode, drop.mode_step) for drop in fact.dropped)
        self.index.update(self.view, touched)

    def replace_view(self, view: View) -> None:
        """Use `view`, which holds the same facts in columns."""
        self.view, self._loose_entries = view, 0

    def published(self, view: View) -> None:
        """Continue from the `view` of a snapshot that was stored."""
        self.replace_view(view)
        self._new_facts = self._new_heartbeats = 0
        self.trouble = ""

    def pending(self) -> PendingFacts:
        """Return what the next snapshot would say that the last one does not."""
        return PendingFacts(self._new_facts, self._new_heartbeats, self.has_ended())

    def chunk_keys(self) -> list[str]:
        return [c.ref.key for sealed in self.view.sealed.values() for c in sealed.chunks]

    def has_ended(self) -> bool:
        """Return whether every rank has ended. A silent rank may come back at any time."""
        now, timeouts, poller = self._now(), self._settings.timeouts, self.poller
        if not (poller.is_complete and self.all_ranks_final()):
            return False
        if not finished(self.view, now, timeouts, poller.last_contacts()):
            return False
        if not self._settings.policy.waits_for_restart:
            return True
        newest = self.view.attempts[max(self.view.attempts)]
        heads = [known.head for known in newest.values()]
        clean = all(head and head.state == "ended" and not head.reason for head in heads)
        silence_s = now - max((track.read_at for track in poller.tracks.values()), default=now)
        # A job that failed may be started again at once, for example by torchrun.
        return (clean and not self._lacks_ranks()) or silence_s > timeouts.lost_after_s

    def all_ranks_final(self) -> bool:
        return all(track.final for track in self.poller.tracks.values())

    def _lacks_ranks(self) -> bool:
        newest = max(self.view.attempts)
        known = to_intervals(self.view.attempts[newest])
        return bool(subtract(expected_ranks(self.view, newest).intervals, known))

    def reports(self) -> dict[int, dict[int, RankReport]]:
        """Return the state of each rank, by attempt and rank."""
        now, timeouts, contacts = self._now(), self._settings.timeouts, self.poller.last_contacts()
        return {
            attempt: rank_reports(self.view, attempt, now, timeouts, contacts)
            for attempt in sorted(self.view.attempts)
        }


async def read_run(store: Store) -> Run:
    """Return `run.json`. Raise NoSuchRun, or UnsupportedFormat if a newer smdist wrote it."""
    try:
        return await RunObjects(store).run()
    except ObjectNotFound:
        raise NoSuchRun(store.url) from None
