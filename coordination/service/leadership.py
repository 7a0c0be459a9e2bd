"""Who may write the merged view of a run, and when it does. Pure: no store, no clock.

    merged/claims/<epoch>-<writer>.json   Claim   who wants to write, and since when; never changes
    merged/leases/<epoch>-<writer>.json   LeaseRecord   "I still do", with its newest pointer; overwritten

A coordinator claims the epoch after the newest one, under a key that is its own, and looks at the
list of claims afterwards. Claims are ordered by `(epoch, writer)`, and **the leader
claim is the coordinator's**. One that finds a greater claim than its own writes no more.
So two that start at the same moment are told apart by the list alone: no conditional write is
needed, which some servers ignore and which a lost answer makes ambiguous.

Nothing is lost to a race. Heads and chunks have the writer in their name or its content, so the only
object that two writers share is the pointer, and it only says where to begin to read: facts are in
the rank manifests. Still it should not go back. A writer looks at the claims before and after it
moves the pointer; when it was newer_claim in between, it puts back the pointer in the lease of the
one that overtook it. A reader that finds a lower `(epoch, number)` than it had keeps its own.

A lease keeps people from starting two coordinators by mistake. It is judged by the clocks of two
machines, so it is a courtesy; what protects the view is the order of claims.
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
    "free_in_s",
    "greater",
    "leader",
    "newer_claim",
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
    """A claim's place in the order of claims."""

    epoch: int
    writer: str

    @property
    def claim_key(self) -> str:
        return f"{CLAIMS}{self.epoch:06d}-{self.writer}.json"

    @property
    def lease_key(self) -> str:
        return f"{LEASES}{self.epoch:06d}-{self.writer}.json"

    @property
    def before(self) -> str:
        """To list claims of its epoch and of later ones, after this key."""
        return f"{CLAIMS}{self.epoch:06d}"

    def next(self) -> ClaimId:
        return ClaimId(self.epoch + 1, self.writer)


class Claim(msgspec.Struct, frozen=True):
    """`owner` is who may come back after a crash: it is the same in its next life, `writer` is not."""

    epoch: Number
    writer: str
    owner: str
    host: str
    pid: Number
    time: Time
    lease_s: Seconds


class LeaseRecord(msgspec.Struct, frozen=True):
    """Only its writer writes it, so that a late renewal of an old one replaces nothing."""

    epoch: Number
    writer: str
    time: Time
    lease_s: Seconds
    released: bool = False
    pointer: Pointer | None = None


def safe_writer(text: str) -> str:
    """`text` as a part of a key."""
    return _UNSAFE.sub("-", text).strip("-")[:80] or "coordinator"


def leader(keys: Iterable[str]) -> ClaimId | None:
    """The coordinator, by the keys of all claims."""
    return max(
        (ClaimId(int(m[1]), m[2]) for key in keys if (m := _CLAIM.fullmatch(key))), default=None
    )


def stale_claims(mine: ClaimId, keys: Iterable[str]) -> list[ClaimId]:
    """Claims so old that nobody needs them: who made one finds a greater one, ours among others."""
    found = (ClaimId(int(m[1]), m[2]) for key in keys if (m := _CLAIM.fullmatch(key)))
    return sorted(one for one in found if one.epoch < mine.epoch - _KEPT_EPOCHS)


def newer_claim(mine: ClaimId, keys: Iterable[str]) -> ClaimId | None:
    """The claim that is greater than `mine`, if there is one."""
    found = leader(keys)
    return found if found is not None and found > mine else None


def free_in_s(claim: Claim, lease: LeaseRecord | None, now: float) -> float:
    """How long the holder of the leader claim is still to be thought alive; 0 for not at all."""
    if lease is not None and lease.released:
        return 0.0
    seen, lease_s = claim.time, claim.lease_s
    if lease is not None and lease.time > seen:
        seen, lease_s = lease.time, lease.lease_s
    # A holder whose clock is far ahead of ours is not alive for ever.
    return max(0.0, min(seen, now) + lease_s - now)


class ClaimResult(NamedTuple):
    """After a claim was put: `won`, or `lost` to another, or neither: claim `again`, higher."""

    lost: ClaimId | None = None
    again: ClaimId | None = None

    @property
    def won(self) -> bool:
        return self.lost is None and self.again is None


def after_claim(mine: ClaimId, keys: Iterable[str]) -> ClaimResult:
    """What the list of claims says once ours is in it.

    The leader of an epoch with several claims takes another one, so that an epoch that writes
    has one writer.
    """
    standings = [ClaimId(int(m[1]), m[2]) for key in keys if (m := _CLAIM.fullmatch(key))]
    above = max((standing for standing in standings if standing > mine), default=None)
    if above is not None:
        return ClaimResult(lost=above)
    if any(one.epoch == mine.epoch and one != mine for one in standings):
        return ClaimResult(again=mine.next())
    return ClaimResult()


def greater(a: Pointer | None, b: Pointer | None) -> Pointer | None:
    """The one that leads to the newer snapshot; `a` when they are of the same."""
    if a is None or b is None:
        return a or b
    return b if (b.epoch, b.number) > (a.epoch, a.number) else a


@dataclass(frozen=True)
class PublishIntervals:
    """How often things are written, and looked at."""

    interval_s: float = 1.0  # between snapshots at the least
    lease_s: float = 30.0
    beat_s: float = (
        15.0  # a live rank's sign in a snapshot is not to grow older than about twice this
    )

    @property
    def renew_s(self) -> float:
        return self.lease_s / 3


@dataclass(frozen=True)
class PendingFacts:
    """What was folded since the last snapshot."""

    facts: int = 0  # manifests, sessions, layouts
    beats: int = 0  # heartbeats, which alone are a reason only now and then
    final: bool = False  # the run has come to its end, and the last snapshot does not say so


def snapshot_due(
    pending: PendingFacts, written_at: float | None, now: float, cadence: PublishIntervals
) -> bool:
    """`written_at`: None before the first one, which comes at once, as it says that we are there."""
    if written_at is None or pending.final:
        return True
    age = now - written_at
    if age < 0:  # the clock was set back
        return bool(pending.facts or pending.beats)
    return (pending.facts > 0 and age >= cadence.interval_s) or (
        pending.beats > 0 and age >= cadence.beat_s
    )
