"""Who takes part, how each rank stands, and whether a step is complete. Pure: `now` is passed in.

A step of an attempt is COMPLETE when every expected rank has closed it and dropped nothing of it.
Else it is PARTIAL, with a reason for each missing rank. A rank that ended, was lost or never
started blocks nothing: only a *pending* rank, one that may still write, is worth waiting for.

Lost means: its uploader said so, or nothing was heard of it for `lost_after_s`. It is a judgement
as of `now`; a late commit overrules it, since completeness looks only at what was committed.

Facts carry the times of the ranks' clocks. Who follows a job knows by its own clock when it heard of
each rank, and passes that (`LastContacts`): no clock is then compared with another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from smdist.coordination.view.step_facts import (
    Disagreement,
    StepFacts,
    all_step_facts,
    progress_of_lost_ranks,
    step_attempts,
    step_facts,
)
from smdist.errors import CorruptObject
from smdist.format.intervals import Members, count_members, merge_intervals, subtract, to_intervals
from smdist.identity import ModeKeys
from smdist.limits import MAX_ABSENT_RANKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smdist.coordination.view.run_view import RankView, View

__all__ = [
    "DEFAULT_TIMEOUTS",
    "Disagreement",
    "LastContact",
    "LastContacts",
    "LivenessTimeouts",
    "MissingReason",
    "RankReport",
    "RankStatus",
    "StepFacts",
    "all_step_facts",
    "check_absent_ranks",
    "expected_ranks",
    "finished",
    "missing_ranks",
    "progress_of_lost_ranks",
    "rank_reports",
    "step_attempts",
    "step_facts",
]

_GLOBAL = ModeKeys.GLOBAL.value


class RankStatus(str, Enum):
    ACTIVE = "active"
    LAGGING = "lagging"
    ENDED = "ended"
    LOST = "lost"
    NEVER_STARTED = "never started"

    __str__ = str.__str__


class MissingReason(str, Enum):
    """Why a step has nothing, or not everything, of a rank."""

    LAGGING = "lagging"
    ENDED = "ended"
    LOST = "lost"
    LOST_WITHIN = "lost within the step"
    ENDED_WITHIN = "ended within the step"
    DROPPED = "dropped"
    NEVER_STARTED = "never started"
    SKIPPED = "skipped"  # it closed a later step of that mode without saving this one
    DAMAGED = "damaged"  # what it stored, or may have stored of it, is missing or cannot be read

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class LivenessTimeouts:
    lost_after_s: float = 60.0
    lagging_after_s: float = 30.0


DEFAULT_TIMEOUTS = LivenessTimeouts()


class LastContact(NamedTuple):
    """When a rank was heard of, by the clock of who heard it."""

    first: float
    wrote: float  # its last manifest
    last: float  # any sign


LastContacts = Mapping[tuple[int, int], LastContact]
"""By attempt and rank."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank as of `now`. `pending`: it may still write. `step`: last global step it closed, or -1.

    `behind_steps`: than the rank of its attempt that is furthest. `behind_s`: how long that one takes
    for so many steps, on the average, or since when it went on alone, whichever is longer.
    """

    rank: int
    status: RankStatus
    pending: bool
    step: int = -1
    last_seen: float = 0.0
    behind_s: float = 0.0
    reason: str = ""
    behind_steps: int = 0


def expected_ranks(view: View, attempt: int) -> Members:
    """Return the ranks of `attempt` that save; the union if its ranks disagree."""
    worlds = {world for known in view.attempts.get(attempt, {}).values() for world in known.worlds}
    return Members(merge_intervals(span for world in worlds for span in world.expected_ranks()))


def check_absent_ranks(url: str, view: View) -> None:
    """Raise CorruptObject if more ranks are expected, and left no trace, than can be reported."""
    expected = {attempt: expected_ranks(view, attempt).intervals for attempt in view.attempts}
    if sum(map(count_members, expected.values())) <= MAX_ABSENT_RANKS:
        return
    absent = sum(
        count_members(subtract(expected[a], to_intervals(known)))
        for a, known in view.attempts.items()
    )
    if absent > MAX_ABSENT_RANKS:
        detail = f"{absent} ranks are said to take part and never began; up to {MAX_ABSENT_RANKS} are read"
        raise CorruptObject(url, "sessions/", "read", detail)


def _started(known: RankView) -> bool:
    return not (known.session is None and known.head is None and known.heartbeat is None)


def _last_seen(known: RankView) -> float:
    signs = [0.0]
    if known.session is not None:
        signs.append(known.session.started)
    if known.head is not None:
        signs.append(known.head.time)
    if known.heartbeat is not None:
        signs.append(known.heartbeat.time)
    return max(signs)


def _begun(known: RankView) -> float:
    return _last_seen(known) if known.session is None else known.session.started


class _Front(NamedTuple):
    """The rank that is furthest: its first and last global step, and when it closed the last."""

    first: int = 0
    step: int = -1
    closed_at: float = 0.0
    pace_s: float = 0.0  # of a step, on the average
    rank: int = -1


def _front(known: Iterable[tuple[int, RankView]]) -> _Front:
    found = _Front()
    for number, rank in known:
        step = rank.passed.get(_GLOBAL, -1)
        if rank.first is not None and (step, -rank.closed_at) > (found.step, -found.closed_at):
            first, at = rank.first
            pace_s = max(0.0, rank.closed_at - at) / max(1, step - first)
            found = _Front(first, step, rank.closed_at, pace_s, number)
    return found


def _behind(
    known: RankView, front: _Front, heard: LastContact | None, of_front: LastContact | None
) -> tuple[int, float]:
    """Return by how many steps and seconds a rank is behind the front.

    The seconds are those that the front took from the rank's last step on. The age of that step says
    little: the last step of a slow rank is always young.
    """
    step = known.passed[_GLOBAL] if known.first is not None else front.first - 1
    if step >= front.step:
        return 0, 0.0
    steps = front.step - step
    if heard is not None and of_front is not None:
        alone_s = of_front.wrote - heard.wrote
    else:
        own = known.closed_at or (known.session.started if known.session else front.closed_at)
        alone_s = front.closed_at - own
    return steps, max(steps * front.pace_s, alone_s)


def _report(
    rank: int,
    known: RankView | None,
    front: _Front,
    grace: bool,
    now: float,
    timeouts: LivenessTimeouts,
    heard: Mapping[int, LastContact],
) -> RankReport:
    if known is None or not _started(known):
        return RankReport(rank, RankStatus.NEVER_STARTED, pending=grace)
    head, own = known.head, heard.get(rank)
    seen = _last_seen(known) if own is None else own.last
    step = known.passed.get(_GLOBAL, -1)
    behind_steps, behind_s = _behind(known, front, own, heard.get(front.rank))
    reason = head.reason if head is not None else ""
    status = RankStatus.ACTIVE
    if head is not None and head.state == "ended":
        status = RankStatus.ENDED
    elif head is not None and head.state == "lost":
        status = RankStatus.LOST
    elif now - seen > timeouts.lost_after_s:
        status, reason = RankStatus.LOST, f"nothing heard of it for {now - seen:.0f} s"
    elif behind_s > timeouts.lagging_after_s:
        status = RankStatus.LAGGING
    pending = status in (RankStatus.ACTIVE, RankStatus.LAGGING)
    return RankReport(rank, status, pending, step, seen, behind_s, reason, behind_steps)


def rank_reports(
    view: View,
    attempt: int,
    now: float,
    timeouts: LivenessTimeouts = DEFAULT_TIMEOUTS,
    hearing: LastContacts | None = None,
) -> dict[int, RankReport]:
    """Return a report of every expected or known rank of `attempt`, in numeric order.

    `hearing` is by the clock of `now`; of ranks that are not in it, their own clock is believed.
    """
    known = view.attempts.get(attempt, {})
    hearing = hearing or {}
    heard = {rank: hearing[attempt, rank] for rank in known if (attempt, rank) in hearing}
    front = _front(known.items())
    # A rank without any sign may be slow to start, but not after its peers have run for a while,
    # and not once a newer attempt has begun.
    begun = max(
        (heard[n].first if n in heard else _begun(rank) for n, rank in known.items()), default=0.0
    )
    newest = attempt == max(view.attempts, default=attempt)
    grace = newest and now - begun <= timeouts.lost_after_s
    ranks = sorted({*known, *expected_ranks(view, attempt)})
    return {
        rank: _report(rank, known.get(rank), front, grace, now, timeouts, heard) for rank in ranks
    }


def finished(
    view: View,
    now: float,
    timeouts: LivenessTimeouts = DEFAULT_TIMEOUTS,
    hearing: LastContacts | None = None,
) -> bool:
    """Return whether no rank of any attempt may still write. A view without ranks is not finished."""
    return bool(view.attempts) and not any(
        report.pending
        for attempt in view.attempts
        for report in rank_reports(view, attempt, now, timeouts, hearing).values()
    )


def missing_ranks(
    view: View,
    facts: StepFacts,
    reports: Mapping[int, RankReport],
    among: Iterable[int] | None = None,
) -> dict[int, MissingReason]:
    """Return why each absent rank, or each of `among`, is missing; {} if the step is COMPLETE."""
    known = view.attempts.get(facts.attempt, {})
    here, dropped = facts.ranks, frozenset(facts.dropped)
    return {
        rank: MissingReason.DAMAGED
        if rank in facts.damaged
        else _reason(known.get(rank), facts, reports[rank], rank in here, rank in dropped)
        for rank in (facts.absent if among is None else among)
    }


def _may_hide(known: RankView, among: bool) -> bool:
    """Return whether an unreadable manifest may hold the step; `among`: one between those read."""
    last = known.head.seq if known.head is not None else -1
    missing_manifests = known.missing_manifests.intervals
    return bool(missing_manifests) and (among or missing_manifests[-1][1] - 1 > last)


def _reason(
    known: RankView | None, facts: StepFacts, report: RankReport, within: bool, dropped: bool
) -> MissingReason:
    mode, mode_step = facts.key
    if known is None or report.status is RankStatus.NEVER_STARTED:
        return MissingReason.NEVER_STARTED
    if dropped:
        return MissingReason.DROPPED
    passed = known.passed.get(mode, -1) > (facts.step if mode == _GLOBAL else mode_step)
    if (passed or not report.pending) and _may_hide(known, passed or within):
        return MissingReason.DAMAGED
    if passed:
        return MissingReason.SKIPPED
    if report.status is RankStatus.ENDED:
        return MissingReason.ENDED_WITHIN if within else MissingReason.ENDED
    if report.status is RankStatus.LOST:
        return MissingReason.LOST_WITHIN if within else MissingReason.LOST
    return MissingReason.LAGGING
