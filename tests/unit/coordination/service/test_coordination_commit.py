"""Who may write, decided by lists of claims and by clocks that are passed in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.coordination.service.leadership import (
    Claim,
    ClaimId,
    LeaseRecord,
    PendingFacts,
    PublishIntervals,
    after_claim,
    leader,
    newer_claim,
    newer_pointer,
    remaining_s,
    safe_writer,
    snapshot_due,
)
from smdist.coordination.snapshot.pack import Pointer
from smdist.storage.store import check_key

CADENCE = PublishIntervals(interval_s=1.0, lease_s=30.0, heartbeat_s=15.0)

standings = st.builds(ClaimId, st.integers(1, 40), st.sampled_from(["a", "b", "b-2", "C", "z_9"]))


@given(st.lists(standings, min_size=1))
def test_the_greatest_claim_leads(claims: list[ClaimId]) -> None:
    keys = [claim.claim_key for claim in claims]
    assert leader([*keys, "merged/claims/strange.json"]) == max(claims)
    for one in claims:
        listed = [key for key in keys if key > one.listing_start]
        assert newer_claim(one, listed) == (max(claims) if max(claims) > one else None)


@given(st.sets(st.sampled_from("abcdef"), min_size=1), st.randoms())
def test_one_of_several_simultaneous_claims_wins(writers: set[str], random: object) -> None:
    """Whatever the order in which they put their claims and look at the list."""
    listed: list[str] = []
    wants = {writer: ClaimId(1, writer) for writer in writers}
    waiting, won, lost = [("put", w) for w in sorted(writers)], set(), set()
    while waiting:
        deed, writer = waiting.pop(random.randrange(len(waiting)))  # type: ignore[attr-defined]
        if deed == "put":
            listed.append(wants[writer].claim_key)
            waiting.append(("look", writer))
            continue
        result = after_claim(wants[writer], listed)
        if result.again is not None:
            wants[writer] = result.again
            waiting.append(("put", writer))
        elif result.lost_to is not None:
            lost.add(writer)
            assert result.lost_to > wants[writer]
        else:
            won.add(writer)
    # One that won early may have been superseded since: it learns that before it writes.
    stay = [w for w in won if newer_claim(wants[w], listed) is None]
    assert len(stay) == 1
    assert wants[stay[0]] == leader(listed)
    assert won | lost == writers
    epochs = [wants[w].epoch for w in won]
    assert len(set(epochs)) == len(epochs), "an epoch with two writers"


def claim(at: float = 100.0, lease_s: float = 30.0) -> Claim:
    return Claim(3, "w", "owner", "host", 7, at, lease_s)


@pytest.mark.parametrize(
    ("lease", "now", "left"),
    [
        (None, 100.0, 30.0),
        (None, 129.0, 1.0),
        (None, 131.0, 0.0),
        (LeaseRecord(3, "w", 120.0, 30.0), 131.0, 19.0),
        (LeaseRecord(3, "w", 120.0, 30.0, released=True), 121.0, 0.0),
        (LeaseRecord(3, "w", 90.0, 30.0), 110.0, 20.0),  # the claim is newer
        (LeaseRecord(3, "w", 9000.0, 30.0), 110.0, 30.0),  # a clock that is ahead
    ],
)
def test_remaining_time_of_a_lease(lease: LeaseRecord | None, now: float, left: float) -> None:
    assert remaining_s(claim(), lease, now) == left


def pointer(epoch: int, number: int) -> Pointer:
    return Pointer(epoch, number, f"{epoch}.{number}", 0.0, 1.0, False)


def test_a_pointer_is_newer_by_epoch_then_number() -> None:
    old, new = pointer(1, 900), pointer(2, 3)
    assert newer_pointer(old, new) is new
    assert newer_pointer(new, old) is new
    assert newer_pointer(None, old) is old
    assert newer_pointer(old, None) is old
    assert newer_pointer(pointer(2, 3), new) == new
    assert newer_pointer(None, None) is None


@pytest.mark.parametrize(
    ("pending", "age", "due"),
    [
        (PendingFacts(), 1000.0, False),
        (PendingFacts(facts=1), 0.5, False),
        (PendingFacts(facts=1), 1.0, True),
        (PendingFacts(heartbeats=5), 14.0, False),
        (PendingFacts(heartbeats=5), 15.0, True),
        (PendingFacts(final=True), 0.0, True),
        (PendingFacts(facts=1), -50.0, True),  # the clock was set back
        (PendingFacts(), -50.0, False),
    ],
)
def test_when_a_snapshot_is_due(pending: PendingFacts, age: float, due: bool) -> None:
    assert snapshot_due(pending, 500.0, 500.0 + age, CADENCE) is due


def test_the_first_snapshot_comes_at_once() -> None:
    assert snapshot_due(PendingFacts(), None, 0.0, CADENCE)


@given(st.text(max_size=200))
def test_any_writer_name_makes_a_valid_key(name: str) -> None:
    mine = ClaimId(7, safe_writer(name))
    check_key("", mine.claim_key)
    assert leader([mine.claim_key]) == mine
