"""One client, its limits and its retries. Everything here belongs to one event loop.

`call` is the only way to the server, and the only layer that retries. It raises RequestFailed, or
CancelledError when the caller gives up; either way nothing reads the caller's buffers afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from smdist.storage.s3.client import ours
from smdist.storage.s3.client_handle import ClientHandle, create_client, create_client_if_renewed
from smdist.storage.s3.errors import Fault, RequestFailed, check_receipt, classify
from smdist.storage.s3.options import S3Location, S3Options
from smdist.storage.s3.request_body import Body

__all__ = ["Admit", "Connection", "Counts"]

_CHUNK = 256 << 10

Admit = Callable[[int], None]


def _any_size(_: int) -> None:
    pass


@dataclass
class Counts:
    requests: Counter[str] = field(default_factory=Counter)  # by S3 operation
    retries: Counter[str] = field(default_factory=Counter)  # by what made it necessary
    sent_bytes: int = 0  # bodies of requests that were answered well
    received_bytes: int = 0
    parts: int = 0  # of multipart uploads, answered well
    dangling: set[str] = field(default_factory=set)  # keys of uploads that could not be aborted
    in_flight_bytes: int = 0
    most_in_flight_bytes: int = 0
    renewals: int = 0


class Connection:
    def __init__(self, location: S3Location, options: S3Options, counts: Counts) -> None:
        self.location, self.options, self.counts = location, options, counts
        self.endpoint = ""
        self.conditions = True  # until the server says that it knows none
        self._looked_at = float("-inf")  # when credentials were read again, and were the same
        self._slots = asyncio.Semaphore(options.concurrency)
        self._budget = _ByteBudget(options.in_flight_bytes, counts)
        self._opening = asyncio.Lock()
        self._handle: ClientHandle | None = None
        self._random = random.Random()

    @property
    def is_aws(self) -> bool:
        return self._handle is not None and self._handle.settings.is_aws

    async def open(self) -> None:
        """Raises RequestFailed when there are no settings to make a client from."""
        await self._client(None)

    async def close(self) -> None:
        async with self._opening:
            handle, self._handle = self._handle, None
            if handle is not None:
                await handle.retire()

    async def call(
        self,
        method: str,
        params: dict[str, Any],
        *,
        body: Sequence[memoryview] = (),
        answer_bytes: int = 0,
        deadline_s: float | None = None,
        admit: Admit | None = None,
    ) -> dict[str, Any]:
        """The answer of one operation, its body read (as bytes in "Body").

        `answer_bytes`: how large that will be at most, if it is known; it counts as under way.
        `admit` is told the size of a whole object before it is read, or while, and may raise.
        """
        limit = self.options.deadline_s if deadline_s is None else deadline_s
        deadline, attempt, unsure = time.monotonic() + limit, 0, False
        handle: ClientHandle | None = None
        stale = False
        while True:
            attempt += 1
            try:
                # Newer credentials may lie in the profile, which the SDK reads once.
                handle = await self._client(handle if stale else None)
                answer = await self._attempt(handle, method, params, body, answer_bytes, admit)
            except Exception as error:
                fault = classify(error)
                if fault is None:
                    raise
                if handle is not None and fault.rejected and await self._renewed(handle):
                    self.counts.retries[fault.code] += 1
                    stale = False
                    continue
                pause_s = self._pause_s(fault, attempt)
                if not fault.retryable or time.monotonic() + pause_s > deadline:
                    raise RequestFailed(fault, error, attempts=attempt, unsure=unsure) from error
            else:
                answer["ResponseMetadata"]["RetryAttempts"] = attempt - 1
                return answer
            unsure = unsure or fault.kind == "transient"
            stale = fault.kind == "expired"
            self.counts.retries[fault.code] += 1
            await asyncio.sleep(pause_s)

    def _pause_s(self, fault: Fault, attempt: int) -> float:
        options = self.options
        most = options.most_pause_s * (2 if fault.kind == "throttled" else 1)
        bound = min(options.first_pause_s * 2 ** min(attempt, 16), most)
        return max(self._random.uniform(bound / 4, bound), min(fault.pause_s, most))

    # -- one attempt -----------------------------------------------------------------------------

    async def _attempt(
        self,
        handle: ClientHandle,
        method: str,
        params: dict[str, Any],
        views: Sequence[memoryview],
        answer_bytes: int,
        admit: Admit | None,
    ) -> dict[str, Any]:
        body = Body(views)
        # In this order: who has bytes under way gets on, as `_send` may wait for some with a slot.
        async with self._slots, self._budget.taken(len(body) + answer_bytes), handle.used():
            self.counts.requests[method] += 1
            if len(body):
                params = {**params, "Body": body}
            work = self._send(handle.client, method, params, answer_bytes > 0, admit)
            task = asyncio.ensure_future(work)
            try:
                answer = await self._watch(task, body)
                check_receipt(method, answer)
            finally:
                body.close()
                await _ended(task)
        self.counts.sent_bytes += len(body)
        return answer

    async def _send(
        self,
        client: Any,
        method: str,
        params: dict[str, Any],
        counted: bool,
        admit: Admit | None,
    ) -> dict[str, Any]:
        """`counted`: what will be answered counts as under way already."""
        options, request = self.options, getattr(client, method)(**params)
        with ours():
            if "Body" in params:
                answer: dict[str, Any] = await request  # `_watch` sees whether it moves
            else:
                # The timeouts of aiohttp leave out the resolution of names.
                limit = options.connect_timeout_s + options.stall_s
                answer = await asyncio.wait_for(request, limit)
        if (stream := answer.get("Body")) is not None:
            size = answer.get("ContentLength")
            partial = "Range" in params and "ContentRange" in answer  # a server may ignore ranges
            whole = _any_size if admit is None or partial else admit
            try:
                whole(size or 0)
                async with self._budget.taken(0 if counted else size or 0):
                    answer["Body"] = data = await self._read(stream, size, whole)
            finally:
                stream.close()
            self.counts.received_bytes += len(data)
        return answer

    async def _read(self, stream: Any, size: int | None, admit: Admit) -> bytes:
        """A timeout of the socket does not end a body that comes byte by byte."""
        options, began = self.options, time.monotonic()
        if size is not None:
            limit = options.stall_s + int(size) / options.slowest_bytes_per_s
            whole: bytes = await asyncio.wait_for(stream.read(), limit)
            return whole
        data = bytearray()  # HTTP/1.1 lets a server begin an answer before it knows its size
        while True:
            until = began + options.stall_s + len(data) / options.slowest_bytes_per_s
            chunk = await asyncio.wait_for(stream.read(_CHUNK), until - time.monotonic())
            if not chunk:
                return bytes(data)
            data += chunk
            admit(len(data))

    async def _watch(self, task: asyncio.Task[dict[str, Any]], body: Body) -> dict[str, Any]:
        """aiohttp has timeouts for connecting and for answers, none for a body that is not taken."""
        patience = self.options.connect_timeout_s + self.options.stall_s if len(body) else None
        while True:
            before = body.taken
            done, _ = await asyncio.wait({task}, timeout=patience)
            if done:
                return task.result()
            if body.taken == before:
                raise asyncio.TimeoutError("the server takes no more of the request")

    # -- the client ------------------------------------------------------------------------------

    async def _client(self, stale: ClientHandle | None) -> ClientHandle:
        """The client, made anew if it is `stale`: who comes second finds the new one."""
        handle = self._handle
        if handle is not None and handle is not stale:
            return handle
        async with self._opening:
            if self._handle is None or self._handle is stale:
                try:
                    fresh = await create_client(self.location, self.options)
                except Exception as error:
                    fault = classify(error)
                    if fault is None:
                        raise
                    raise RequestFailed(fault, error, attempts=1, unsure=False) from error
                await self._replace(fresh)
            assert self._handle is not None
            return self._handle

    async def _renewed(self, refused: ClientHandle) -> bool:
        """Whether there are other credentials now than those that were refused: `_client` has them."""
        async with self._opening:
            if self._handle is not refused:
                return self._handle is not None
            if time.monotonic() < self._looked_at + self.options.look_again_s:
                return False
            self._looked_at = time.monotonic()
            try:
                fresh = await create_client_if_renewed(self.location, self.options, refused)
            except Exception as error:
                if classify(error) is None:
                    raise
                return False  # nothing better than what was refused
            if fresh is not None:
                await self._replace(fresh)
            return fresh is not None

    async def _replace(self, fresh: ClientHandle) -> None:
        old, self._handle = self._handle, fresh
        self.endpoint = str(fresh.client.meta.endpoint_url)
        if old is not None:
            self.counts.renewals += 1
            await old.retire()


class _ByteBudget:
    """Bytes under way, both ways, first come first served; one larger than all of it goes alone."""

    def __init__(self, limit: int, counts: Counts) -> None:
        self._limit, self._counts = limit, counts
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        await self._take(size)
        try:
            yield
        finally:
            self._counts.in_flight_bytes -= size
            self._admit()

    async def _take(self, size: int) -> None:
        if not size:
            return
        if not self._waiting and self._fits(size):
            self._add(size)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted in the same moment
                self._counts.in_flight_bytes -= size
            else:
                self._waiting.remove((size, turn))
            self._admit()
            raise

    def _fits(self, size: int) -> bool:
        used = self._counts.in_flight_bytes
        return not used or used + size <= self._limit

    def _add(self, size: int) -> None:
        counts = self._counts
        counts.in_flight_bytes += size
        counts.most_in_flight_bytes = max(counts.most_in_flight_bytes, counts.in_flight_bytes)

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._add(size)
                turn.set_result(None)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel and wait, whatever happens: the buffers go back to the caller after this."""
    cancelled = False
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if not task.cancelled():
        task.exception()
    if cancelled:
        raise asyncio.CancelledError
