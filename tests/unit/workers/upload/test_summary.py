"""A summary says what the manifests say, no more and no less, and nobody needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from smdist.coordination.view.run_view import View, merge
from smdist.format.manifest import RankManifest, RankSummary, Session, manifest_key, summary_key
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys
from smdist.storage import MemoryStore
from smdist.storage import loop_thread as sync
from smdist.trials.run_loader import RunLoader, RunUpdate
from smdist.workers.upload import summaries as module
from smdist.workers.upload.summaries import Summary
from tests.support.run_builder import RunBuilder

TRAIN = ModeKeys.TRAIN
RANKS, STEPS = 8, 100


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.asked[f"get {key.partition('/')[0]}"] += 1
        return await super().get(key, start, stop)

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        self.asked[f"list {prefix.partition('/')[0]}"] += 1
        return await super().list(prefix, after=after)


def build(store: MemoryStore, *, attach_bytes: int = 0, last: int | None = None) -> None:
    """A finished run, every step flushed by itself; rank `last` is still at work."""
    run = RunBuilder(store)
    for rank in range(RANKS):
        writer = run.rank(rank, RANKS)
        writer.attach_bytes = attach_bytes
        for step in range(STEPS):
            writer.step(TRAIN, step, {"x": np.array([step], np.float32)})
            if step == 3:
                writer.drop(TRAIN, step, "y").trouble("something")
            writer.flush()
        if rank != last:
            (writer.lose if rank == 1 else writer.end)()


def summarise(store: MemoryStore, rank: int, told: Sequence[int] = ()) -> None:
    """As the uploader does; `told` are the manifests that it put itself."""
    worker = f"worker_{rank}"
    data = sync.run(store.get(f"sessions/{worker}/000000.json"))
    made = Summary(msgspec.json.decode(data, type=Session))
    for seq in told:
        made.note(manifest(store, rank, seq))
    sync.run(made.write(store, STEPS + 1))


def manifest(store: MemoryStore, rank: int, seq: int) -> RankManifest:
    data = sync.run(store.get(manifest_key(f"worker_{rank}", 0, seq)))
    return msgspec.json.decode(data, type=RankManifest)


def poll(store: MemoryStore) -> RunUpdate:
    return sync.run(RunLoader(store).poll())


@pytest.mark.parametrize("attach_bytes", [0, 1 << 20])
def test_the_view_is_the_same_with_and_without(attach_bytes: int) -> None:
    store = Counting()
    build(store, attach_bytes=attach_bytes)
    plain = poll(store)
    for rank in range(RANKS):
        summarise(store, rank, told=range(0, STEPS, 2))
    found = poll(store)
    assert found.facts == plain.facts
    assert merge(found.facts, plain.facts) == plain.facts
    assert found.layouts.keys() == plain.layouts.keys()
    assert found.attached == plain.attached
    assert bool(plain.attached) is bool(attach_bytes)


def test_opening_a_finished_run_costs_a_request_per_rank() -> None:
    store = Counting()
    build(store)
    for rank in range(RANKS):
        summarise(store, rank)
    store.asked.clear()
    poll(store)
    assert store.asked == {
        "list sessions": 1,
        "list summaries": 1,
        "get summaries": RANKS,
        "get layouts": 1,
        "get collections": 1,
    }


def test_a_live_rank_is_followed_beside_summaries() -> None:
    store = Counting()
    build(store, last=RANKS - 1)
    for rank in range(RANKS - 1):
        summarise(store, rank)
    plain = View()
    store.asked.clear()
    loader = RunLoader(store)
    plain = sync.run(loader.poll()).facts
    assert store.asked["list manifests"] == 1
    assert store.asked["get manifests"] == STEPS
    assert all(len(known.steps) == STEPS for _, _, known in plain.ranks())
    store.asked.clear()
    sync.run(loader.poll())
    assert store.asked["list summaries"] == 0, "no new session, no new summary to look for"
    assert store.asked["get manifests"] == 0


def test_many_live_ranks_are_listed_together() -> None:
    store = Counting()
    build(store)
    store.asked.clear()
    poll(store)
    assert store.asked["list manifests"] == 1


def test_large_numbers_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counting()
    build(store, attach_bytes=1 << 20)
    monkeypatch.setattr(module, "_MOST_ATTACHED", 1000)
    summarise(store, 0, told=range(STEPS + 1))
    made = msgspec.json.decode(sync.run(store.get(summary_key("worker_0", 0))), type=RankSummary)
    assert made.is_consistent
    assert not any(one.attached for one in made.manifests)
    assert made.manifests[5].steps[0].segment == manifest_key("worker_0", 0, 5)


def test_a_session_too_long_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    build(store)
    monkeypatch.setattr(module, "_MOST_BYTES", 1000)
    summarise(store, 0, told=range(50))
    summarise(store, 1)
    assert sync.run(store.list("summaries/")) == []


@pytest.mark.parametrize("harm", ["torn", "gap", "active", "stranger"])
def test_one_that_is_not_whole_is_not_believed(harm: str) -> None:
    store = MemoryStore()
    build(store)
    plain = poll(store)
    summarise(store, 0)
    key = summary_key("worker_0", 0)
    data = sync.run(store.get(key))
    made = msgspec.json.decode(data, type=RankSummary)
    changed = {
        "gap": made.manifests[:5] + made.manifests[6:],
        "active": made.manifests[:-1],
        "stranger": tuple(msgspec.structs.replace(m, session="x") for m in made.manifests),
    }
    if harm == "torn":
        data = data[:1000]
    else:
        data = encode(msgspec.structs.replace(made, manifests=changed[harm]), key)
    sync.run(store.put(key, [data]))
    found = poll(store)
    assert found.facts == plain.facts
    assert set(found.troubles) == {key}, "it is said once"
