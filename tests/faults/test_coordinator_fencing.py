"""Two coordinators of one run: one wins, the other says so, and no snapshot is lost."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from smdist.coordination.service.leadership import ClaimId, LeaseRecord
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer, load_view
from smdist.errors import AlreadyCoordinated, Superseded
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys
from smdist.storage import loop_thread as sync
from smdist.storage import open_store
from smdist.storage.in_memory import MemoryStore
from smdist.storage.store import Buffer, Store
from tests.servers.s3 import Server, aws, moto, rclone
from tests.support.coordinator_driver import from_scratch
from tests.support.run_builder import RankWriter, RunBuilder

__all__ = ["aws", "moto", "rclone"]  # fixtures

TRAIN = ModeKeys.TRAIN


@dataclass
class Clock:
    time: float = 5000.0

    def __call__(self) -> float:
        return self.time


@dataclass
class Held:
    """A store whose puts of one key wait for a word."""

    store: Store
    key: str
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return self.store.url

    async def check(self) -> None:
        await self.store.check()

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        if key == self.key:
            self.reached.set()
            await self.go_on.wait()
        await self.store.put(key, data, if_absent=if_absent)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await self.store.get(key, start, stop)

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        return await self.store.list(prefix, after=after)

    async def delete(self, key: str) -> None:
        await self.store.delete(key)

    async def close(self) -> None:
        pass


def job(store: Store, clock: Clock) -> RankWriter:
    return RunBuilder(store, now=clock()).rank(0)


def save(writer: RankWriter, step: int) -> None:
    writer.step(TRAIN, step, {"w": np.full(3, step, np.float32)}).flush()


async def pointer(store: Store) -> Pointer:
    return msgspec.json.decode(await store.get(POINTER_KEY), type=Pointer)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Store:
    return MemoryStore("fencing")


def watcher(store: Store, clock: Callable[[], float], **more: object) -> RunWatcher:
    return RunWatcher(store.url, store=store, now=clock, **more)  # type: ignore[arg-type]


def test_second_coordinator_is_refused_with_a_remedy(store: Store, clock: Clock) -> None:
    save(job(store, clock), 0)

    async def act() -> None:
        first, second = watcher(store, clock), watcher(store, clock)
        await first.open()
        await first.poll_once()
        clock.time += 5
        with pytest.raises(AlreadyCoordinated) as refused:
            await second.open()
        assert refused.value.free_in_s == 25.0
        text = str(refused.value)
        for part in (store.url, str(refused.value.pid), refused.value.host, "--take-over"):
            assert part in text
        clock.time += 5
        assert not await first.poll_once()
        assert first.state == "watching"
        assert second.state != "watching"

    asyncio.run(act())


def test_only_a_renewed_lease_keeps_others_out(store: Store, clock: Clock) -> None:
    save(job(store, clock), 0)

    async def act() -> None:
        first = watcher(store, clock)
        await first.open()
        for _ in range(12):
            await first.poll_once()
            clock.time += 9
        with pytest.raises(AlreadyCoordinated):
            await watcher(store, clock).open()
        clock.time += 31
        second = watcher(store, clock)
        await second.open()
        await second.poll_once()
        clock.time += 1
        with pytest.raises(Superseded, match=second.queries.status().writer):
            await first.poll_once()
        assert first.state == "superseded"
        assert second.queries.status().writer in first.queries.status().detail

    asyncio.run(act())


def test_closing_frees_the_lease_at_once(store: Store, clock: Clock) -> None:
    save(job(store, clock), 0)

    async def act() -> None:
        first, second = watcher(store, clock), watcher(store, clock)
        await first.open()
        await first.poll_once()
        await first.close()
        await second.open()
        assert await second.poll_once()
        assert (await pointer(store)).epoch == 2

    asyncio.run(act())


def test_restart_does_not_wait_for_its_own_lease(store: Store, clock: Clock) -> None:
    save(job(store, clock), 0)

    async def act() -> None:
        first = watcher(store, clock, writer="actor 7")
        await first.open()
        await first.poll_once()
        again = watcher(store, clock, writer="actor 7")
        await again.open()
        assert await again.poll_once()
        clock.time += 20
        with pytest.raises(Superseded):
            await first.poll_once()

    asyncio.run(act())


def test_late_pointer_of_an_old_leader_is_replaced(store: Store, clock: Clock) -> None:
    """It has looked at the claims, is held up, and another takes over and ends meanwhile."""
    rank = job(store, clock)
    save(rank, 0)

    async def act() -> None:
        held = Held(store, POINTER_KEY)
        old = watcher(held, clock)
        await old.open()
        turning = asyncio.create_task(old.poll_once())
        await held.reached.wait()
        new = watcher(store, clock, take_over=True)
        await new.open()
        rank.step(TRAIN, 1, {"w": np.ones(3, np.float32)})
        await asyncio.to_thread(rank.end)
        while new.state == "watching":
            clock.time += 2
            await new.poll_once()
        right = await pointer(store)
        assert right.final
        held.go_on.set()
        with pytest.raises(Superseded):
            await turning
        assert await pointer(store) == right
        view = (await load_view(store, right)).view
        assert view.canonical() == (await asyncio.to_thread(from_scratch, store)).canonical()

    asyncio.run(act())


def test_pointer_moved_back_by_a_killed_writer_is_repaired(store: Store, clock: Clock) -> None:
    save(job(store, clock), 0)

    async def act() -> None:
        mine = watcher(store, clock)
        await mine.open()
        await mine.poll_once()
        right = await pointer(store)
        lower = msgspec.structs.replace(right, epoch=0, number=9)
        await store.put(POINTER_KEY, [encode(lower, POINTER_KEY)])
        clock.time += 11
        await mine.poll_once()
        assert await pointer(store) == right

    asyncio.run(act())


def test_removed_claims_do_not_lower_the_epoch(store: Store, clock: Clock) -> None:
    save(job(store, clock), 0)

    async def act() -> None:
        for _ in range(3):
            one = watcher(store, clock)
            await one.open()
            await one.poll_once()
            await one.close()
        for folder in ("merged/claims/", "merged/leases/"):
            for key in await store.list(folder):
                await store.delete(key)
        before = await pointer(store)
        one = watcher(store, clock)
        await one.open()
        await one.poll_once()
        after = await pointer(store)
        assert (after.epoch, after.number) > (before.epoch, before.number)

    asyncio.run(act())


def test_many_restarts_leave_few_claims(store: Store, clock: Clock) -> None:
    save(job(store, clock), 0)

    async def act() -> None:
        first = watcher(store, clock, writer="actor")
        await first.open()
        for _ in range(40):
            one = watcher(store, clock, writer="actor")
            await one.open()
            await one.poll_once()
        assert len(await store.list("merged/claims/")) < 20
        assert len(await store.list("merged/leases/")) < 20
        assert (await pointer(store)).epoch == 41
        with pytest.raises(Superseded):
            await first.poll_once()

    asyncio.run(act())


# -- at the same moment, on real servers -----------------------------------------------------------


async def start_together(make: Callable[[], Store], count: int) -> None:
    clock = Clock()
    stores = [make() for _ in range(count)]
    theirs = make()  # used on another loop
    rank = await asyncio.to_thread(job, theirs, clock)
    await asyncio.to_thread(save, rank, 0)
    watchers = [RunWatcher(store.url, store=store, now=clock) for store in stores]
    opened = await asyncio.gather(*(w.open() for w in watchers), return_exceptions=True)
    won, told = [], 0
    for one, outcome in zip(watchers, opened, strict=True):
        if outcome is None:
            won.append(one)
        else:
            assert isinstance(outcome, AlreadyCoordinated), outcome
            told += 1
    assert won
    for step in range(1, 4):
        await asyncio.to_thread(save, rank, step)
        clock.time += 20
        turned = await asyncio.gather(*(w.poll_once() for w in won), return_exceptions=True)
        for result in turned:
            assert isinstance(result, (bool, Superseded)), result
            told += isinstance(result, Superseded)
        won = [one for one in won if one.state == "watching"]
    assert len(won) == 1, "one coordinator"
    assert told == count - 1, "and the others say so"
    newest = await pointer(stores[0])
    assert newest.epoch == won[0].queries.status().epoch
    view = (await load_view(stores[0], newest)).view
    assert view.canonical() == (await asyncio.to_thread(from_scratch, theirs)).canonical()
    lease = await stores[0].get(ClaimId(newest.epoch, won[0].queries.status().writer).lease_key)
    assert msgspec.json.decode(lease, type=LeaseRecord).pointer == newest
    for key in [key for store in stores[:1] for key in await store.list("merged/heads/")]:
        await load_view(stores[0], Pointer(0, 0, key, 0.0, 1.0, False))
    await asyncio.to_thread(lambda: sync.run(theirs.close()))
    for store in stores:
        await store.close()


@pytest.mark.parametrize("count", [2, 5])
def test_simultaneous_start_in_memory(count: int) -> None:
    shared = MemoryStore("together")
    asyncio.run(start_together(lambda: shared, count))


@pytest.mark.s3
@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize("name", ["rclone", "moto"])
def test_simultaneous_start_on_a_server(name: str, request: pytest.FixtureRequest) -> None:
    """rclone ignores conditions, moto keeps them."""
    server: Server = request.getfixturevalue(name)
    for _ in range(3):
        bucket = server.make_bucket(f"fencing-{uuid.uuid4().hex[:12]}")
        asyncio.run(start_together(lambda: open_store(server.url(bucket)), 3))  # noqa: B023
