"""The right to write the merged view of a run, held in its store; the rules are in `commit`.

One owner, one event loop: `begin` once, then `publish` snapshots and `renew` between them, `release`
last. `begin` raises AlreadyCoordinated, the others Superseded, after which nothing is to be written;
StoreError and OSError mean that it may be tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import TypeVar

from smdist.coordination.service.leadership import (
    CLAIMS,
    Claim,
    ClaimId,
    LeaseRecord,
    PublishIntervals,
    after_claim,
    free_in_s,
    greater,
    leader,
    newer_claim,
    safe_writer,
    stale_claims,
)
from smdist.coordination.snapshot.pack import POINTER_KEY, PackedSnapshot, Pointer
from smdist.errors import AlreadyCoordinated, CorruptObject, ObjectNotFound, SmdistError, Superseded
from smdist.format.stored_json import encode, read
from smdist.storage.store import Store

__all__ = ["Lease"]

T = TypeVar("T")

_AT_ONCE = 8


class Lease:
    def __init__(
        self,
        store: Store,
        *,
        owner: str | None,
        now: Callable[[], float],
        cadence: PublishIntervals,
    ) -> None:
        life = secrets.token_hex(4)
        self.writer = f"{safe_writer(owner or socket.gethostname())[:40]}-{life}"
        self._owner = owner or self.writer
        self._store, self._now, self._cadence = store, now, cadence
        self._standing = ClaimId(0, self.writer)
        self._spoken_at = 0.0
        self.pointer: Pointer | None = None
        self.number = 0  # of the last snapshot that was tried; each try gets a number of its own

    @property
    def epoch(self) -> int:
        return self._standing.epoch

    # -- beginning -------------------------------------------------------------------------------

    async def look(self) -> Pointer | None:
        """The newest pointer, as a reader finds it."""
        self.pointer = greater(self.pointer, await self._read(POINTER_KEY, Pointer))
        return self.pointer

    async def begin(self, *, take_over: bool = False) -> None:
        top = leader(await self._store.list(CLAIMS))
        if top is not None:
            claim, lease = await self._about(top)
            if lease is not None:
                self.pointer = greater(self.pointer, lease.pointer)
            if not take_over and claim is not None and claim.owner != self._owner:
                self._refuse_if_held(claim, lease)
        await self.look()
        epochs = (top.epoch if top else 0, self.pointer.epoch if self.pointer else 0)
        standing = ClaimId(max(epochs) + 1, self.writer)
        while True:
            await self._claim(standing)
            claims = await self._store.list(CLAIMS)
            verdict = after_claim(standing, claims)
            if verdict.lost is not None:
                raise await self._lost_to(verdict.lost)
            if verdict.again is None:
                break
            standing = verdict.again
        self._standing = standing
        # One that was there while we claimed may have moved it meanwhile.
        await self.look()
        self.number = self.pointer.number if self.pointer else 0
        await self._speak()
        with contextlib.suppress(SmdistError, OSError):
            for old in stale_claims(standing, claims)[:_AT_ONCE]:
                await self._store.delete(old.lease_key)
                await self._store.delete(old.claim_key)

    def _refuse_if_held(self, claim: Claim, lease: LeaseRecord | None) -> None:
        left_s = free_in_s(claim, lease, self._now())
        if left_s > 0:
            raise self._refusal(claim, left_s)

    def _refusal(self, claim: Claim, left_s: float) -> AlreadyCoordinated:
        url = self._store.url
        return AlreadyCoordinated(url, claim.writer, claim.host, claim.pid, claim.time, left_s)

    async def _lost_to(self, other: ClaimId) -> AlreadyCoordinated:
        claim = await self._read(other.claim_key, Claim)
        now, lease_s = self._now(), self._cadence.lease_s
        if claim is None:
            claim = Claim(other.epoch, other.writer, "", "an unknown host", 0, now, lease_s)
        return self._refusal(claim, free_in_s(claim, None, now))

    async def _claim(self, standing: ClaimId) -> None:
        claim = Claim(
            standing.epoch,
            standing.writer,
            self._owner,
            socket.gethostname(),
            os.getpid(),
            self._now(),
            self._cadence.lease_s,
        )
        await self._put(standing.claim_key, claim)

    async def _about(self, standing: ClaimId) -> tuple[Claim | None, LeaseRecord | None]:
        return (
            await self._read(standing.claim_key, Claim),
            await self._read(standing.lease_key, LeaseRecord),
        )

    # -- writing ---------------------------------------------------------------------------------

    def next_number(self) -> int:
        """For the next try. A number is not used twice: the answer to a failed put may be lost."""
        self.number += 1
        return self.number

    async def publish(self, packed: PackedSnapshot) -> None:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def put(key: str, data: bytes | bytearray | memoryview) -> None:
            async with gate:
                await self._store.put(key, [data])

        tasks = [asyncio.ensure_future(put(key, data)) for key, data in packed.objects]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        await self._store.put(packed.head_key, [packed.head])
        await self._check()
        self.pointer = packed.pointer
        # The lease first: who puts a pointer back looks there until it finds what it has put.
        await self._speak()
        await self._point(packed.pointer)
        await self._check()

    async def renew(self) -> None:
        """Say that we are there, if it is time to."""
        if 0 <= self._now() - self._spoken_at < self._cadence.renew_s:
            return
        await self._check()
        await self._speak()
        await self._mend()

    async def release(self) -> None:
        """The next one need not wait. Nothing is done when another one has the right by now."""
        with contextlib.suppress(Superseded):
            await self._check()
            await self._mend()
            await self._speak(released=True)

    async def _mend(self) -> None:
        """Put the pointer right that one of before us has moved back before it was killed."""
        found = await self._read(POINTER_KEY, Pointer)
        if self.pointer is not None and greater(found, self.pointer) is self.pointer:
            await self._point(self.pointer)

    async def _speak(self, *, released: bool = False) -> None:
        self._spoken_at = self._now()
        lease = LeaseRecord(
            self.epoch, self.writer, self._spoken_at, self._cadence.lease_s, released, self.pointer
        )
        await self._put(self._standing.lease_key, lease)

    async def _point(self, pointer: Pointer) -> None:
        await self._put(POINTER_KEY, pointer)

    async def _check(self) -> None:
        """Superseded when there is a greater claim, with the pointer as its owner left it."""
        restored: Pointer | None = None
        while True:
            claims = await self._store.list(CLAIMS, after=self._standing.before)
            above = newer_claim(self._standing, claims)
            if above is None:
                return
            lease = await self._read(above.lease_key, LeaseRecord)
            pointer = lease.pointer if lease else None
            if pointer is None or pointer == restored:
                raise Superseded(self._store.url, self.writer, above.writer, above.epoch)
            await self._point(pointer)
            restored = pointer

    async def _put(self, key: str, value: Claim | LeaseRecord | Pointer) -> None:
        await self._store.put(key, [encode(value, key)])

    async def _read(self, key: str, kind: type[T]) -> T | None:
        """None when it is not there, or makes no sense: then it is as if it were not."""
        try:
            return await read(self._store, key, kind)
        except (ObjectNotFound, CorruptObject):
            return None
