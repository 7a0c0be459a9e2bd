"""Ranks that create a run together on a server that ignores conditional puts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from smdist.format.manifest import (
    RUN_KEY,
    RankSummary,
    Run,
    Session,
    session_key,
    summary_key,
)
from smdist.format.stored_json import decode, encode
from smdist.identity import worker_name
from smdist.storage.in_memory import MemoryStore
from smdist.storage.store import Buffer
from smdist.workers.join.enrolment import join_run, store_run_id
from smdist.workers.spool.spool import UNKNOWN_ATTEMPT, Entry
from smdist.workers.upload.run_guard import RunGuard, RunNotAtThisLocation

ENTRY = Entry(0.0, resume=False, framework="pytorch", attempt=None)


class Turns:
    """Lets the ranks do one request at a time, in a given order."""

    def __init__(self) -> None:
        self.waiting: dict[int, list[asyncio.Future[None]]] = {}

    async def wait(self, rank: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(rank, []).append(turn)
        await turn

    async def give(self, rank: int) -> None:
        for _ in range(20):  # until every rank waits for its turn
            await asyncio.sleep(0)
        if self.waiting.get(rank):
            self.waiting[rank].pop(0).set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)


class RankStore(MemoryStore):
    """The store as one rank uses it. Each request waits for its turn; conditions are ignored."""

    ignores_conditions = True

    def __init__(self, objects: dict[str, bytes], rank: int, turns: Turns) -> None:
        super().__init__("race")
        self.objects, self.rank, self.turns = objects, rank, turns

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        await self.turns.wait(self.rank)
        await super().put(key, data)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        await self.turns.wait(self.rank)
        return await super().get(key, start, stop)


def session_of(rank: int, world: int) -> Session:
    return Session(
        f"session-{rank}", rank, world, UNKNOWN_ATTEMPT, "all", 1000.0, "host.invalid", 7, "given:a"
    )


async def live(store: RankStore, world: int, killed_after_joining: bool) -> None:
    """What an uploader asks of the store, from joining the run to its summary."""
    joined = await join_run(store, session_of(store.rank, world), ENTRY, lambda: 1000.0)
    if killed_after_joining:  # before it was written to the spool
        joined = await join_run(store, session_of(store.rank, world), ENTRY, lambda: 1000.0)
    guard = RunGuard(store, joined.run, joined.session)
    await guard.follow_run()
    assert await guard.is_present()
    key = summary_key(worker_name(store.rank), joined.session.attempt)
    await store.put(key, [encode(RankSummary(guard.session, ()), key)])
    while await guard.follow_run():
        await store_run_id(store, guard.session)


def race(world: int, order: Sequence[int], killed: int = -1) -> dict[str, bytes]:
    """Run all ranks, first in the `order` of turns, then one after the other."""
    objects: dict[str, bytes] = {}

    async def run() -> None:
        turns = Turns()
        tasks = [
            asyncio.ensure_future(live(RankStore(objects, rank, turns), world, rank == killed))
            for rank in range(world)
        ]
        for rank in order:
            await turns.give(rank)
        rest = sorted(range(world), key=lambda rank: order.index(rank) if rank in order else 99)
        for rank in reversed(rest):
            while not tasks[rank].done():
                await turns.give(rank)
        await asyncio.gather(*tasks)

    asyncio.run(run())
    return objects


def assert_consistent(objects: dict[str, bytes], world: int) -> None:
    run = decode(objects[RUN_KEY], Run, RUN_KEY)
    for rank in range(world):
        key = session_key(worker_name(rank), 0)
        session = decode(objects[key], Session, key)
        assert (session.session, session.run_id) == (f"session-{rank}", run.run_id)
        key = summary_key(worker_name(rank), 0)
        assert decode(objects[key], RankSummary, key).session == session


def late_puts(world: int) -> Iterator[list[int]]:
    """Orders in which a rank is held up once, anywhere, while the others go on, to the end or not."""
    for first, *others in permutations(range(world)):
        for before in range(1, 8):
            for meanwhile in (2, 5, 8, 30):
                yield [first] * before + [r for r in others for _ in range(meanwhile)]


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_end_in_one_run_whichever_put_is_late(world: int) -> None:
    created = set()
    for order in late_puts(world):
        objects = race(world, order)
        assert_consistent(objects, world)
        created.add(decode(objects[RUN_KEY], Run, RUN_KEY).run_id)
    assert len(created) == world, "each of them was the last one at times"


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 3).flatmap(
        lambda world: st.tuples(
            st.just(world), st.lists(st.integers(0, world - 1), max_size=60), st.integers(-1, 2)
        )
    )
)
def test_all_ranks_end_in_one_run_in_any_order(case: tuple[int, list[int], int]) -> None:
    world, order, killed = case
    assert_consistent(race(world, order, killed), world)


class Unordered(MemoryStore):
    ignores_conditions = True


def test_session_follows_a_run_that_was_replaced() -> None:
    store = Unordered()
    seen: list[str] = []

    async def check() -> None:
        run, session = await join_run(store, session_of(0, 1), ENTRY)
        guard = RunGuard(store, run, session, lambda run, _session: seen.append(run.run_id))
        assert not await guard.follow_run()
        store.objects[RUN_KEY] = encode(replace(run, run_id="other"), RUN_KEY)
        before = store.objects[RUN_KEY]
        assert await guard.is_present()
        assert store.objects[RUN_KEY] == before, "run.json is not written in a correction"
        assert not await guard.follow_run()

    asyncio.run(check())
    key = session_key("worker_0", 0)
    assert decode(store.objects[key], Session, key).run_id == "other"
    assert seen == ["other"]


def test_run_without_our_session_is_another_one() -> None:
    store = Unordered()

    async def check() -> None:
        run, session = await join_run(store, session_of(0, 1), ENTRY)
        guard = RunGuard(store, run, session)
        store.objects.clear()
        assert not await guard.is_present()
        store.objects[RUN_KEY] = encode(replace(run, run_id="other"), RUN_KEY)
        assert not await guard.follow_run()
        with pytest.raises(RunNotAtThisLocation):
            await guard.is_present()

    asyncio.run(check())
