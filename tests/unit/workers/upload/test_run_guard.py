"""Ranks that create a run together on a server that ignores conditional puts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from smdist.errors import StoreError
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
from smdist.workers.join.enrolment import JoinedRun, join_run
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
        waiting = self.waiting[rank] = [t for t in self.waiting.get(rank, ()) if not t.done()]
        if waiting:
            waiting.pop(0).set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)


class Killed(Exception):
    """The uploader is killed: it makes no further request."""


class RankStore(MemoryStore):
    """The store as one rank uses it. Each request waits for its turn; conditions are ignored.

    The uploader is killed before request `kill_at`, counted from 0.
    """

    ignores_conditions = True

    def __init__(
        self, objects: dict[str, bytes], rank: int, turns: Turns, kill_at: int = -1
    ) -> None:
        super().__init__("race")
        self.objects, self.rank, self.turns = objects, rank, turns
        self._left, self._killed = kill_at, False

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        await self._turn()
        await super().put(key, data)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        await self._turn()
        return await super().get(key, start, stop)

    def restart(self) -> None:
        self._killed = False

    async def _turn(self) -> None:
        await self.turns.wait(self.rank)
        self._killed |= self._left == 0
        self._left -= 1
        if self._killed:
            raise Killed


def session_of(rank: int, world: int) -> Session:
    return Session(
        f"session-{rank}", rank, world, UNKNOWN_ATTEMPT, "all", 1000.0, "host.invalid", 7, "given:a"
    )


class Uploader:
    """The uploader of one rank, as far as it concerns the run. Another one follows if it is killed."""

    def __init__(self, store: RankStore, world: int) -> None:
        self._store, self._session = store, session_of(store.rank, world)
        self._joined: JoinedRun | None = None  # as in the spool

    async def live(self) -> None:
        try:
            await self._live()
        except Killed:
            self._store.restart()
            await self._live()

    async def _live(self) -> None:
        """What an uploader asks of the store, from joining the run to its summary."""
        joined_before = self._joined is not None
        if self._joined is None:
            self._enter(*await join_run(self._store, self._session, ENTRY, lambda: 1000.0))
        assert self._joined is not None
        guard = RunGuard(self._store, *self._joined, self._enter)
        if joined_before:
            assert await guard.is_present()
        following = asyncio.ensure_future(guard.follow_run())  # while it works
        try:
            await self._finish(guard)
            await following
        finally:
            following.cancel()
            await asyncio.wait([following])

    async def _finish(self, guard: RunGuard) -> None:
        assert await guard.is_present()
        assert self._joined is not None
        stored = None
        key = summary_key(worker_name(self._store.rank), guard.session.attempt)
        if key not in self._store.objects:
            stored = self._joined.session
            await self._store.put(key, [encode(RankSummary(stored, ()), key)])
        await guard.follow_run_with_summary(stored)

    def _enter(self, run: Run, session: Session) -> None:
        self._joined = JoinedRun(run, session)


def race(world: int, order: Sequence[int], killed: int = -1, kill_at: int = 0) -> dict[str, bytes]:
    """Run all ranks, first in the `order` of turns, then one after the other.

    The uploader of rank `killed` is killed before its request `kill_at` and starts again.
    """
    objects: dict[str, bytes] = {}

    async def run() -> None:
        turns = Turns()
        stores = [
            RankStore(objects, rank, turns, kill_at if rank == killed else -1)
            for rank in range(world)
        ]
        tasks = [asyncio.ensure_future(Uploader(store, world).live()) for store in stores]
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
            st.just(world),
            st.lists(st.integers(0, world - 1), max_size=60),
            st.integers(-1, world - 1),
            st.integers(0, 40),
        )
    )
)
# Rank 0 corrects the summary of rank 1 after rank 1 has replaced run.json and ended.
@example((2, [0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0], -1, 0))
@example((2, [0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0], 0, 11))
# Rank 0 is killed after it stored a replaced run id in the objects of rank 1, which has ended.
@example((2, [1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], 0, 9))
def test_all_ranks_end_in_one_run_in_any_order(case: tuple[int, list[int], int, int]) -> None:
    world, order, killed, kill_at = case
    assert_consistent(race(world, order, killed, kill_at), world)


class Unordered(MemoryStore):
    ignores_conditions = True


def test_session_follows_a_run_that_was_replaced() -> None:
    store = Unordered()
    seen: list[str] = []

    async def check() -> None:
        run, session = await join_run(store, session_of(0, 1), ENTRY)
        guard = RunGuard(store, run, session, lambda run, _session: seen.append(run.run_id))
        await guard.follow_run()
        assert not seen
        store.objects[RUN_KEY] = encode(replace(run, run_id="other"), RUN_KEY)
        before = store.objects[RUN_KEY]
        assert await guard.is_present()
        assert store.objects[RUN_KEY] == before, "run.json is not written in a correction"
        await guard.follow_run()

    asyncio.run(check())
    key = session_key("worker_0", 0)
    assert decode(store.objects[key], Session, key).run_id == "other"
    assert seen == ["other"]


class FailingPuts(Unordered):
    """Stores an object, and reports an error `failures` times: the answer was lost."""

    failures = in_flight = most_in_flight = 0

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        await super().put(key, data)
        self.in_flight -= 1
        if self.failures:
            self.failures -= 1
            raise StoreError(self.url, key, "put", "no answer")


def test_run_id_is_recorded_after_the_answer_to_a_put_was_lost() -> None:
    store, seen = FailingPuts(), list[str]()

    async def check() -> None:
        run, session = await join_run(store, session_of(0, 1), ENTRY)
        guard = RunGuard(store, run, session, lambda run, _session: seen.append(run.run_id))
        store.objects[RUN_KEY] = encode(replace(run, run_id="other"), RUN_KEY)
        store.failures = 1
        with pytest.raises(StoreError):
            await guard.follow_run()
        assert guard.session == session
        await guard.follow_run()

    asyncio.run(check())
    assert seen == ["other"]


def test_one_put_of_the_session_at_a_time() -> None:
    store = FailingPuts()

    async def check() -> None:
        run, session = await join_run(store, session_of(0, 1), ENTRY)
        guard = RunGuard(store, run, session)
        store.objects[RUN_KEY] = encode(replace(run, run_id="other"), RUN_KEY)
        await asyncio.gather(guard.is_present(), guard.follow_run(), guard.follow_run())
        assert guard.session.run_id == "other"

    asyncio.run(check())
    assert store.most_in_flight == 1


def test_run_without_our_session_is_another_one() -> None:
    store = Unordered()

    async def check() -> None:
        run, session = await join_run(store, session_of(0, 1), ENTRY)
        guard = RunGuard(store, run, session)
        store.objects.clear()
        assert not await guard.is_present()
        store.objects[RUN_KEY] = encode(replace(run, run_id="other"), RUN_KEY)
        await guard.follow_run()
        assert guard.session == session
        assert list(store.objects) == [RUN_KEY]
        with pytest.raises(RunNotAtThisLocation):
            await guard.is_present()

    asyncio.run(check())
