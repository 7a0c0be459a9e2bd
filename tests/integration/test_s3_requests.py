"""How many requests it takes: to save, to open a trial, to read a tensor."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from smdist import create_trial
from smdist.format.manifest import CollectionInfo, Session, session_key
from smdist.identity import ModeKeys
from smdist.storage import loop_thread as sync
from smdist.storage import open_store
from smdist.workers.upload.summaries import Summary
from tests.servers.s3 import Server, aws, moto, rclone
from tests.support.proxy import FaultProxy, proxied
from tests.support.run_builder import RunBuilder
from tests.support.s3_jobs import assert_equals_copies, run_job, start_job
from tests.support.waiting import until

__all__ = ["aws", "moto", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws")]

TRAIN = ModeKeys.TRAIN
RANKS, STEPS, FLUSH = 8, 100, 10
LISTING = r"list-type=2"


@pytest.fixture
def bucket(rclone: Server) -> str:
    return rclone.make_bucket(f"count-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(rclone: Server) -> Iterator[FaultProxy]:
    with proxied(rclone.port) as proxy:
        yield proxy


# -- saving ----------------------------------------------------------------------------------------


def test_numbers_cost_one_put_per_flush(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    url = proxy.url(bucket)
    ran = start_job(
        tmp_path,
        url,
        steps=100_000,
        step_s=0.01,
        until_stopped=True,
        reductions=["mean", "std"],
        hook={"linger_s": 0.5},
    )
    try:
        until(lambda: proxy.count("PUT", "/manifests/") > 4, "several flushes")
    finally:
        (ran.kept / "stop").touch()
        ran.wait()
    assert ran.code == 0, ran.errors
    (steps,) = ran.told("steps")
    requests = list(proxy.requests)
    with create_trial(url) as trial:
        assert trial.steps() == list(range(steps))
        tensor = trial.tensor("gradient/Net_fc1.weight")
        assert all(tensor.reduction_value(step, "std") >= 0 for step in range(steps))
    puts = [target for method, target in requests if method == "PUT"]
    assert not [target for target in puts if "/segments/" in target]
    flushes = sum("/manifests/" in target for target in puts)
    assert 4 < flushes < steps / 4
    once = sum(target.count("/layouts/") + target.count("/collections/") for target in puts)
    assert once <= 4, "layouts and collections go once, not with every flush"
    assert len(requests) < steps / 2, requests


def test_several_steps_share_a_segment(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    steps = 200
    url = proxy.url(bucket)
    ran = run_job(tmp_path, url, steps=steps, step_s=0.01, hook={"linger_s": 0.5})
    assert proxy.count("PUT", "/segments/") < steps / 5
    assert proxy.count("PUT", "/segments/") <= proxy.count("PUT", "/manifests/")
    assert proxy.count() < steps / 2
    assert_equals_copies(url, ran, ranks=1, steps=steps)


# -- reading ---------------------------------------------------------------------------------------


def build(server: Server, bucket: str, *, finished: bool) -> None:
    """Steps of 60 kB, ten to a segment."""
    store = open_store(server.url(bucket))
    run = RunBuilder(store)
    for rank in range(RANKS):
        writer = run.rank(rank, RANKS)
        if rank == 0:
            writer.describe(CollectionInfo("weights"))
        for step in range(STEPS):
            value = np.full(5000, 1000 * rank + step, np.float32)
            writer.step(TRAIN, step, {"a": value, "b": value + 1, "c": value + 2})
            if step % FLUSH == FLUSH - 1:
                writer.flush()
        if finished:
            writer.end()
            data = sync.run(store.get(session_key(writer.worker, 0)))
            summary = Summary(msgspec.json.decode(data, type=Session))
            sync.run(summary.write(store, writer.seq))
    sync.run(store.close())


@pytest.mark.parametrize("finished", [True, False])
def test_a_tensor_of_all_ranks_and_steps(
    rclone: Server, bucket: str, proxy: FaultProxy, finished: bool
) -> None:
    build(rclone, bucket, finished=finished)
    with create_trial(proxy.url(bucket)) as trial:
        listings = proxy.count("GET", LISTING)
        gets = proxy.count("GET") - listings
        if finished:
            assert listings == 2, "sessions and summaries"
            assert gets == 2 + RANKS + 1 + 1, "run, what is merged, summaries, layout, collections"
        else:
            assert listings == 3, "sessions, summaries and all manifests"
            # Sessions and heartbeats of the ranks, their manifests; run, merged, layout, collections.
            assert gets == 2 * RANKS + RANKS * STEPS // FLUSH + 4
        proxy.clear()
        workers = trial.workers()
        found = trial.values(["b"], range(STEPS), workers)
        assert [len(found["b"][step]) for step in range(STEPS)] == [RANKS] * STEPS
        assert proxy.count() == RANKS * STEPS // FLUSH, "one for each segment"
        assert proxy.count("GET", LISTING) == 0, "no value needs a listing"
        proxy.clear()
        tensor = trial.tensor("b")
        for rank in (0, 5):
            values = tensor.values(worker=f"worker_{rank}")
            assert {s: v[0] for s, v in values.items()} == {
                s: 1000 * rank + s + 1 for s in range(STEPS)
            }
        assert proxy.count() == 0, "what was read is kept"
        if finished:
            trial.refresh()
            assert proxy.count() == 2, "whether something was merged or a session is new"


def test_the_data_is_never_listed(rclone: Server, bucket: str, proxy: FaultProxy) -> None:
    build(rclone, bucket, finished=False)
    with create_trial(proxy.url(bucket)) as trial:
        trial.tensor("a").stack(50)
        trial.refresh()
    assert proxy.count("GET", LISTING + r".*prefix=run/segments") == 0
    assert proxy.count("GET", LISTING + r".*prefix=run/&|prefix=run/$|prefix=run&") == 0
