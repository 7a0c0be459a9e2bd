"""Who takes part, how each rank stands, and whether a step is complete. Pure: `now` is passed in.

A step of an attempt is COMPLETE when every expected rank has closed it and dropped nothing of it.
Else it is PARTIAL, with a reason for each missing rank. A rank that ended, was lost or never
started blocks nothing: only a *pending* rank, one that may still write, is worth waiting for.

Lost means: its uploader said so, or nothing was heard of it for `lost_after_s`. It is a judgement
as of `now`; a late commit overrules it, since completeness looks only at what was committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from smdist.coordination.drop_log import NO_DROPS
from smdist.coordination.sealed import NOTHING
from smdist.coordination.spans import members, spans_of
from smdist.coordination.step_rows import StepRow, row_of
from smdist.identity import ModeKeys

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from smdist.coordination.merge import RankView, StepKey, View
    from smdist.coordination.spans import Spans

__all__ = [
    "PATIENCE",
    "Disagreement",
    "MissingReason",
    "Patience",
    "RankReport",
    "RankStatus",
    "StepFacts",
    "all_step_facts",
    "expected_ranks",
    "finished",
    "missing_ranks",
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

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Patience:
    lost_after_s: float = 60.0
    lagging_after_s: float = 30.0


PATIENCE = Patience()


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


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks that gave one `(mode, mode_step)` different global numbers: number -> its ranks."""

    attempt: int
    mode: int
    mode_step: int
    numbers: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step of an attempt over all ranks, without judgement of time.

    `step` is the global number the lowest rank gave it. `ranks` have something of it stored,
    `absent` are expected ranks that have not closed it or dropped some of it, `dropped` those that
    dropped some. At a step on which
    nothing was due, only those ranks are expected whose script saved something.
    """

    key: StepKey
    attempt: int
    step: int
    ranks: tuple[int, ...]
    absent: tuple[int, ...]
    layouts: frozenset[str]
    disagreement: Disagreement | None = None
    dropped: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.absent


def expected_ranks(view: View, attempt: int) -> tuple[int, ...]:
    """The ranks of `attempt` that save, by what its ranks say; all of it if they differ."""
    worlds = {world for known in view.attempts.get(attempt, {}).values() for world in known.worlds}
    return tuple(sorted({rank for world in worlds for rank in world.expected_ranks()}))


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


class _Front(NamedTuple):
    """The rank that is furthest: its first and last global step, and when it closed the last."""

    first: int = 0
    step: int = -1
    closed_at: float = 0.0
    pace_s: float = 0.0  # of a step, on the average


def _front(known: Iterable[RankView]) -> _Front:
    found = _Front()
    for rank in known:
        step = rank.passed.get(_GLOBAL, -1)
        if rank.first is not None and (step, -rank.closed_at) > (found.step, -found.closed_at):
            first, at = rank.first
            pace_s = max(0.0, rank.closed_at - at) / max(1, step - first)
            found = _Front(first, step, rank.closed_at, pace_s)
    return found


def _behind(known: RankView, front: _Front) -> tuple[int, float]:
    """Steps and seconds. A rank that is at work is never long behind its last step: it counts how
    long the front took from there."""
    step = known.passed[_GLOBAL] if known.first is not None else front.first - 1
    if step >= front.step:
        return 0, 0.0
    own = known.closed_at or (known.session.started if known.session else front.closed_at)
    steps = front.step - step
    return steps, max(steps * front.pace_s, front.closed_at - own)


def _report(
    rank: int,
    known: RankView | None,
    front: _Front,
    grace: bool,
    now: float,
    patience: Patience,
) -> RankReport:
    if known is None or not _started(known):
        return RankReport(rank, RankStatus.NEVER_STARTED, pending=grace)
    head, seen = known.head, _last_seen(known)
    step = known.passed.get(_GLOBAL, -1)
    behind_steps, behind_s = _behind(known, front)
    reason = head.reason if head is not None else ""
    status = RankStatus.ACTIVE
    if head is not None and head.state == "ended":
        status = RankStatus.ENDED
    elif head is not None and head.state == "lost":
        status = RankStatus.LOST
    elif now - seen > patience.lost_after_s:
        status, reason = RankStatus.LOST, f"nothing heard of it for {now - seen:.0f} s"
    elif behind_s > patience.lagging_after_s:
        status = RankStatus.LAGGING
    pending = status in (RankStatus.ACTIVE, RankStatus.LAGGING)
    return RankReport(rank, status, pending, step, seen, behind_s, reason, behind_steps)


def rank_reports(
    view: View, attempt: int, now: float, patience: Patience = PATIENCE
) -> dict[int, RankReport]:
    """Every expected or known rank of `attempt`, in numeric order."""
    known = view.attempts.get(attempt, {})
    front = _front(known.values())
    # A rank without any sign may be slow to start, but not after its peers have run for a while,
    # and not once a newer attempt has begun.
    begun = max(
        (_last_seen(r) if r.session is None else r.session.started for r in known.values()),
        default=0.0,
    )
    newest = attempt == max(view.attempts, default=attempt)
    grace = newest and now - begun <= patience.lost_after_s
    ranks = sorted({*known, *expected_ranks(view, attempt)})
    return {rank: _report(rank, known.get(rank), front, grace, now, patience) for rank in ranks}


def finished(view: View, now: float, patience: Patience = PATIENCE) -> bool:
    """No rank of any attempt may still write. A view without ranks is not finished."""
    return bool(view.attempts) and not any(
        report.pending
        for attempt in view.attempts
        for report in rank_reports(view, attempt, now, patience).values()
    )


def step_attempts(view: View, key: StepKey) -> tuple[int, ...]:
    """Attempts that know of the step `key`, newest first."""
    return tuple(
        attempt
        for attempt in sorted(view.attempts, reverse=True)
        if view.sealed.get(attempt, NOTHING).chunk(key) is not None
        or key in view.drop_logs.get(attempt, NO_DROPS).steps
        or any(key in r.steps or key in r.drops for r in view.attempts[attempt].values())
    )


def step_facts(view: View, attempt: int, key: StepKey, expected: Iterable[int]) -> StepFacts | None:
    """What `attempt` has of the step `key`; None when no rank knows of it."""
    return all_step_facts(view, attempt, expected, (key,)).get(key)


def all_step_facts(
    view: View, attempt: int, expected: Iterable[int], keys: Iterable[StepKey] | None = None
) -> dict[StepKey, StepFacts]:
    """The facts of each step of `attempt` that any rank knows of, or of those among `keys`.

    Of a step without recent blocks it looks at no rank: what is sealed has been looked at.
    """
    judge = _Judge(attempt, tuple(expected))
    known, sealed = view.attempts.get(attempt, {}), view.sealed.get(attempt, NOTHING)
    if keys is None:
        log = view.drop_logs.get(attempt, NO_DROPS).steps
        asked = view.keys(attempt).union(log, *(rank.drops for rank in known.values()))
    else:
        asked = {*keys}
    # An intersection costs as much as the smaller of the two.
    recent: set[StepKey] = set().union(*(rank.steps.keys() & asked for rank in known.values()))
    dropped = _dropped(view, attempt, asked)
    found: dict[StepKey, StepFacts] = {}
    for key in asked:
        row = row_of(key[1], view.step(attempt, key)) if key in recent else sealed.row(key)
        if row is not None or key in dropped:
            found[key] = judge(key, row, dropped.get(key, {}))
    return found


def _dropped(view: View, attempt: int, asked: set[StepKey]) -> dict[StepKey, dict[int, int]]:
    """Of each step the ranks that dropped some of it, with the number that each gave it."""
    found: dict[StepKey, dict[int, int]] = {}
    log = view.drop_logs.get(attempt, NO_DROPS).steps
    for key in log.keys() & asked:
        of_step = found[key] = {}
        for number, ranks in log[key]:
            for rank in members(ranks):
                of_step[rank] = min(of_step.get(rank, number), number)
    for rank, known in view.attempts.get(attempt, {}).items():
        for key in known.drops.keys() & asked:
            number = min(drop.step for _, _, drop in known.drops[key])
            of_step = found.setdefault(key, {})
            of_step[rank] = min(of_step.get(rank, number), number)
    return found


class _Judge:
    """Who of the expected ranks is absent from a step."""

    def __init__(self, attempt: int, expected: tuple[int, ...]) -> None:
        self._attempt, self._expected = attempt, expected
        self._spans: Spans = spans_of(expected)

    def __call__(self, key: StepKey, row: StepRow | None, drops: Mapping[int, int]) -> StepFacts:
        """`drops`: of each rank that dropped some of the step, the number it gave it."""
        ranks = members(row.ranks) if row is not None else ()
        numbers = _numbers(row, drops)
        return StepFacts(
            key,
            self._attempt,
            next(iter(numbers)),
            ranks,
            self._absent(row, ranks, drops),
            frozenset(row.layouts) if row is not None else frozenset(),
            None if len(numbers) == 1 else _disagreement(self._attempt, key, numbers),
            tuple(sorted(drops)),
        )

    def _absent(
        self, row: StepRow | None, ranks: tuple[int, ...], drops: Mapping[int, int]
    ) -> tuple[int, ...]:
        if row is not None and not row.open and not drops:
            if not row.planned or row.ranks == self._spans:
                return ()
            here = set(ranks)
            return tuple(rank for rank in self._expected if rank not in here)
        due = bool(drops) or row is None or row.planned
        whole = {*ranks}.difference(drops, members(row.open) if row is not None else ())
        return tuple(rank for rank in (self._expected if due else ranks) if rank not in whole)


def _numbers(row: StepRow | None, drops: Mapping[int, int]) -> dict[int, Iterable[int]]:
    """Global numbers in order of the lowest rank that gave them, each with its ranks."""
    if row is not None and not drops:
        if not row.numbers:
            return {row.step: ()}
        return {number: members(ranks) for number, ranks in row.numbers}
    given: dict[int, int] = {}
    if row is not None:
        for number, spans in row.numbers or ((row.step, row.ranks),):
            given.update(dict.fromkeys(members(spans), number))
    numbers: dict[int, list[int]] = {}
    for rank in sorted({*given, *drops}):
        for number in dict.fromkeys(n[rank] for n in (given, drops) if rank in n):
            numbers.setdefault(number, []).append(rank)
    return dict(numbers)


def _disagreement(attempt: int, key: StepKey, numbers: Mapping[int, Iterable[int]]) -> Disagreement:
    return Disagreement(attempt, *key, {number: tuple(r) for number, r in numbers.items()})


def missing_ranks(
    view: View, facts: StepFacts, reports: Mapping[int, RankReport]
) -> dict[int, MissingReason]:
    """Why each absent rank is; empty exactly when the step is COMPLETE."""
    known = view.attempts.get(facts.attempt, {})
    here, dropped = frozenset(facts.ranks), frozenset(facts.dropped)
    return {
        rank: _reason(known.get(rank), facts, reports[rank], rank in here, rank in dropped)
        for rank in facts.absent
    }


def _reason(
    known: RankView | None, facts: StepFacts, report: RankReport, within: bool, dropped: bool
) -> MissingReason:
    mode, mode_step = facts.key
    if known is None or report.status is RankStatus.NEVER_STARTED:
        return MissingReason.NEVER_STARTED
    if dropped:
        return MissingReason.DROPPED
    if known.passed.get(mode, -1) > (facts.step if mode == _GLOBAL else mode_step):
        return MissingReason.SKIPPED
    if report.status is RankStatus.ENDED:
        return MissingReason.ENDED_WITHIN if within else MissingReason.ENDED
    if report.status is RankStatus.LOST:
        return MissingReason.LOST_WITHIN if within else MissingReason.LOST
    return MissingReason.LAGGING
