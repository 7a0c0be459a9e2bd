"""Whoever reads which ranks, the view is the same; also when shards, answers or the root are lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from smdist.coordination.service.poll_schedule import PollIntervals, WatchPolicy
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.service.sharding import Call, PollRequest, Shard, ShardedPoller
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.run_view import Fact, View, add
from smdist.format.intervals import Members
from smdist.format.manifest import RankManifest
from smdist.identity import ModeKeys
from smdist.storage import MemoryStore
from smdist.storage.store import Store
from tests.support.coordinator_driver import Schedule, from_scratch
from tests.support.run_builder import RunBuilder


class Shards:
    """In this process: each may be restarted, die with its answer, or be called again, and late."""

    def __init__(self, store: Store, count: int, schedule: Schedule, trouble: float) -> None:
        self.store, self.schedule, self.trouble = store, schedule, trouble
        self.random = random.Random(count)
        self.deeds: Counter[str] = Counter()
        self.calls: dict[int, list[bytes]] = {}
        self.shards = [self._make(index, count) for index in range(count)]

    def _make(self, index: int, of: int) -> Shard:
        return Shard(index, of, self.store, lambda: self.schedule.clock)

    async def call(self, index: int, data: bytes) -> bytes:
        draw = self.random
        if draw.random() < self.trouble:
            self.shards[index] = self._make(index, len(self.shards))
            self.deeds["restarted"] += 1
        calls = self.calls.setdefault(index, [])
        if calls and draw.random() < self.trouble:
            await self.shards[index].poll(draw.choice(calls[-4:]))  # the answer goes nowhere
            self.deeds["repeated"] += 1
        calls.append(data)
        answer = await self.shards[index].poll(data)
        if draw.random() < self.trouble:
            self.deeds["answer lost"] += 1
            if draw.random() < 0.5:
                self.shards[index] = self._make(index, len(self.shards))
            raise ConnectionError("lost")
        self.deeds["answers"] += 1
        return answer

    def make_poller(
        self,
        store: Store,
        on_fact: Callable[[Fact], None],
        now: Callable[[], float],
        intervals: PollIntervals,
        policy: WatchPolicy,
    ) -> ShardedPoller:
        def caller(index: int) -> Call:
            return lambda data: self.call(index, data)

        calls = [caller(index) for index in range(len(self.shards))]
        return ShardedPoller(store, on_fact, now, intervals, policy, run="", calls=calls)


def carry_out(seed: int, count: int, trouble: float) -> tuple[Schedule, Shards, RunWatcher]:
    """A job of two attempts, with a root that is replaced now and then."""
    store = MemoryStore(f"seed-{seed}")
    schedule = Schedule(store, seed)
    shards = Shards(store, count, schedule, trouble)
    draw = random.Random(seed)

    async def run() -> RunWatcher:
        watcher: RunWatcher | None = None
        for attempt in range(2):
            schedule.start(draw.randint(1, 6), 3 * attempt)
            while schedule.work(8):
                schedule.clock += draw.choice((0.1, 0.7, 2.0))
                watcher = await turn(watcher)
                if draw.random() < trouble / 2:
                    shards.deeds["root restarted"] += 1
                    watcher = None
        for _ in range(400):
            schedule.clock += 10.0
            watcher = await turn(watcher)
            if watcher.state == "finished":
                return watcher
        raise AssertionError("it does not end")

    async def turn(watcher: RunWatcher | None) -> RunWatcher:
        if watcher is None or (watcher.state == "finished" and await watcher.has_new_data()):
            watcher = RunWatcher(
                "",
                store=store,
                now=lambda: schedule.clock,
                writer="same",
                make_poller=shards.make_poller,
            )
            await watcher.open()
        await watcher.poll_once()
        return watcher

    return schedule, shards, asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("trouble", [0.0, 0.15])
def test_sharded_view_equals_a_fresh_one(count: int, trouble: float) -> None:
    done: Counter[str] = Counter()
    for seed in range(6):
        schedule, shards, watcher = carry_out(seed, count, trouble)
        assert watcher.queries.view.canonical() == from_scratch(schedule.store).canonical(), seed
        done += shards.deeds
    if trouble:
        kinds = ("restarted", "answer lost", "root restarted", "repeated")
        assert min(done[kind] for kind in kinds) > 3, done


def test_each_rank_has_one_shard() -> None:
    """No request of one is made by another."""
    store = MemoryStore("run")
    schedule = Schedule(store, 1)
    schedule.start(5, 0)
    while schedule.work(4):
        pass
    asked: dict[int, set[str]] = {}

    class Watched(MemoryStore):
        def __init__(self, index: int) -> None:
            super().__init__("run")
            self.index = index

        async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            asked.setdefault(self.index, set()).add(key)
            return await store.get(key, start, stop)

        async def list(self, prefix: str = "", *, after: str = "") -> list[str]:
            return list(await store.list(prefix, after=after))

    shards = Shards(store, 2, schedule, 0.0)
    shards.shards = [Shard(index, 2, Watched(index), lambda: schedule.clock) for index in range(2)]

    async def look() -> None:
        watcher = RunWatcher(
            "", store=store, now=lambda: schedule.clock, make_poller=shards.make_poller
        )
        await watcher.open()
        await watcher.poll_once()

    asyncio.run(look())
    for index, keys in asked.items():
        ranks = {key.split("/")[1] for key in keys if key.startswith("manifests/")}
        assert ranks == {f"worker_{rank}" for rank in range(5) if rank % 2 == index}


@pytest.mark.parametrize("restarted", [False, True])
def test_repeated_call_loses_no_facts(restarted: bool) -> None:
    store, clock = MemoryStore("run"), [1000.0]
    writer = RunBuilder(store).rank(0, world=1)
    writer.step(ModeKeys.TRAIN, 0, {}).flush()
    shards, sent, view = [Shard(0, 1, store, lambda: clock[0])], list[bytes](), View()

    async def call(data: bytes) -> bytes:
        sent.append(data)
        return await shards[0].poll(data)

    def take(fact: Fact) -> None:
        add(view, fact)

    poller = ShardedPoller(store, take, lambda: clock[0], PollIntervals(), run="", calls=[call])
    asyncio.run(poller.poll())
    assert msgspec.msgpack.decode(sent[-1], type=PollRequest).cursors == ()
    writer.step(ModeKeys.TRAIN, 1, {}).flush()
    clock[0] += 40.0
    if restarted:
        shards[0] = Shard(0, 1, store, lambda: clock[0])
    asyncio.run(shards[0].poll(sent[-1]))
    clock[0] += 40.0
    asyncio.run(poller.poll())
    known = view.rank(0, 0)
    assert known is not None
    assert known.seen == ((0, 2),)


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("there", [True, False])
def test_manifests_that_a_snapshot_lacks_are_read_again(lacking: int, there: bool) -> None:
    store, view = MemoryStore("run"), View()
    writer = RunBuilder(store).rank(0, world=1)
    for step in range(3):
        writer.step(ModeKeys.TRAIN, step, {}).flush()
    writer.end()
    keys = sorted(key for key in store.objects if key.startswith("manifests/"))
    for key in keys[:lacking] + keys[lacking + 1 :]:
        add(view, msgspec.json.decode(store.objects[key], type=RankManifest))
    if not there:
        del store.objects[keys[lacking]]

    def take(fact: Fact) -> None:
        add(view, fact)

    poller = StorePoller(store, take, lambda: 1000.0)
    poller.resume_from(view, {}, ())
    asyncio.run(poller.poll())
    known = view.rank(0, 0)
    assert known is not None
    assert (lacking in Members(known.seen)) == there
    assert poller.tracks[0, 0].final


def test_missing_shard_does_not_block_the_others() -> None:
    store = MemoryStore("run")
    schedule = Schedule(store, 3)
    schedule.start(4, 0)
    while schedule.work(3):
        pass
    shards = Shards(store, 2, schedule, 0.0)

    async def gone(data: bytes) -> bytes:
        await asyncio.sleep(3600)
        return data

    async def look() -> RunWatcher:
        watcher = RunWatcher(
            "",
            store=store,
            now=lambda: schedule.clock,
            make_poller=lambda *facts: ShardedPoller(
                *facts,
                run="",
                calls=[lambda data: shards.call(0, data), gone],
                timeout_s=2.0,
            ),
        )
        await watcher.open()
        await watcher.poll_once()
        return watcher

    watcher = asyncio.run(look())
    known = {rank for _, rank, known in watcher.queries.view.ranks() if known.head is not None}
    assert known == {0, 2}
    assert any("shard 1 does not answer" in text for text in watcher.queries.status().troubles)
