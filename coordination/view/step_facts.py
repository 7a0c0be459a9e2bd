"""The rule that a step is complete: which ranks have it, and which are absent. Pure, without time.

`membership` adds the time: it tells why an absent rank is absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from smdist.coordination.columnar.chunks import NO_CHUNKS
from smdist.coordination.columnar.drop_log import NO_DROPS
from smdist.coordination.columnar.step_rows import StepRow, summarize_step
from smdist.format.intervals import Members, find_gaps, merge_intervals, subtract, to_intervals
from smdist.identity import ModeKeys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from smdist.coordination.columnar.chunks import ChunkSet
    from smdist.coordination.view.run_view import StepKey, View
    from smdist.format.intervals import Intervals
    from smdist.format.manifest import StepEntry

__all__ = [
    "Disagreement",
    "StepFacts",
    "all_step_facts",
    "damaged_steps",
    "mark_superseded",
    "may_be_superseded",
    "progress_of_lost_ranks",
    "step_attempts",
    "step_facts",
]

GLOBAL = ModeKeys.GLOBAL.value
_NOBODY = Members()


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks that gave one `(mode, mode_step)` different global numbers: number -> its ranks."""

    attempt: int
    mode: int
    mode_step: int
    numbers: Mapping[int, tuple[int, ...]]


class StepFacts(NamedTuple):
    """A step of an attempt over all ranks, without judgement of time.

    `step` is the global number that the lowest rank gave it. `ranks` have something of it stored.
    `absent` are expected ranks that have not closed it or dropped some of it, `dropped` those that
    dropped some. Of `damaged` ranks, not everything that they stored of it can be read.

    Not `planned`: nothing was due, and a script saved values of its own. A rank that saved none then
    did so by choice and is not absent, unless it was lost before that step.

    A tuple because a long run has a million of them: a dataclass takes five times as long to make.
    """

    key: StepKey
    attempt: int
    step: int
    ranks: Members
    absent: Members
    layouts: frozenset[str]
    disagreement: Disagreement | None = None
    dropped: tuple[int, ...] = ()
    planned: bool = True
    damaged: Members = _NOBODY

    def with_damage(self, ranks: Members) -> StepFacts:
        """Return the same step with `ranks` damaged."""
        damaged = merge_intervals((*self.damaged.intervals, *ranks.intervals))
        if damaged == self.damaged.intervals:
            return self
        absent = merge_intervals((*self.absent.intervals, *damaged))
        return self._replace(damaged=Members(damaged), absent=Members(absent))

    @property
    def complete(self) -> bool:
        return not self.absent


def progress_of_lost_ranks(
    view: View, attempt: int, expected: Members
) -> dict[int, dict[int, int]]:
    """Return how far each rank came (`RankView.passed`) that its uploader reported as lost."""
    return {
        rank: known.passed
        for rank, known in view.attempts.get(attempt, {}).items()
        if known.head is not None and known.head.state == "lost" and rank in expected
    }


def step_attempts(view: View, key: StepKey) -> tuple[int, ...]:
    """Return the attempts that know of the step `key`, newest first."""
    return tuple(
        attempt
        for attempt in sorted(view.attempts, reverse=True)
        if view.sealed.get(attempt, NO_CHUNKS).chunk(key) is not None
        or key in view.drop_logs.get(attempt, NO_DROPS).steps
        or any(key in r.steps or key in r.drops for r in view.attempts[attempt].values())
    )


def step_facts(view: View, attempt: int, key: StepKey, expected: Members) -> StepFacts | None:
    """Return what `attempt` has of the step `key`; None if no rank knows of it."""
    return all_step_facts(view, attempt, expected, (key,)).get(key)


def may_be_superseded(view: View, attempt: int) -> bool:
    """Return whether unreadable manifests of a later attempt may repeat steps of `attempt`."""
    return any(
        known.missing_manifests
        for later, ranks in view.attempts.items()
        if later > attempt
        for known in ranks.values()
    )


def damaged_steps(view: View, attempt: int) -> dict[StepKey, set[int]]:
    """Return steps of which a part may be in an unreadable manifest, with the ranks concerned.

    Those that go on where records are missing. Of a rank whose session cannot be read, all that it has.
    """
    found: dict[StepKey, set[int]] = {}
    for rank, known in view.attempts.get(attempt, {}).items():
        torn = known.session is not None and not known.session.is_recorded
        gaps = find_gaps(known.records)
        if not torn and not gaps:
            continue
        steps: dict[StepKey, list[StepEntry]] = {}
        for entry in sorted(view.entries(attempt, rank), key=lambda entry: entry.block):
            steps.setdefault((entry.mode, entry.mode_step), []).append(entry)
        for key, entries in steps.items():
            firsts = (next((e for e in entries if e.block >= end), None) for _, end in gaps)
            if torn or any(first is not None and first.continues for first in firsts):
                found.setdefault(key, set()).add(rank)
    return found


def all_step_facts(
    view: View, attempt: int, expected: Members, keys: Iterable[StepKey] | None = None
) -> dict[StepKey, StepFacts]:
    """Return the facts of each step of `attempt` that any rank knows of, or of those among `keys`.

    The cost does not depend on the number of ranks, except for steps that have recent blocks.
    """
    check = _CompletenessCheck(attempt, expected, progress_of_lost_ranks(view, attempt, expected))
    known, sealed = view.attempts.get(attempt, {}), view.sealed.get(attempt, NO_CHUNKS)
    asked = None if keys is None else {*keys}
    recent: set[StepKey] = set().union(
        *(_among(rank.steps.keys(), asked) for rank in known.values())
    )
    dropped = _dropped(view, attempt, asked)
    special = recent | dropped.keys()
    found = dict(_sealed_facts(sealed, check, asked, special))
    for key in special:
        row = summarize_step(key[1], view.step(attempt, key)) if key in recent else sealed.row(key)
        found[key] = check(key, row, dropped.get(key, {}))
    for key, ranks in damaged_steps(view, attempt).items():
        if key in found:
            found[key] = found[key].with_damage(Members(to_intervals(ranks)))
    return found


