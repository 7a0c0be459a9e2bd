"""A proxy that carries out plans: one for each bucket, many at a time.

Requests are counted by sort over all processes of a schedule. A request of a process that is dead by
the time its turn comes is dropped; `settled` tells when none is under way any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote

from tests.faults.schedule_plan import Cut, Deed, Delay, Halve, Kill, Lose, Plan, Refuse
from tests.support import proxy as base

__all__ = ["ScheduleProxy", "Traffic", "sort_of"]

_PREFIXES = {"manifests": "manifest", "segments": "segment", "layouts": "layout"}


def sort_of(method: str, target: str) -> str:
    path, _, query = target.partition("?")
    if "uploadId=" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}.get(method, "other")
    if re.search(r"(^|&)uploads\b", query):
        return "create" if method == "POST" else "list_uploads"
    if "list-type=" in query:
        return "list"
    if method == "PUT":
        folder = path.split("/")[3:4]
        return _PREFIXES.get(folder[0] if folder else "", "small")
    return {"GET": "get", "HEAD": "get", "DELETE": "delete"}.get(method, "other")


class Traffic:
    """Of one schedule. The driver says which processes there are."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._fired = [0] * len(plan.events)
        self.rank = 0
        self.uploader: int | None = None  # or whoever does its work; None: not known yet
        self.life = 0
        self.under_way = 0
        self.over = False
        self.seen: list[str] = []
        self.counts: Counter[str] = Counter()
        self.deeds: Counter[str] = Counter()  # that were done

    def arrived(self, method: str, target: str) -> list[Deed]:
        sort = sort_of(method, target)
        with self._lock:
            self.seen.append(f"{self.life} {sort} {method} {unquote(target)}")
            nth, of_any = self.counts[sort], self.counts["any"]
            self.counts[sort] += 1
            self.counts["any"] += 1
            due = []
            for i, event in enumerate(self._plan.events):
                at = of_any if event.sort == "any" else nth if event.sort == sort else -1
                if at >= event.nth and self._fired[i] < event.times:
                    self._fired[i] += 1
                    due.append(event.deed)
            if due:
                self.seen[-1] += f"   {due}"
        return due

    async def kill(self, deed: Kill) -> None:
        while self.uploader is None and not self.over:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.001)
        victims = [] if deed.who == "rank" else [self.uploader]
        victims += [] if deed.who == "uploader" else [self.rank]
        for pid in victims:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.deeds[f"kill {deed.who} {deed.when}"] += 1


class ScheduleProxy(base.FaultProxy):
    def __init__(self, upstream_port: int) -> None:
        super().__init__(upstream_port)
        self._traffic: dict[str, Traffic] = {}
        self._lives: dict[asyncio.Task[None], int] = {}

    def follow(self, bucket: str, plan: Plan) -> Traffic:
        traffic = self._traffic[bucket] = Traffic(plan)
        return traffic

    def settle(self, traffic: Traffic) -> None:
        """Call it when the process that sent them is dead: what it sent has been dealt with then."""
        asyncio.run_coroutine_threadsafe(self._settle(traffic), self._loop).result(60)

    async def _settle(self, traffic: Traffic) -> None:
        for _ in range(10):  # what lies in the sockets
            await asyncio.sleep(0)
        while traffic.under_way:  # noqa: ASYNC110 - nothing sets an event
            await asyncio.sleep(0.001)
        traffic.life += 1
        traffic.uploader = None

    async def _serve(
        self, request: base._Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        traffic = self._traffic.get(request.target.split("/", 2)[1].partition("?")[0])
        if traffic is None:
            await super()._serve(request, reader, writer)
            return
        task = asyncio.current_task()
        assert task is not None
        if task not in self._lives:
            task.add_done_callback(lambda done: self._lives.pop(done, None))
        if self._lives.setdefault(task, traffic.life) != traffic.life:
            raise base._Gone
        traffic.under_way += 1
        try:
            await self._meet(traffic, request, reader, writer)
        finally:
            traffic.under_way -= 1

    async def _meet(
        self,
        traffic: Traffic,
        request: base._Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        deeds = traffic.arrived(request.method, request.target)
        if request.expects:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        for deed in deeds:
            if isinstance(deed, Refuse) and deed.early:
                traffic.deeds["refuse early"] += 1
                writer.write(base._error(base.Answer(deed.status, deed.code), close=True))
                await writer.drain()
                raise base._Gone
        body = await reader.readexactly(request.length)
        for deed in deeds:
            await self._before(traffic, deed, request, body, writer)
            if isinstance(deed, Refuse):
                return
        head, answer = await self._forward(request, body)
        for deed in deeds:
            await self._after(traffic, deed, head + answer, writer)
        writer.write(head + answer)
        await writer.drain()

    async def _before(
        self,
        traffic: Traffic,
        deed: Deed,
        request: base._Request,
        body: bytes,
        writer: asyncio.StreamWriter,
    ) -> None:
        if isinstance(deed, Delay):
            traffic.deeds["delay"] += 1
            await asyncio.sleep(deed.seconds)
        elif isinstance(deed, Kill) and deed.when == "before":
            await traffic.kill(deed)
            if deed.who != "rank":
                base._reset(writer)
        elif isinstance(deed, Lose) and deed.when == "before":
            traffic.deeds["lose before"] += 1
            base._reset(writer)
        elif isinstance(deed, Halve):
            traffic.deeds["halve"] += 1
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._forward_half(request, body)
            base._reset(writer)
        elif isinstance(deed, Refuse):
            traffic.deeds["refuse"] += 1
            writer.write(base._error(base.Answer(deed.status, deed.code), close=False))
            await writer.drain()

    async def _after(
        self, traffic: Traffic, deed: Deed, answer: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if isinstance(deed, Kill) and deed.when == "after":
            await traffic.kill(deed)
            if deed.who != "rank":
                base._reset(writer)
        elif isinstance(deed, Lose):
            traffic.deeds["lose after"] += 1
            base._reset(writer)
        elif isinstance(deed, Cut):
            traffic.deeds["cut"] += 1
            writer.write(answer[: deed.after_bytes])
            await writer.drain()
            raise base._Gone

    async def _forward_half(self, request: base._Request, body: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            writer.write(request.text.encode("latin-1") + body[: len(body) // 2])
            writer.write_eof()
            await asyncio.wait_for(reader.read(1), 5)  # until it has seen the end
        finally:
            writer.close()


@contextlib.contextmanager
def scheduling(upstream_port: int) -> Iterator[ScheduleProxy]:
    proxy = ScheduleProxy(upstream_port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
