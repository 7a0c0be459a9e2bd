"""One client with its limits and its retries. Everything here belongs to one event loop.

`call` is the only way to the server, and the only layer that retries. It raises RequestFailed, or
CancelledError if cancelled. Either way nothing reads the caller's buffers afterwards.
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

from smdist.storage.s3.client import smdist_requests
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
    retries: Counter[str] = field(default_factory=Counter)  # by error code
    sent_bytes: int = 0  # bodies of successful requests
    received_bytes: int = 0
    parts: int = 0  # of multipart uploads, successful
    dangling: set[str] = field(default_factory=set)  # keys of uploads that could not be aborted
    in_flight_bytes: int = 0
    most_in_flight_bytes: int = 0
    renewals: int = 0


class Connection:
    def __init__(self, location: S3Location, options: S3Options, counts: Counts) -> None:
        self.location, self.options, self.counts = location, options, counts
        self.endpoint = ""
        self.conditions = True  # until the server rejects conditional writes
        self._credentials_read_at = float("-inf")  # when they were last found unchanged
        self._slots = asyncio.Semaphore(options.concurrency)
        self._budget = _ByteBudget(options.in_flight_bytes, counts)
        self._opening = asyncio.Lock()
        self._handle: ClientHandle | None = None
        self._random = random.Random()

    @property
    def is_aws(self) -> bool:
        return self._handle is not None and self._handle.settings.is_aws

    async def open(self) -> None:
        """Create the client. Raise RequestFailed if the settings do not allow one."""
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
        """Perform one operation and return its answer, with the body as bytes in "Body".

        `answer_bytes` is the maximum size of that body if known; it counts against the byte budget.
        `admit` is called with the size of a whole object before or while it is read, and may raise.
        """
        limit = self.options.deadline_s if deadline_s is None else deadline_s
        deadline, attempt, unsure = time.monotonic() + limit, 0, False
        handle: ClientHandle | None = None
        stale = False
        while True:
            attempt += 1
            try:
                # The SDK reads the profile once; newer credentials may be there by now.
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
        # In this order: `_send` may wait for bytes while it has a slot, so bytes must not wait for slots.
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
        """Send one request and read its answer; `counted` if the budget includes it already."""
        options, request = self.options, getattr(client, method)(**params)
        with smdist_requests():
            if "Body" in params:
                answer: dict[str, Any] = await request  # `_watch` checks its progress
            else:
                # The timeouts of aiohttp do not cover name resolution.
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
        """Read a body within a time limit: a socket timeout does not end one that trickles."""
        options, began = self.options, time.monotonic()
        if size is not None:
            limit = options.stall_s + int(size) / options.slowest_bytes_per_s
            whole: bytes = await asyncio.wait_for(stream.read(), limit)
            return whole
        data = bytearray()  # HTTP/1.1 allows an answer of unknown size
        while True:
            until = began + options.stall_s + len(data) / options.slowest_bytes_per_s
            chunk = await asyncio.wait_for(stream.read(_CHUNK), until - time.monotonic())
            if not chunk:
                return bytes(data)
            data += chunk
            admit(len(data))

    async def _watch(self, task: asyncio.Task[dict[str, Any]], body: Body) -> dict[str, Any]:
        """Wait for `task`, and raise TimeoutError if the server stops taking the body.

        aiohttp has timeouts for connecting and for answers, but none for that.
        """
        timeout_s = self.options.connect_timeout_s + self.options.stall_s if len(body) else None
        while True:
            before = body.taken
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            if done:
                return task.result()
            if body.taken == before:
                raise asyncio.TimeoutError("the server stopped reading the request")

    # -- the client ------------------------------------------------------------------------------

    async def _client(self, stale: ClientHandle | None) -> ClientHandle:
        """Return the client, a new one if it is `stale`. Concurrent callers share the new one."""
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
        """Replace the client if there are other credentials by now. Return whether it was replaced."""
        async with self._opening:
            if self._handle is not refused:
                return self._handle is not None
            if time.monotonic() < self._credentials_read_at + self.options.look_again_s:
                return False
            self._credentials_read_at = time.monotonic()
            try:
                fresh = await create_client_if_renewed(self.location, self.options, refused)
            except Exception as error:
                if classify(error) is None:
                    raise
                return False  # no better credentials
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
    """Limits the bytes in flight, first come first served. A larger request runs alone."""

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
            if turn.done() and not turn.cancelled():  # admitted at the same moment
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
    """Cancel `task` and wait for its end: the caller reuses the buffers afterwards."""
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