def _sealed_facts(
    sealed: ChunkSet, check: _CompletenessCheck, asked: set[StepKey] | None, special: set[StepKey]
) -> Iterator[tuple[StepKey, StepFacts]]:
    """Yield the facts of steps that are in chunks alone. The steps of a run differ by number only."""
    if asked is not None and 4 * len(asked) < sum(chunk.steps for chunk in sealed.chunks):
        for key in asked - special:
            row = sealed.row(key)
            if row is not None:
                yield key, check(key, row, {})
        return
    for chunk in sealed.chunks:
        mode = chunk.ref.mode
        for run in chunk.ref.runs:
            _, attempt, _, *same = check((mode, run.mode_step), run.row(run.mode_step), {})
            alike = run.planned or run.count == 1
            for mode_step, step in zip(run.mode_steps(), run.global_steps(), strict=True):
                key = (mode, mode_step)
                if key in special or (asked is not None and key not in asked):
                    continue
                if alike:
                    yield key, StepFacts._make((key, attempt, step, *same))
                else:
                    yield key, check(key, run.row(mode_step), {})


def mark_superseded(
    view: View, attempt: int, expected: Members, found: dict[StepKey, StepFacts]
) -> dict[StepKey, StepFacts]:
    """Return `found`, damaged if a later attempt may have saved the same steps again."""
    if not may_be_superseded(view, attempt):
        return found
    return {key: facts.with_damage(expected) for key, facts in found.items()}


def _among(keys: AbstractSet[StepKey], asked: set[StepKey] | None) -> AbstractSet[StepKey]:
    return keys if asked is None else keys & asked  # costs as much as the smaller of the two


def _dropped(view: View, attempt: int, asked: set[StepKey] | None) -> dict[StepKey, dict[int, int]]:
    """Return, by step, the ranks that dropped some of it, with the number that each gave it."""
    found: dict[StepKey, dict[int, int]] = {}
    log = view.drop_logs.get(attempt, NO_DROPS).steps
    for key in _among(log.keys(), asked):
        of_step = found[key] = {}
        for number, ranks in log[key]:
            for rank in Members(ranks):
                of_step[rank] = min(of_step.get(rank, number), number)
    for rank, known in view.attempts.get(attempt, {}).items():
        for key in _among(known.drops.keys(), asked):
            number = min(drop.step for _, _, drop in known.drops[key])
            of_step = found.setdefault(key, {})
            of_step[rank] = min(of_step.get(rank, number), number)
    return found


class _CompletenessCheck:
    """Who of the expected ranks is absent from a step."""

    def __init__(
        self, attempt: int, expected: Members, lost: Mapping[int, Mapping[int, int]]
    ) -> None:
        self._attempt, self._expected, self._lost = attempt, expected, lost

    def __call__(self, key: StepKey, row: StepRow | None, drops: Mapping[int, int]) -> StepFacts:
        """Return the facts of a step. `drops`: the number that each dropping rank gave it."""
        numbers = _numbers(row, drops)
        return StepFacts(
            key,
            self._attempt,
            next(iter(numbers)),
            Members(row.ranks if row is not None else ()),
            self._absent(key, row, drops),
            frozenset(row.layouts) if row is not None else frozenset(),
            None if len(numbers) == 1 else _disagreement(self._attempt, key, numbers),
            tuple(sorted(drops)),
            row is None or row.planned or bool(drops),
        )

    def _absent(self, key: StepKey, row: StepRow | None, drops: Mapping[int, int]) -> Members:
        if row is None:
            return self._expected
        if not row.open and not drops:
            if row.ranks == self._expected.intervals:
                return _NOBODY
            asked = self._expected.intervals if row.planned else self._lost_before(key, row)
            return Members(subtract(asked, row.ranks))
        # A step that is not closed somewhere, or of which something was dropped, was due.
        whole = subtract(row.ranks, merge_intervals((*row.open, *to_intervals(drops))))
        return Members(subtract(self._expected.intervals, whole))

    def _lost_before(self, key: StepKey, row: StepRow) -> Intervals:
        """Return the lost ranks that had not reached the step by its mode's or the global count."""
        mode, number = key
        return to_intervals(
            rank
            for rank, passed in self._lost.items()
            if passed.get(mode, -1) < number and passed.get(GLOBAL, -1) < row.step
        )


def _numbers(row: StepRow | None, drops: Mapping[int, int]) -> dict[int, Iterable[int]]:
    """Return the global numbers in order of the lowest rank that gave them, with their ranks."""
    if row is not None and not drops:
        if not row.numbers:
            return {row.step: ()}
        return {number: Members(ranks) for number, ranks in row.numbers}
    given: dict[int, int] = {}
    if row is not None:
        for number, spans in row.numbers or ((row.step, row.ranks),):
            given.update(dict.fromkeys(Members(spans), number))
    numbers: dict[int, list[int]] = {}
    for rank in sorted({*given, *drops}):
        for number in dict.fromkeys(n[rank] for n in (given, drops) if rank in n):
            numbers.setdefault(number, []).append(rank)
    return dict(numbers)


def _disagreement(attempt: int, key: StepKey, numbers: Mapping[int, Iterable[int]]) -> Disagreement:
    return Disagreement(attempt, *key, {number: tuple(r) for number, r in numbers.items()})
