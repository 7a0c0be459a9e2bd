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
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import botocore.handlers
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from smdist.storage.s3_body import Body
from smdist.storage.s3_errors import Fault, RequestFailed, classify
from smdist.storage.s3_session import (
    ClientSettings,
    client_settings,
    config_values,
    share_models,
)
from smdist.storage.s3_settings import S3Location, S3Options

__all__ = ["Connection", "Counts"]


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
        self._slots = asyncio.Semaphore(options.concurrency)
        self._budget = _ByteBudget(options.in_flight_bytes, counts)
        self._opening = asyncio.Lock()
        self._lease: _Lease | None = None
        self._random = random.Random()

    @property
    def is_aws(self) -> bool:
        return self._lease is not None and self._lease.settings.is_aws

    async def open(self) -> None:
        """Raises RequestFailed when there are no settings to make a client from."""
        await self._client(None)

    async def close(self) -> None:
        async with self._opening:
            lease, self._lease = self._lease, None
            if lease is not None:
                await lease.retire()

    async def call(
        self,
        method: str,
        params: dict[str, Any],
        *,
        body: Sequence[memoryview] = (),
        answer_bytes: int = 0,
        deadline_s: float | None = None,
    ) -> dict[str, Any]:
        """The answer of one operation, its body read (as bytes in "Body").

        `answer_bytes`: how large that will be at most, if it is known; it counts as under way.
        """
        limit = self.options.deadline_s if deadline_s is None else deadline_s
        deadline, attempt, unsure = time.monotonic() + limit, 0, False
        lease: _Lease | None = None
        stale = False
        while True:
            attempt += 1
            try:
                # Newer credentials may lie in the profile, which the SDK reads once.
                lease = await self._client(lease if stale else None)
                answer = await self._attempt(lease, method, params, body, answer_bytes)
            except Exception as error:
                fault = classify(error)
                if fault is None:
                    raise
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
        lease: _Lease,
        method: str,
        params: dict[str, Any],
        views: Sequence[memoryview],
        answer_bytes: int,
    ) -> dict[str, Any]:
        body = Body(views)
        async with self._budget.taken(len(body) + answer_bytes), self._slots, lease.used():
            self.counts.requests[method] += 1
            if len(body):
                params = {**params, "Body": body}
            task = asyncio.ensure_future(self._send(lease.client, method, params))
            try:
                answer = await self._watch(task, body)
            finally:
                body.close()
                await _ended(task)
        self.counts.sent_bytes += len(body)
        return answer

    async def _send(self, client: Any, method: str, params: dict[str, Any]) -> dict[str, Any]:
        options, request = self.options, getattr(client, method)(**params)
        if "Body" in params:
            answer: dict[str, Any] = await request  # `_watch` sees whether it moves
        else:
            # The timeouts of aiohttp leave out the resolution of names.
            limit = options.connect_timeout_s + options.stall_s
            answer = await asyncio.wait_for(request, limit)
        if (stream := answer.get("Body")) is not None:
            # A timeout of the socket does not end a body that comes byte by byte.
            limit = options.stall_s + int(answer["ContentLength"]) / options.slowest_bytes_per_s
            try:
                answer["Body"] = data = await asyncio.wait_for(stream.read(), limit)
            finally:
                stream.close()
            self.counts.received_bytes += len(data)
        return answer

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

    async def _client(self, stale: _Lease | None) -> _Lease:
        """The client, made anew if it is `stale`: who comes second finds the new one."""
        lease = self._lease
        if lease is not None and lease is not stale:
            return lease
        async with self._opening:
            if self._lease is None or self._lease is stale:
                try:
                    fresh = await _lease(self.location, self.options)
                except Exception as error:
                    fault = classify(error)
                    if fault is None:
                        raise
                    raise RequestFailed(fault, error, attempts=1, unsure=False) from error
                old, self._lease = self._lease, fresh
                self.endpoint = str(fresh.client.meta.endpoint_url)
                if old is not None:
                    self.counts.renewals += 1
                    await old.retire()
            return self._lease


class _Lease:
    """A client that is closed once it is retired and nobody uses it."""

    def __init__(self, client: Any, settings: ClientSettings, closing: Any) -> None:
        self.client, self.settings = client, settings
        self._closing, self._users, self._retired = closing, 0, False

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            await self._close_if_free()

    async def retire(self) -> None:
        self._retired = True
        await self._close_if_free()

    async def _close_if_free(self) -> None:
        if self._retired and not self._users:
            await self._closing.aclose()


async def _lease(location: S3Location, options: S3Options) -> _Lease:
    session = AioSession(profile=location.profile)
    share_models(session)
    settings = client_settings(location, session)
    values = config_values(settings, connect_s=options.connect_timeout_s, read_s=options.stall_s)
    config = AioConfig(max_pool_connections=options.concurrency, **values)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            session.create_client(
                "s3",
                region_name=settings.region,
                endpoint_url=settings.endpoint_url,
                config=config,
            )
        )
        # "Expect: 100-continue" costs a round trip per put, and aiohttp waits for the answer to it
        # without any timeout.
        client.meta.events.unregister("before-call.s3", botocore.handlers.add_expect_header)
        return _Lease(client, settings, stack.pop_all())
    raise AssertionError  # no exit stack swallows an error here


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
