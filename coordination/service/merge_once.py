"""Merge a run once, without staying: one cycle of what a coordinator does.

Called by the uploader that ends last, so that a finished run opens with a handful of requests, and by
`smdist merge`. The rules of the lease apply: of several merges at the same time one writes, and none
writes beside a coordinator at work.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from smdist.coordination.service.object_check import MissingObjects, find_missing_objects
from smdist.coordination.service.poll_schedule import MERGE_ONCE
from smdist.coordination.service.run_follower import RunFollower
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.status import RunState, RunStatus
from smdist.errors import CoordinationError
from smdist.storage.store import Store

__all__ = ["MergeResult", "merge_once"]

_CONCURRENCY = 32


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
