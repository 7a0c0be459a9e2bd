"""Decide who may write the merged view of a run, and when. Pure: no store, no clock.

    merged/claims/<epoch>-<writer>.json   Claim         who wants to write, since when; never changes
    merged/leases/<epoch>-<writer>.json   LeaseRecord   "still alive", newest pointer; overwritten

A coordinator claims the epoch after the newest one under a key of its own, then lists the claims.
Claims are ordered by `(epoch, writer)`, and **the greatest claim is the leader's**. A coordinator that
finds a greater claim than its own stops writing. So the listing alone decides between two that start
at the same moment. No conditional write is needed: some servers ignore the condition, and a lost
response makes it ambiguous.

A race loses nothing. Heads and chunks have the writer or their content in their names, so the pointer
is the only object that two writers share. It only says where to start reading: the facts are in the
rank manifests. Still it should not go back. A writer lists the claims before and after it moves the
pointer. If it was superseded in between, it restores the pointer from the lease of the new leader. A
reader that finds a lower `(epoch, number)` than it had keeps its own.

A lease only keeps people from starting two coordinators by mistake. It compares clocks of two machines,
so it is advisory. The order of claims is what protects the view.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from smdist.coordination.snapshot.pack import Pointer
from smdist.limits import Number, Seconds, Time

__all__ = [
    "CLAIMS",
    "Claim",
    "ClaimId",
    "LeaseRecord",
    "PendingFacts",
    "PublishIntervals",
    "after_claim",
    "leader",
    "newer_claim",
    "newer_pointer",
    "remaining_s",
    "safe_writer",
    "snapshot_due",
    "stale_claims",
]

CLAIMS = "merged/claims/"
LEASES = "merged/leases/"

_CLAIM = re.compile(r"merged/claims/(\d{6,})-([A-Za-z0-9_-]+)\.json")
_KEPT_EPOCHS = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


class ClaimId(NamedTuple):
    """The name of a claim and its place in the order of claims."""

    epoch: int
    writer: str

    @property
    def claim_key(self) -> str:
        return f"{CLAIMS}{self.epoch:06d}-{self.writer}.json"

    @property
    def lease_key(self) -> str:
        return f"{LEASES}{self.epoch:06d}-{self.writer}.json"

    @property
    def listing_start(self) -> str:
        """Return the key after which the claims of this epoch and of later ones are listed."""
        return f"{CLAIMS}{self.epoch:06d}"

    def next(self) -> ClaimId:
        return ClaimId(self.epoch + 1, self.writer)


class Claim(msgspec.Struct, frozen=True):
    """`owner` stays the same when a coordinator is restarted after a crash; `writer` does not."""

    epoch: Number
    writer: str
    owner: str
    host: str
    pid: Number
    time: Time
    lease_s: Seconds


class LeaseRecord(msgspec.Struct, frozen=True):
    """Written by its writer only, so that a late renewal of an old lease replaces nothing."""

    epoch: Number
    writer: str
    time: Time
    lease_s: Seconds
    released: bool = False
    pointer: Pointer | None = None


def safe_writer(text: str) -> str:
    """Return `text` with only characters that a key may have."""
    return _UNSAFE.sub("-", text).strip("-")[:80] or "coordinator"


def _claim_ids(keys: Iterable[str]) -> list[ClaimId]:
    return [ClaimId(int(m[1]), m[2]) for key in keys if (m := _CLAIM.fullmatch(key))]


def leader(keys: Iterable[str]) -> ClaimId | None:
    """Return the greatest claim among the keys of all claims."""
    return max(_claim_ids(keys), default=None)


def newer_claim(mine: ClaimId, keys: Iterable[str]) -> ClaimId | None:
    """Return the leader's claim if it is greater than `mine`."""
    found = leader(keys)
    return found if found is not None and found > mine else None


def stale_claims(mine: ClaimId, keys: Iterable[str]) -> list[ClaimId]:
    """Return claims that can be removed: their writers find a greater claim without them."""
    return sorted(one for one in _claim_ids(keys) if one.epoch < mine.epoch - _KEPT_EPOCHS)


def remaining_s(claim: Claim, lease: LeaseRecord | None, now: float) -> float:
    """Return for how long the leader must still be presumed alive; 0 if its lease has ended."""
    if lease is not None and lease.released:
        return 0.0
    seen, lease_s = claim.time, claim.lease_s
    if lease is not None and lease.time > seen:
        seen, lease_s = lease.time, lease.lease_s
    # A writer whose clock is far ahead of ours is not alive forever.
    return max(0.0, min(seen, now) + lease_s - now)


class ClaimResult(NamedTuple):
    """The result of a claim: lost to another one, or to be repeated at `again`, else won."""

    lost_to: ClaimId | None = None
    again: ClaimId | None = None


def after_claim(mine: ClaimId, keys: Iterable[str]) -> ClaimResult:
    """Decide from the list of claims, which has ours, whether we lead.

    The greatest claim of an epoch with several claims moves on to the next epoch. So an epoch in which
    something is written has one writer.
    """
    claims = _claim_ids(keys)
    above = max((one for one in claims if one > mine), default=None)
    if above is not None:
        return ClaimResult(lost_to=above)
    if any(one.epoch == mine.epoch and one != mine for one in claims):
        return ClaimResult(again=mine.next())
    return ClaimResult()


def newer_pointer(a: Pointer | None, b: Pointer | None) -> Pointer | None:
    """Return the pointer to the newer snapshot; `a` if both name the same."""
    if a is None or b is None:
        return a or b
    return b if (b.epoch, b.number) > (a.epoch, a.number) else a


@dataclass(frozen=True)
class PublishIntervals:
    """How often snapshots and leases are written."""

    interval_s: float = 1.0  # least time between two snapshots
    lease_s: float = 30.0
    heartbeat_s: float = 15.0  # heartbeats in a snapshot become at most about twice as old

    @property
    def renew_s(self) -> float:
        return self.lease_s / 3


@dataclass(frozen=True)
class PendingFacts:
    """What the newest snapshot does not say yet."""

    facts: int = 0  # manifests, sessions, layouts
    heartbeats: int = 0  # alone they are a reason for a snapshot only now and then
    final: bool = False  # the run has ended


def snapshot_due(
    pending: PendingFacts, written_at: float | None, now: float, intervals: PublishIntervals
) -> bool:
    """Return whether to write a snapshot. The first one (`written_at` None) is written at once."""
    if written_at is None or pending.final:
        return True
    age = now - written_at
    if age < 0:  # the clock was set back
        return bool(pending.facts or pending.heartbeats)
    return (pending.facts > 0 and age >= intervals.interval_s) or (
        pending.heartbeats > 0 and age >= intervals.heartbeat_s
    )
