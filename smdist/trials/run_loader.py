"""Read what is new in a run: from a coordinator's snapshot, from the ranks, or from both.

Called by `LiveTrial`, one `poll` at a time, on the event loop that owns the store.

1. If a coordinator has merged the run, its newest snapshot is read. While the coordinator works, that
   is all (`smdist.trials.freshness` decides whether it works).
2. After its final snapshot, sessions are listed in case the job was started again without it. Each rank
   that did not end is asked for its next manifest, in case its buffer was recovered.
3. If the coordinator has gone silent, or there is none, the ranks are read (`RankLoader`).

`RefreshDepth` makes a poll look closer. Damaged objects become `RunUpdate.troubles`; NoSuchRun,
UnsupportedFormat and errors of the store are raised.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Literal

from smdist.concurrency import bounded_gather
from smdist.errors import CorruptObject, NoSuchRun, ObjectNotFound, RunReplaced
from smdist.format.manifest import RUN_KEY, Run, SamplingChanges, collections_key, layout_key
from smdist.identity import worker_name, worker_rank
from smdist.storage.run_objects import RunObjects
from smdist.storage.store import Store
from smdist.trials.freshness import RefreshDepth, stale_after_s
from smdist.trials.rank_loader import RankLoader, RunUpdate
from smdist.trials.snapshot_cache import Snapshot, SnapshotCache

__all__ = ["RunLoader", "RunUpdate"]

_JUST_NOW_S = 1.0  # no coordinator and no rank is expected to be faster
_CHECK_RUN_S = 5.0  # how often run.json is read again if nothing new was found
_MAX_DESCRIBING_RANKS = 8  # ranks whose collections are tried

RankQuestions = Literal["", "manifests", "all"]
"""What the ranks are asked for: nothing, manifests, or heartbeats and collections as well."""


class RunLoader:
    def __init__(
        self, store: Store, snapshots: SnapshotCache | None = None, concurrency: int = 32
    ) -> None:
        self._store, self._objects = store, RunObjects(store)
        self._ranks = RankLoader(self._objects, concurrency)
        self._snapshots = snapshots
        self._concurrency = concurrency
        self._pinned: Snapshot | None = None
        self._unconfirmed = RunUpdate()
        self._layouts: set[str] = set()
        self._wanted: set[str] = set()
        self._described = False
        self._asked_at = float("-inf")  # when the ranks were read
        self._ahead = False  # the ranks had more than the snapshot
        self._checked_at, self._check_due = time.monotonic(), False  # run.json
        self.replaced: RunReplaced | None = None
        self.troubles: dict[str, str] = {}  # besides those of polls

    async def run(self) -> Run:
        """Read `run.json`; raise NoSuchRun if there is none yet."""
        try:
            run = await self._objects.run()
        except ObjectNotFound:
            if not await self._store.list("sessions/"):
                raise NoSuchRun(self._store.url) from None
            run = await self._objects.run()  # written a moment ago, or removed
        self._ranks.run_id = run.run_id
        return run

    async def poll(self, depth: RefreshDepth = "opening") -> RunUpdate:
        """Return what is new since the last confirmed poll; nothing once the run was replaced."""
        update = self._unconfirmed
        if self.replaced is not None:
            return update
        questions = await self._poll_snapshot(update, depth)
        describe = update.base is not None
        if questions:
            live = await self._poll_ranks(update, questions)
            if not await self._is_same_run(update):
                return self._unconfirmed
            describe = describe or not self._described or (live and questions == "all")
        self._wanted |= update.named_layouts - self._layouts
        await bounded_gather(
            partial(self._load_layout, update), sorted(self._wanted), self._concurrency
        )
        if describe:
            await self._load_collections(update)
        if questions == "all" or update.base is not None:
            await self._ranks.report_lost_manifests(update)
        return update

    def confirm(self) -> None:
        """Forget the last update: it was applied. Until then every poll returns it again."""
        self._unconfirmed = RunUpdate()

    @property
    def snapshot_may_be_stale(self) -> bool:
        """Return whether the ranks may have more than the snapshot that was loaded last."""
        pinned = self._pinned
        return pinned is not None and not pinned.pointer.final and not self._asked_just_now

    @property
    def _asked_just_now(self) -> bool:
        return time.monotonic() - self._asked_at <= _JUST_NOW_S

    async def _poll_snapshot(self, update: RunUpdate, depth: RefreshDepth) -> RankQuestions:
        """Move on to the newest snapshot; return what to ask the ranks for besides."""
        if self._snapshots is None:
            return "all"
        newest = await self._snapshots.newest(self._ranks.run_id)
        update.troubles.update(self._snapshots.troubles)
        if newest is None:
            return "all"
        before, self._pinned = self._pinned, newest
        if before is None or newest.view is not before.view:
            self._resume(newest, update)
        if newest.pointer.final:
            return "all" if depth != "opening" or await self._ranks.has_more(update) else ""
        writer = await self._snapshots.writer_state(newest)
        if writer == "gone" or depth == "sure" or (writer == "idle" and self._ahead):
            return "all"
        if depth == "close":
            return "" if self._asked_just_now else "manifests"
        asked_s = time.monotonic() - self._asked_at
        if writer == "live" or (depth == "following" and asked_s <= stale_after_s(newest.pointer)):
            return ""
        return "manifests"

    def _resume(self, snapshot: Snapshot, update: RunUpdate) -> None:
        """Continue from a newer snapshot."""
        self._ahead = False
        update.base = snapshot.view
        for digest in snapshot.layouts.keys() - self._layouts:
            update.layouts[digest] = snapshot.layouts[digest]
            self._layouts.add(digest)
        self._ranks.resume(snapshot.view)
        for chunks in snapshot.view.sealed.values():
            for chunk in chunks.chunks:
                for run in chunk.ref.runs:
                    self._wanted.update(run.layouts)
        for _, _, known in snapshot.view.ranks():
            for blocks in known.steps.values():
                self._wanted.update(entry.layout for entry in blocks if entry.layout)
        self._wanted -= self._layouts

    async def _poll_ranks(self, update: RunUpdate, questions: RankQuestions) -> bool:
        """Read what is new of the ranks; return whether any of them was live."""
        news = await self._ranks.poll(update, heartbeats=questions == "all")
        self._ahead = self._ahead or news.manifests
        self._check_due = self._check_due or news.late
        self._asked_at = time.monotonic()
        return news.live

    async def _is_same_run(self, update: RunUpdate) -> bool:
        """Check that what was read is of the run that was opened.

        A run claims its location before its ranks write there, so `run.json` is read afterwards.
        """
        own = self._ranks.run_id
        due = time.monotonic() - self._checked_at >= _CHECK_RUN_S
        if not own or not (due or self._check_due):
            return True
        try:
            found = (await self._objects.run()).run_id
        except (ObjectNotFound, CorruptObject) as error:
            update.troubles[RUN_KEY] = f"{RUN_KEY} of run {own} cannot be read: {error}"
            return True
        self._checked_at, self._check_due = time.monotonic(), False
        if found != own:
            self.replaced = RunReplaced(self._store.url, own, found)
            self._unconfirmed = RunUpdate(troubles={RUN_KEY: str(self.replaced)})
        return self.replaced is None

    async def sampling_changes(self) -> list[SamplingChanges]:
        """Read what overhead budgets have changed, in order of attempt and rank."""

        async def load(key: str) -> SamplingChanges | None:
            try:
                return await self._objects.sampling_changes(key)
            except (ObjectNotFound, CorruptObject) as error:
                self.troubles[key] = f"{key} was ignored: {error}"
                return None

        keys = await self._store.list("thinned/")
        loaded = await bounded_gather(load, keys, self._concurrency)
        found = [one for one in loaded if one is not None]
        return sorted(found, key=lambda one: (one.attempt, worker_rank(one.worker)))

    async def _load_layout(self, update: RunUpdate, digest: str) -> None:
        key = layout_key(digest)
        try:
            layout = await self._objects.layout(digest)
        except (ObjectNotFound, CorruptObject) as error:
            update.troubles[key] = f"{key} cannot be read: {error}"
            return
        update.layouts[digest] = layout
        self._layouts.add(digest)
        self._wanted.discard(digest)

    async def _load_collections(self, update: RunUpdate) -> None:
        """Read the collections of the lowest rank that has any: all ranks share one configuration.

        A rank stores its collections before its first manifest.
        """
        cursors = self._ranks.cursors
        for rank in sorted({rank for _, rank in cursors})[:_MAX_DESCRIBING_RANKS]:
            key = collections_key(worker_name(rank))
            try:
                update.collections = await self._objects.collections(rank)
            except ObjectNotFound:
                if any(cursor.next for (_, r), cursor in cursors.items() if r == rank):
                    update.troubles[key] = f"{key} is missing; collections may be incomplete"
                continue
            except CorruptObject as error:
                update.report(key, error)
                continue
            self._described = True
            return
