"""A proxy that makes an HTTP server misbehave, for tests and benchmarks on the loopback interface.

It understands just enough HTTP/1.1 to see whole requests: it can count them by method and key, hold
them up, answer in the server's stead, and cut connections before or after the server has acted.
Rules are tried in the order they were added; latencies add up, of the others the first counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Union
from urllib.parse import unquote

__all__ = [
    "Answer",
    "Chunked",
    "Cut",
    "Fault",
    "FaultProxy",
    "HalfOpen",
    "Hold",
    "Latency",
    "Reset",
    "Rule",
    "Slow",
    "proxied",
]


@dataclass(frozen=True)
class Latency:
    """Before the request goes on."""

    seconds: float


@dataclass(frozen=True)
class Answer:
    """An error of S3 in the server's stead, after the whole request or already after its head.

    Without a code it is a page as web servers have them, or an empty one.
    """

    status: int
    code: str
    early: bool = False
    empty: bool = False


@dataclass(frozen=True)
class Reset:
    """A connection reset, before the server has seen the request or after it has acted."""

    when: Literal["before", "after"] = "before"


@dataclass(frozen=True)
class HalfOpen:
    """Silence: the connection stays, nothing is read from it and nothing comes."""

    reads: bool = True  # False: the request's body is not taken either


@dataclass(frozen=True)
class Hold:
    """The request is late: it reaches the server once it is let go, whoever sent it lives or not."""

    go: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def let_go(self) -> None:
        """Returns when the server has acted."""
        self.go.set()
        assert self.done.wait(60), "the server did not answer"


@dataclass(frozen=True)
class Slow:
    """The answer's body comes slowly."""

    bytes_per_s: float


@dataclass(frozen=True)
class Chunked:
    """The answer's body comes in chunks, and its head does not say how long it is."""

    whole: bool = True  # False: the connection is closed after half of it


@dataclass(frozen=True)
class Cut:
    """The connection is closed after so many bytes of the answer's body."""

    after_bytes: int


Fault = Union[Latency, Answer, Reset, HalfOpen, Hold, Slow, Chunked, Cut]  # noqa: UP007 (3.10)


@dataclass
class Rule:
    fault: Fault
    method: str = ""  # any
    target: str = ""  # regular expression, searched in path and query
    header: str = ""  # the same, in the head of the request
    times: int | None = None
    probability: float = 1.0
    until: float = float("inf")  # monotonic
    random: random.Random = field(default_factory=random.Random)
    hits: int = 0

    def applies(self, request: _Request) -> bool:
        if self.times is not None and self.hits >= self.times:
            return False
        if time.monotonic() >= self.until or self.method not in ("", request.method):
            return False
        if not re.search(self.target, request.target) or not re.search(self.header, request.text):
            return False
        if self.probability < 1.0 and self.random.random() >= self.probability:
            return False
        self.hits += 1
        return True


@dataclass(frozen=True)
class _Request:
    method: str
    target: str
    text: str
    length: int

    @property
    def expects(self) -> bool:
        return "100-continue" in self.text.lower()


class _Gone(Exception):
    """This connection ends here."""


