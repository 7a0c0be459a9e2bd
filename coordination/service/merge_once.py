"""Merge a run once, without staying: one cycle of what a coordinator does.

Called by the uploader that ends last, so that a finished run opens with a handful of requests, and by
`smdist merge`. The rules of the lease apply: of several merges at the same time one writes, and none
writes beside a coordinator at work.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from smdist.coordination.service.poll_schedule import MERGE_ONCE
from smdist.coordination.service.run_follower import RunFollower
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.run_view import StepKey, View
from smdist.coordination.view.status import RunState, RunStatus
from smdist.coordination.view.step_index import StepIndex
from smdist.errors import CoordinationError
from smdist.format.manifest import layout_key
from smdist.identity import ModeKeys
from smdist.storage.store import Store

__all__ = ["MergeResult", "MissingObjects", "merge_once"]

_CONCURRENCY = 32


@dataclass(frozen=True)
class MissingObjects:
    """Objects that are gone: key -> number of steps; `complete_steps` lack one and count as complete."""

    keys: dict[str, int]
    complete_steps: int


class MergeResult(NamedTuple):
    """`written` is False if the newest snapshot already says everything.

    `missing` is None unless the merge was asked to check that stored objects exist.
    """

    written: bool
    status: RunStatus
    missing: MissingObjects | None = None


async def merge_once(
    store: Store,
    *,
    concurrency: int = _CONCURRENCY,
    take_over: bool = False,
    check_objects: bool = False,
) -> MergeResult:
    """Write one snapshot of the run in `store` as it is now. The store is not closed.

    `check_objects` lists segments and layouts, and reports those that are gone.
    Raise AlreadyCoordinated if another writer is at work, Superseded if one took over meanwhile,
    CoordinationError if the new snapshot would know less than the one before; also NoSuchRun,
    StoreError and OSError.
    """
    watcher = RunWatcher(
        store.url,
        store=store,
        interval_s=0.0,
        take_over=take_over,
        make_poller=partial(StorePoller, concurrency=concurrency),
        policy=MERGE_ONCE,
    )
    try:
        await watcher.open()
        written = watcher.state is RunState.WATCHING and await _merge(watcher)
        status, missing = watcher.queries.status(), None
        if check_objects:
            follower = watcher.follower
            missing = await find_missing_objects(
                store, follower.view, follower.index, follower.poller.layouts
            )
        return MergeResult(written, status, missing)
    finally:
        await watcher.close()


async def _merge(watcher: RunWatcher) -> bool:
    follower, publisher = watcher.follower, watcher.publisher
    await _read_all(follower, watcher)
    pending = follower.pending()
    if publisher.pointer is not None and not pending.facts and not pending.final:
        return False
    if follower.poller.is_failing:
        trouble = next(iter(follower.poller.troubles.values()), "the store does not answer")
        raise CoordinationError(f"{watcher.url} cannot be read: {trouble}")
    follower.check_recovered()
    return await watcher.publish_if_due()


async def _read_all(follower: RunFollower, watcher: RunWatcher) -> None:
    """Poll until a poll finds no more manifests, at least once: `open` may have queued facts."""
    publisher, known = watcher.publisher, -1
    while known < follower.manifests_read:
        known = follower.manifests_read
        await follower.poll(publisher.renew, publisher.intervals.renew_s)
        if follower.poller.is_complete:
            return


async def find_missing_objects(
    store: Store, view: View, index: StepIndex, layouts: Collection[str]
) -> MissingObjects:
    """List the segments of a run and return what `view` names and is not there.

    `layouts` are the digests of those that could be read, `index` holds the steps of `view`.
    """
    # Listed after the view was read: segments are stored before the manifests that name them.
    stored = set(await store.list("segments/"))
    users: dict[str, set[tuple[int, StepKey]]] = {}
    for attempt, rank, _ in view.ranks():
        for entry in view.entries(attempt, rank):
            step = (attempt, (entry.mode, entry.mode_step))
            if entry.segment.startswith("segments/") and entry.segment not in stored:
                users.setdefault(entry.segment, set()).add(step)
            if entry.layout and entry.layout not in layouts:
                users.setdefault(layout_key(entry.layout), set()).add(step)
    keys = {key: len(steps) for key, steps in sorted(users.items())}
    affected = set[tuple[int, StepKey]]().union(*users.values())
    return MissingObjects(keys, sum(_is_complete(index, *step) for step in affected))


def _is_complete(index: StepIndex, attempt: int, key: StepKey) -> bool:
    mode, mode_step = key
    facts = index.find(mode_step, ModeKeys(mode))
    return facts is not None and facts.attempt == attempt and facts.complete
