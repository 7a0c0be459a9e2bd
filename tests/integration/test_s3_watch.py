"""Runs below a prefix of a bucket, found without listing all that is in them."""

from __future__ import annotations

import asyncio
import uuid

import numpy as np
import pytest

from smdist.coordination.service.directory_watcher import DirectoryWatcher
from smdist.identity import ModeKeys
from smdist.storage import loop_thread as sync
from smdist.storage import open_store
from smdist.storage.subtree import StoreSubtree, folders
from tests.servers.s3 import Server, aws, moto, rclone
from tests.support.run_builder import RankWriter, RunBuilder

__all__ = ["aws", "moto", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws")]


def save(store: StoreSubtree, step: int) -> RankWriter:
    rank = RunBuilder(store).rank(0)
    return rank.step(ModeKeys.TRAIN, step, {"w": np.ones(2)}).flush()


@pytest.mark.parametrize("name", ["rclone", "moto"])
@pytest.mark.parametrize("prefix", ["jobs/today", ""])
def test_runs_below_a_prefix(name: str, prefix: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(name)
    bucket = server.make_bucket(f"watch-{uuid.uuid4().hex[:12]}")
    url = server.url(bucket, prefix) if prefix else f"s3://{bucket}?endpoint_url={server.endpoint}"
    place = open_store(url)
    deep = save(StoreSubtree(place, "team/run1"), 3)
    save(StoreSubtree(place, "run2"), 4)

    async def act() -> None:
        store = open_store(url)
        assert await folders(store) == ["run2", "team"]
        assert await folders(store, "team/") == ["run1"]
        assert await folders(store, "nothing/") == []
        stop = asyncio.Event()
        watch = DirectoryWatcher(url, store=store, interval_s=0.05)
        running = asyncio.create_task(watch.run(stop))

        def complete() -> dict[str, int]:
            statuses = watch.runs().values()
            return {s.url.partition("?")[0]: s.latest_complete["GLOBAL"] for s in statuses}

        base = url.partition("?")[0]
        for _ in range(3000):
            if complete() == {f"{base}/team/run1": 3, f"{base}/run2": 4}:
                break
            await asyncio.sleep(0.01)
        assert complete() == {f"{base}/team/run1": 3, f"{base}/run2": 4}, watch.runs()
        # A run's URL opens that run.
        again = open_store(watch.watcher("team/run1").url)
        assert list(await again.list("sessions/")) == ["sessions/worker_0/000000.json"]
        await again.close()
        stop.set()
        await running
        await watch.close()
        await store.close()

    asyncio.run(act())
    deep.end()
    sync.run(place.close())