class FaultProxy:
    """Runs on a thread of its own from `start` to `stop`."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._rules: list[Rule] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []  # method, path with query
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, bucket: str, prefix: str = "run") -> str:
        return f"s3://{bucket}/{prefix}?endpoint_url={self.endpoint}"

    def inject(
        self,
        fault: Fault,
        *,
        method: str = "",
        target: str = "",
        header: str = "",
        times: int | None = None,
        probability: float = 1.0,
        for_s: float = float("inf"),
        seed: int = 0,
    ) -> Rule:
        until = time.monotonic() + for_s
        rule = Rule(fault, method, target, header, times, probability, until, random.Random(seed))
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def count(self, method: str = "", target: str = "") -> int:
        with self._lock:
            seen = list(self.requests)
        return sum(method in ("", m) and bool(re.search(target, t)) for m, t in seen)

    def drop(self) -> None:
        """Cut every connection there is; what a silent one holds back goes with it."""
        self._loop.call_soon_threadsafe(self._cancel)

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _end(self) -> None:
        self._server.close()
        await asyncio.sleep(0.01)  # who was accepted in this moment has a task by then
        self._cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _cancel(self) -> None:
        for task in self._connections:
            task.cancel()

    # -- one connection --------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (request := await _read_head(reader)) is not None:
                await self._serve(request, reader, writer)
        except (_Gone, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(
        self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with self._lock:
            self.requests.append((request.method, unquote(request.target)))
            faults = [rule.fault for rule in self._rules if rule.applies(request)]
        await asyncio.sleep(sum(f.seconds for f in faults if isinstance(f, Latency)))
        fault = next((f for f in faults if not isinstance(f, Latency)), None)
        if isinstance(fault, HalfOpen) and not fault.reads:
            await asyncio.Event().wait()
        if isinstance(fault, Answer) and fault.early:
            writer.write(_error(fault, close=True))
            await writer.drain()
            raise _Gone
        if request.expects:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(request.length)
        if isinstance(fault, HalfOpen):
            await asyncio.Event().wait()
        if isinstance(fault, Reset) and fault.when == "before":
            _reset(writer)
        if isinstance(fault, Answer):
            writer.write(_error(fault, close=False))
            await writer.drain()
            return
        while isinstance(fault, Hold) and not fault.go.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # it is set by another thread
        head, answer = await self._forward(request, body)
        if isinstance(fault, Hold):
            fault.done.set()
        if isinstance(fault, Reset):
            _reset(writer)
        writer.write(_unmeasured(head) if isinstance(fault, Chunked) else head)
        await _send(writer, answer, fault)

    async def _forward(self, request: _Request, body: bytes) -> tuple[bytes, bytes]:
        """A connection per request: the server's own keep-alive is none of the proxy's business."""
        lines = request.text.split("\r\n")
        kept = [line for line in lines if not re.match(r"(?i)(expect|connection):", line)]
        # After the request line: a head ends with an empty line.
        head = "\r\n".join([kept[0], "Connection: close", *kept[1:]]).encode("latin-1")
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            writer.write(head + body)
            await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            rest = await _read_answer(request.method, answer, reader)
        finally:
            writer.close()
        return _reframed(answer, request.method, len(rest)), rest


async def _read_head(reader: asyncio.StreamReader) -> _Request | None:
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    method, target, _ = text.split(" ", 2)
    return _Request(method, target, text, _length(text) or 0)


def _length(text: str) -> int | None:
    found = re.search(r"(?im)^content-length:\s*(\d+)", text)
    return int(found[1]) if found else None


async def _read_answer(method: str, head: bytes, reader: asyncio.StreamReader) -> bytes:
    text = head.decode("latin-1")
    if method == "HEAD" or text.split(" ", 2)[1] in ("204", "304"):
        return b""
    if re.search(r"(?im)^transfer-encoding:.*chunked", text):
        parts = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return b"".join(parts)
    length = _length(text)
    return await reader.read() if length is None else await reader.readexactly(length)


def _reframed(head: bytes, method: str, length: int) -> bytes:
    lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    drop = r"(?i)(connection|transfer-encoding|keep-alive):"
    kept = [line for line in lines if not re.match(drop, line)]
    kept[0] = re.sub(r"^HTTP/1\.0", "HTTP/1.1", kept[0])
    if method != "HEAD" and kept[0].split(" ")[1] != "204":
        kept = [line for line in kept if not re.match(r"(?i)content-length:", line)]
        kept.append(f"Content-Length: {length}")
    return ("\r\n".join(kept) + "\r\n\r\n").encode("latin-1")


def _unmeasured(head: bytes) -> bytes:
    return re.sub(rb"(?im)^content-length:.*\r\n", b"Transfer-Encoding: chunked\r\n", head)


def _error(fault: Answer, *, close: bool) -> bytes:
    kind, text = "text/html", f"<!DOCTYPE html>\n<html><body><h1>{fault.status}<br></body></html>"
    if fault.code:
        kind = "application/xml"
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>"
        )
    body = b"" if fault.empty else text.encode()
    head = f"HTTP/1.1 {fault.status} Injected\r\nContent-Type: {kind}\r\n"
    head += "Connection: close\r\n" if close else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _send(writer: asyncio.StreamWriter, body: bytes, fault: Fault | None) -> None:
    if isinstance(fault, Cut):
        writer.write(body[: fault.after_bytes])
        await writer.drain()
        raise _Gone
    if isinstance(fault, Slow):
        for at in range(len(body)):
            writer.write(body[at : at + 1])
            await writer.drain()
            await asyncio.sleep(1 / fault.bytes_per_s)
        return
    if isinstance(fault, Chunked):
        half = len(body) // 2
        parts = [part for part in (body[:half], body[half:])[: 1 + fault.whole] if part]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        body += b"0\r\n\r\n" if fault.whole else b""
    writer.write(body)
    await writer.drain()
    if isinstance(fault, Chunked) and not fault.whole:
        raise _Gone


def _reset(writer: asyncio.StreamWriter) -> None:
    found = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    raise _Gone


@contextlib.contextmanager
def proxied(upstream_port: int) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream_port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
