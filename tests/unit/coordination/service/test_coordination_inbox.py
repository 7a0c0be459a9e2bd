"""Hints: from an uploader's announcer, over a socket, into an inbox."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from smdist.coordination.service.directory_watcher import DirectoryWatcher
from smdist.coordination.service.hint_server import (
    INBOX_KEY,
    Hint,
    HintServer,
    InboxAddress,
    InboxRecord,
)
from smdist.format.manifest import Session
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys
from smdist.storage.in_memory import MemoryStore
from smdist.workers.upload.hint_sender import Announcer
from tests.support.coordinator_driver import Life
from tests.support.run_builder import RunBuilder
from tests.support.waiting import until_async

SESSION = Session("s", 3, 4, 1, "all", 0.0, "host", 1, "")


@dataclass
class Desk:
    """An inbox, a store that says where it is, and an announcer with a clock of its own."""

    hints: list[Hint] = field(default_factory=list)
    time: float = 100.0

    def __post_init__(self) -> None:
        self.store = Life(MemoryStore("desk"))
        self.inbox = HintServer(self.hints.append, host="127.0.0.1")
        self.announcer = Announcer(self.store, lambda: "run", SESSION, clock=lambda: self.time)

    async def say(self, line: bytes) -> None:
        address = self.inbox.address
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(line)
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()

    def told(self, **more: object) -> bytes:
        hint = Hint(self.inbox.address.token, "run", "worker_0", 0, 7)
        return msgspec.json.encode(msgspec.structs.replace(hint, **more)) + b"\n"


def at_desk(act: Callable[[Desk], Awaitable[None]]) -> None:
    async def run() -> None:
        desk = Desk()
        await desk.inbox.start()
        try:
            await act(desk)
        finally:
            await desk.announcer.close()
            await desk.inbox.close()

    asyncio.run(run())


def test_hint_server_accepts_only_hints_with_its_token() -> None:
    async def act(desk: Desk) -> None:
        await desk.say(desk.told(seq=1) + desk.told(seq=2))
        assert [hint.seq for hint in desk.hints] == [1, 2]
        for bad in (
            desk.told(token="guessed"),
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"token": 3}\n',
            b"\xff\xfe\n",
            b"x" * 100_000,
            desk.told(worker="w" * 5000),
            b"",
        ):
            await desk.say(bad)
        assert len(desk.hints) == 2
        await desk.say(desk.told(seq=3))
        assert desk.hints[-1].seq == 3

    at_desk(act)


def test_hint_sender_reports_stored_manifests() -> None:
    async def act(desk: Desk) -> None:
        await desk.inbox.address.publish(desk.store, epoch=1, now=0.0)
        desk.announcer.stored(0)
        await until_async(lambda: desk.hints, "the hint")
        assert desk.hints[0] == Hint(desk.inbox.address.token, "run", "worker_3", 1, 0)
        for seq in range(1, 50):
            desk.announcer.stored(seq)
        await until_async(lambda: desk.hints[-1].seq == 49, "the hint")
        assert len(desk.hints) <= 3, "one for many"
        assert desk.store.counts["get merged"] == 1

    at_desk(act)


def test_without_an_inbox_a_sender_reads_the_store_once() -> None:
    async def act(desk: Desk) -> None:
        assert desk.store.requests == 0, "nothing is asked before something was stored"
        for seq in range(20):
            desk.announcer.stored(seq)
            await asyncio.sleep(0.001)
            desk.time += 1
        assert desk.store.requests == 1
        await desk.inbox.address.publish(desk.store, epoch=1, now=0.0)
        desk.time += 30
        desk.announcer.stored(20)
        await until_async(lambda: desk.hints, "the hint")

    at_desk(act)


def test_dead_inbox_is_retried_rarely_and_a_new_one_is_found() -> None:
    async def act(desk: Desk) -> None:
        nobody = HintServer(desk.hints.append, host="127.0.0.1")
        await nobody.start()
        gone = nobody.address
        await nobody.close()
        await gone.publish(desk.store, epoch=1, now=0.0)
        desk.announcer.stored(0)
        await until_async(lambda: desk.announcer._send_at > desk.time, "the hint")
        before = desk.store.requests
        for seq in range(1, 50):
            desk.announcer.stored(seq)
            await asyncio.sleep(0)
            desk.time += 1
        assert desk.store.requests == before
        assert desk.announcer._task is not None
        assert desk.announcer._task.done()
        await desk.inbox.address.publish(desk.store, epoch=2, now=0.0)
        desk.time += 60
        desk.announcer.stored(50)
        await until_async(lambda: desk.hints, "the hint")

    at_desk(act)


@contextmanager
def deaf_listener() -> Iterator[tuple[str, int]]:
    """A full backlog: a connection is neither taken nor refused."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.mark.parametrize("junk", [b"", b"{", b'{"host": 1}', b'{"host": "", "port": -1}'])
def test_damaged_inbox_record_is_ignored(junk: bytes) -> None:
    async def act(desk: Desk) -> None:
        await desk.store.put(INBOX_KEY, [junk])
        desk.announcer.stored(0)
        await until_async(
            lambda: desk.announcer._task is not None and desk.announcer._task.done(), "the hint"
        )
        assert desk.announcer._task is not None
        assert desk.announcer._task.exception() is None

    at_desk(act)


def test_silent_listener_does_not_block_the_sender() -> None:
    async def act(desk: Desk) -> None:
        with deaf_listener() as (host, port):
            await desk.store.put(
                INBOX_KEY, [encode(InboxRecord(host, port, "t", 1, 0.0), INBOX_KEY)]
            )
            desk.announcer.stored(0)
            task = desk.announcer._task
            assert task is not None
            await desk.announcer.close()
            await asyncio.wait([task])
            assert task.cancelled(), "it was still trying, and was not waited for"

    at_desk(act)


def test_withdrawing_keeps_the_inbox_of_another_server() -> None:
    async def act(desk: Desk) -> None:
        mine, theirs = desk.inbox.address, InboxAddress("h", 1, "other")
        await mine.publish(desk.store, 1, 0.0)
        await mine.withdraw(desk.store)
        assert not await desk.store.list(INBOX_KEY)
        await mine.withdraw(desk.store)
        await theirs.publish(desk.store, 2, 0.0)
        await mine.withdraw(desk.store)
        assert await desk.store.list(INBOX_KEY)

    at_desk(act)


def test_hints_make_a_step_visible_before_the_next_poll() -> None:
    store = MemoryStore("pushed")
    rank = RunBuilder(store).rank(0)

    def save(step: int) -> None:
        rank.step(ModeKeys.TRAIN, step, {"w": np.ones(2)}).flush()

    async def act() -> None:
        stop = asyncio.Event()
        # It asks every hour by itself.
        watch = DirectoryWatcher(store.url, store=store, interval_s=3600.0, hint_host="127.0.0.1")
        running = asyncio.create_task(watch.run(stop))
        await until_async(lambda: INBOX_KEY in store.objects, "the hint")
        announcer = Announcer(store, lambda: "run", rank.session)
        for step in range(3):
            await asyncio.to_thread(save, step)
            announcer.stored(rank.seq - 1)
            await until_async(
                lambda: watch.watcher().queries.latest_complete_step() == step,  # noqa: B023
                "the hint",
            )
        assert watch.watcher().queries.status().hints >= 2
        await announcer.close()
        stop.set()
        await running
        assert INBOX_KEY not in store.objects
        await watch.close()

    asyncio.run(act())
