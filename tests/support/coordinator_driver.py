"""A job that writes while its coordinators are killed: drawn from a seed, carried out, judged.

Time is a number that the schedule moves. A coordinator's life ends at one of its requests, before or
after it took effect, and at all later ones, as with SIGKILL; the next life begins from the store.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer, load_view
from smdist.coordination.view.run_view import Fact, View, view_of_facts
from smdist.errors import StoreError
from smdist.format.inline_segment import extract_segment
from smdist.format.manifest import Heartbeat, RankManifest, Session
from smdist.identity import ModeKeys
from smdist.storage import loop_thread as sync
from smdist.storage.store import Buffer, Store
from tests.support.run_builder import RankWriter, RunBuilder, Saved

__all__ = ["Killed", "Life", "Schedule", "from_scratch"]

TRAIN, EVAL = ModeKeys.TRAIN, ModeKeys.EVAL


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


@dataclass
class Life:
    """The store as one process sees it: with faults, counted, and for as long as it lives."""

    store: Store
    kill_at: int = 1 << 60  # the number of a request
    after: bool = False  # it took effect
    faults: frozenset[int] = frozenset()  # requests that fail; the odd ones took effect
    requests: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    dead: bool = False

    @property
    def url(self) -> str:
        return self.store.url

    async def check(self) -> None:
        await self.store.check()

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        number = self._begin("put", key)
        await self.store.put(key, data, if_absent=if_absent)
        self._end(number, key)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        number = self._begin("get", key)
        data = await self.store.get(key, start, stop)
        self._end(number, key)
        return data

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        number = self._begin("list", prefix)
        keys = await self.store.list(prefix, after=after)
        self._end(number, prefix)
        return keys

    async def delete(self, key: str) -> None:
        number = self._begin("delete", key)
        await self.store.delete(key)
        self._end(number, key)

    async def close(self) -> None:
        pass

    def _begin(self, operation: str, key: str) -> int:
        number, self.requests = self.requests, self.requests + 1
        self.counts[f"{operation} {key.partition('/')[0]}"] += 1
        if self.dead or (number >= self.kill_at and not self.after):
            self._die()
        if number in self.faults and number % 2 == 0:
            raise StoreError(self.url, key, operation, "refused by the schedule")
        return number

    def _end(self, number: int, key: str) -> None:
        if self.dead or number >= self.kill_at:
            self._die()
        if number in self.faults:
            raise StoreError(self.url, key, "use", "the answer was lost")

    def _die(self) -> None:
        self.dead = True
        raise Killed


def from_scratch(store: Store) -> View:
    """Folded from what the ranks wrote, by nothing that a coordinator uses."""

    async def read() -> list[Fact]:
        facts: list[Fact] = []
        for key in await store.list(""):
            if key.startswith("merged/"):
                continue  # not the ranks', and may go at any time
            data = await store.get(key)
            if key.startswith("sessions/"):
                facts.append(msgspec.json.decode(data, type=Session))
            elif key.startswith("heartbeats/"):
                facts.append(msgspec.json.decode(data, type=Heartbeat))
            elif key.startswith("manifests/"):
                manifest = msgspec.json.decode(data, type=RankManifest)
                facts.append(extract_segment(key, manifest).manifest)
        return facts

    return view_of_facts(sync.run(read()))


class Schedule:
    """One job of a few ranks, maybe restarted with another world, and its coordinators."""

    def __init__(self, store: Store, seed: int) -> None:
        self.random = random.Random(seed)
        self.store, self.clock = store, 1_000_000.0
        self.job = RunBuilder(store, now=self.clock)
        self.ranks: list[RankWriter] = []
        self.next_step: dict[int, int] = {}
        self.watcher: RunWatcher | None = None
        self.life = Life(store)
        self.pointers: list[Pointer] = []
        self.deeds: Counter[str] = Counter()
        self.attempt = -1

    # -- the job ---------------------------------------------------------------------------------

    def start(self, world: int, first_step: int) -> None:
        """Its ranks come one by one."""
        self.attempt += 1
        self.world, self.coming = world, list(range(world))
        self.ranks, self.next_step = [], dict.fromkeys(range(world), first_step)
        self.random.shuffle(self.coming)

    def work(self, last_step: int) -> bool:
        """Something that a rank does; False when none has anything left to do."""
        draw = self.random
        if self.coming and (not self.ranks or draw.random() < 0.2):
            rank = self.coming.pop()
            writer = self.job.rank(rank, self.world, attempt=self.attempt, now=self.clock)
            writer.attach_bytes = draw.choice((0, 1 << 16))
            self.ranks.append(writer)
            return True
        if not self.ranks:
            return bool(self.coming)
        writer = draw.choice(self.ranks)
        rank, writer.now = writer.session.rank, self.clock
        for _ in range(draw.randint(1, 3)):
            step = self.next_step[rank]
            if step > last_step:
                writer.flush(*draw.choice((("ended", ""), ("lost", "SIGKILL"))))
                self.ranks.remove(writer)
                return True
            self._step(writer, step)
            self.next_step[rank] = step + 1
        if draw.random() < 0.8:
            writer.flush()
        else:
            writer.beat(self.clock)
        return True

    def _step(self, writer: RankWriter, step: int) -> None:
        draw, mode = self.random, EVAL if step % 7 == 6 else TRAIN
        saved = Saved(np.full(draw.choice((1, 4)), step, np.float32), reductions=("mean",))
        chance = draw.random()
        if chance < 0.05:
            writer.drop(mode, step, "w")
        if chance < 0.2:
            writer.step(mode, step, {"w": saved}, close=False).flush()
            writer.step(mode, step, {"b": saved})
        elif chance > 0.05:
            writer.step(mode, step, {"w": saved})
        else:
            writer.step(mode, step, {})
        if chance > 0.95:
            writer.trouble(f"trouble at {step}")

    # -- its coordinators ------------------------------------------------------------------------

    def look(self, lives: Iterable[Life]) -> None:
        """A turn of the coordinator; a new one when the last was killed."""
        self.clock += self.random.choice((0.1, 0.7, 2.0))
        try:
            asyncio.run(self._look(lives))
        except Killed:
            self.deeds["killed"] += 1
            self.watcher = None
        self._note_pointer()

    async def _look(self, lives: Iterable[Life]) -> None:
        if self.watcher is None:
            self.life = next(iter(lives))
            self.deeds["lives"] += 1
            watcher = RunWatcher(
                "", store=self.life, now=lambda: self.clock, writer="same", keep_s=3.0
            )
            try:
                await watcher.open()
            except StoreError:
                self.deeds["not opened"] += 1
                return
            self.watcher = watcher
        if self.watcher.state == "finished" and await self.watcher.has_new_data():
            self.deeds["resumed"] += 1
            self.watcher = None
        elif await self.watcher.poll_once():
            self.deeds["snapshots"] += 1

    def _note_pointer(self) -> None:
        """It never goes back, and leads to a snapshot that is whole, whoever dies."""
        pointer = self.pointer()
        if pointer is None or (self.pointers and self.pointers[-1] == pointer):
            return
        if self.pointers:
            last = self.pointers[-1]
            assert (pointer.epoch, pointer.number) > (last.epoch, last.number)
        self.pointers.append(pointer)
        sync.run(load_view(self.store, pointer))

    def pointer(self) -> Pointer | None:
        if POINTER_KEY not in sync.run(self.store.list(POINTER_KEY)):
            return None
        return msgspec.json.decode(sync.run(self.store.get(POINTER_KEY)), type=Pointer)

    def judge(self) -> None:
        pointer = self.pointer()
        assert pointer is not None
        assert pointer.final
        loaded = sync.run(load_view(self.store, pointer))
        right = from_scratch(self.store)
        assert loaded.view.canonical() == right.canonical()
        assert self.watcher is not None
        assert self.watcher.queries.view.canonical() == right.canonical()
        named = {
            entry.layout
            for _, _, known in right.ranks()
            for blocks in known.steps.values()
            for entry in blocks
            if entry.layout
        }
        assert set(loaded.layouts) == named
