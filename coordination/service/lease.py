"""Hold the right to write the merged view of a run; the rules are in `leadership`.

One owner, one event loop: `acquire` once, then `publish` snapshots and `renew` between them, `release`
last. `acquire` raises AlreadyCoordinated, the others Superseded, after which nothing may be written.
StoreError and OSError: try again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import TypeVar

from smdist.concurrency import bounded_gather
from smdist.coordination.service.leadership import (
    CLAIMS,
    Claim,
    ClaimId,
    LeaseRecord,
    PublishIntervals,
    after_claim,
    leader,
    newer_claim,
    newer_pointer,
    remaining_s,
    safe_writer,
    stale_claims,
)
from smdist.coordination.snapshot.pack import POINTER_KEY, PackedSnapshot, Pointer
from smdist.errors import AlreadyCoordinated, CorruptObject, ObjectNotFound, SmdistError, Superseded
from smdist.format.stored_json import encode, read
from smdist.storage.store import Buffer, Store

__all__ = ["Lease"]

T = TypeVar("T")

_CONCURRENCY = 8


class Lease:
    """The claim of one writer, and the newest pointer that it knows."""

    def __init__(
        self,
        store: Store,
        *,
        owner: str | None,
        now: Callable[[], float],
        intervals: PublishIntervals,
    ) -> None:
        name = safe_writer(owner or socket.gethostname())[:40]
        self.writer = f"{name}-{secrets.token_hex(4)}"
        self._owner = owner or self.writer
        self._store, self._now, self._intervals = store, now, intervals
        self._claim_id = ClaimId(0, self.writer)
        self._written_at = 0.0
        self.pointer: Pointer | None = None
        self._number = 0  # of the last snapshot that was tried

    @property
    def epoch(self) -> int:
        return self._claim_id.epoch

    # -- acquiring -------------------------------------------------------------------------------

    async def read_pointer(self) -> Pointer | None:
        """Return the newest pointer, as a reader finds it."""
        self.pointer = newer_pointer(self.pointer, await self._read(POINTER_KEY, Pointer))
        return self.pointer

    async def acquire(self, *, take_over: bool = False) -> None:
        """Claim the next epoch. Raise AlreadyCoordinated unless the lease is free or ours."""
        top = leader(await self._store.list(CLAIMS))
        if top is not None:
            claim = await self._read(top.claim_key, Claim)
            lease = await self._read(top.lease_key, LeaseRecord)
            if lease is not None:
                self.pointer = newer_pointer(self.pointer, lease.pointer)
            if not take_over and claim is not None and claim.owner != self._owner:
                left_s = remaining_s(claim, lease, self._now())
                if left_s > 0:
                    raise self._held_by(claim, left_s)
        await self.read_pointer()
        epochs = (top.epoch if top else 0, self.pointer.epoch if self.pointer else 0)
        claims = await self._claim(ClaimId(max(epochs) + 1, self.writer))
        # A writer that was active while we claimed may have moved the pointer meanwhile.
        await self.read_pointer()
        self._number = self.pointer.number if self.pointer else 0
        await self._write()
        with contextlib.suppress(SmdistError, OSError):
            for old in stale_claims(self._claim_id, claims)[:_CONCURRENCY]:
                await self._store.delete(old.lease_key)
                await self._store.delete(old.claim_key)

    async def _claim(self, wanted: ClaimId) -> list[str]:
        """Write claims until one of them leads; return the keys of all claims."""
        while True:
            claim = Claim(
                wanted.epoch,
                wanted.writer,
                self._owner,
                socket.gethostname(),
                os.getpid(),
                self._now(),
                self._intervals.lease_s,
            )
            await self._put(wanted.claim_key, claim)
            claims = list(await self._store.list(CLAIMS))
            result = after_claim(wanted, claims)
            if result.lost_to is not None:
                raise await self._lost_to(result.lost_to)
            if result.again is None:
                self._claim_id = wanted
                return claims
            wanted = result.again

    def _held_by(self, claim: Claim, left_s: float) -> AlreadyCoordinated:
        url = self._store.url
        return AlreadyCoordinated(url, claim.writer, claim.host, claim.pid, claim.time, left_s)

    async def _lost_to(self, other: ClaimId) -> AlreadyCoordinated:
        claim = await self._read(other.claim_key, Claim)
        now, lease_s = self._now(), self._intervals.lease_s
        if claim is None:
            claim = Claim(other.epoch, other.writer, "", "an unknown host", 0, now, lease_s)
        return self._held_by(claim, remaining_s(claim, None, now))

    # -- writing ---------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return a number for the next snapshot. None is used twice: a failed put may have succeeded."""
        self._number += 1
        return self._number

    async def publish(self, packed: PackedSnapshot) -> None:
        """Store the objects of a snapshot, its head, then the pointer to it."""

        async def put(item: tuple[str, Buffer]) -> None:
            await self._store.put(item[0], [item[1]])

        await bounded_gather(put, packed.objects, _CONCURRENCY)
        await self._store.put(packed.head_key, [packed.head])
        await self._check_leads()
        self.pointer = packed.pointer
        # The lease first: a writer that restores the pointer reads it there.
        await self._write()
        await self._put(POINTER_KEY, packed.pointer)
        await self._check_leads()

    async def renew(self) -> None:
        """Write the lease again if it is time to."""
        if 0 <= self._now() - self._written_at < self._intervals.renew_s:
            return
        await self._check_leads()
        await self._write()
        await self._repair_pointer()

    async def release(self) -> None:
        """End the lease, so that the next writer need not wait. Do nothing if another one leads."""
        with contextlib.suppress(Superseded):
            await self._check_leads()
            await self._repair_pointer()
            await self._write(released=True)

    async def _repair_pointer(self) -> None:
        """Move the pointer forward again if an earlier writer moved it back before it was killed."""
        found = await self._read(POINTER_KEY, Pointer)
        if self.pointer is not None and newer_pointer(found, self.pointer) is self.pointer:
            await self._put(POINTER_KEY, self.pointer)

    async def _write(self, *, released: bool = False) -> None:
        self._written_at, lease_s = self._now(), self._intervals.lease_s
        lease = LeaseRecord(
            self.epoch, self.writer, self._written_at, lease_s, released, self.pointer
        )
        await self._put(self._claim_id.lease_key, lease)

    async def _check_leads(self) -> None:
        """Raise Superseded if there is a greater claim, after restoring the pointer of its writer."""
        restored: Pointer | None = None
        while True:
            claims = await self._store.list(CLAIMS, after=self._claim_id.listing_start)
            above = newer_claim(self._claim_id, claims)
            if above is None:
                return
            lease = await self._read(above.lease_key, LeaseRecord)
            pointer = lease.pointer if lease else None
            if pointer is None or pointer == restored:
                raise Superseded(self._store.url, self.writer, above.writer, above.epoch)
            await self._put(POINTER_KEY, pointer)
            restored = pointer

    async def _put(self, key: str, value: Claim | LeaseRecord | Pointer) -> None:
        await self._store.put(key, [encode(value, key)])

    async def _read(self, key: str, kind: type[T]) -> T | None:
        """Return the object, None if it is missing or damaged."""
        try:
            return await read(self._store, key, kind)
        except (ObjectNotFound, CorruptObject):
            return None
