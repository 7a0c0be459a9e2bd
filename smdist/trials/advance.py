"""Make the next catalogue: with more facts, or on top of a newer snapshot. Pure.

Called by `LiveTrial` after each poll. Only the steps that new facts touch are looked at again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from smdist.coordination.columnar.chunks import NO_CHUNKS
from smdist.coordination.columnar.drop_log import NO_DROPS
from smdist.coordination.view.membership import (
    StepFacts,
    all_step_facts,
    expected_ranks,
    progress_of_lost_ranks,
)
from smdist.coordination.view.run_view import StepKey, View, merge
from smdist.coordination.view.step_facts import damaged_steps, mark_superseded, may_be_superseded
from smdist.format.intervals import Members, merge_intervals, to_intervals
from smdist.format.layout import Layout
from smdist.identity import worker_name
from smdist.trials.catalogue import Catalogue, LayoutIndex

__all__ = ["advance", "mark_damaged", "touched_steps"]


def advance(
    old: Catalogue,
    delta: View,
    layouts: Mapping[str, Layout],
    now: float,
    *,
    base: View | None = None,
) -> Catalogue:
    """Return the catalogue with the facts of `delta` and the layouts they name, as of `now`.

    `base` is a newer snapshot, to take the place of the one so far.
    """
    before = old.view if base is None else merge(base, _beyond(old.view, base))
    view = merge(before, delta)
    attempts = [a for a in view.attempts if old.attempt is None or a == old.attempt]
    expected = {attempt: expected_ranks(view, attempt) for attempt in attempts}
    touched = {key for attempt, key in touched_steps(delta) if attempt in expected}
    for attempt in attempts:
        if expected[attempt] != old.expected.get(attempt):
            # When more ranks are expected than before, what was complete may no longer be.
            log = view.drop_logs.get(attempt, NO_DROPS).steps
            touched |= view.keys(attempt).union(log, *_drops(view, attempt))
            continue
        if base is not None:
            touched |= _rebased(old.view, view, attempt)
        ranks = expected[attempt]
        if progress_of_lost_ranks(view, attempt, ranks) != progress_of_lost_ranks(
            old.view, attempt, ranks
        ):
            # They are missing at steps that nobody planned, from there on.
            touched |= {key for key, facts in old.steps.items() if not facts.planned}
        if may_be_superseded(view, attempt) != may_be_superseded(old.view, attempt):
            touched |= old.steps.keys()
        was, now_is = damaged_steps(old.view, attempt), damaged_steps(view, attempt)
        touched |= {key for key in {*was, *now_is} if was.get(key) != now_is.get(key)}
    new = replace(
        old,
        view=view,
        expected=expected,
        now=now,
        layouts={**old.layouts, **{d: LayoutIndex(layout) for d, layout in layouts.items()}},
    )
    if new.layouts.keys() > old.layouts.keys():
        touched |= {key for key, facts in old.steps.items() if facts.damaged}
    return _assessed(new, touched)


def mark_damaged(old: Catalogue, segment: str) -> Catalogue:
    """Return the catalogue in which steps with data in `segment` are damaged."""
    new = replace(old, spoiled=old.spoiled | {segment})
    attempts = ((a, known) for a in new.expected for known in new.view.attempts.get(a, {}))
    touched = {
        (entry.mode, entry.mode_step)
        for attempt, rank in attempts
        if f"/{worker_name(rank)}/{attempt:06d}-" in segment
        for entry in new.view.entries(attempt, rank)
        if entry.segment == segment
    }
    return _assessed(new, touched)


def _assessed(catalogue: Catalogue, touched: set[StepKey]) -> Catalogue:
    steps = {key: facts for key, facts in catalogue.steps.items() if key not in touched}
    return replace(catalogue, steps={**steps, **_assess(catalogue, touched)})


def touched_steps(delta: View) -> Iterator[tuple[int, StepKey]]:
    """Yield attempt and key of each step that has facts in `delta`."""
    for attempt, ranks in delta.attempts.items():
        for key in set().union(*(known.steps for known in ranks.values())):
            yield attempt, key
        for key in set().union(*_drops(delta, attempt)):
            yield attempt, key


def _drops(view: View, attempt: int) -> Iterator[Mapping[StepKey, object]]:
    return (known.drops for known in view.attempts.get(attempt, {}).values())


def _beyond(view: View, base: View) -> View:
    """Return what `view` has read of the ranks that `base` may lack."""
    found = View()
    for attempt, rank, known in view.ranks():
        covered = base.rank(attempt, rank)
        if covered is not None and merge_intervals((*covered.seen, *known.seen)) == covered.seen:
            known = known.without_steps()
        found.attempts.setdefault(attempt, {})[rank] = known
    return found


def _rebased(old: View, new: View, attempt: int) -> set[StepKey]:
    """Return the steps that may have changed with the snapshot."""
    before, after = old.sealed.get(attempt, NO_CHUNKS), new.sealed.get(attempt, NO_CHUNKS)
    touched = {
        (chunk.ref.mode, mode_step)
        for chunk in (*after.without(before), *before.without(after))
        for run in chunk.ref.runs
        for mode_step in run.mode_steps()
    }
    logged, log = old.drop_logs.get(attempt, NO_DROPS), new.drop_logs.get(attempt, NO_DROPS)
    for batch in log.without(logged):
        touched.update(key for run in batch.ref.runs for key, _ in run.steps())
    for view in (old, new):
        for known in view.attempts.get(attempt, {}).values():
            touched.update(known.steps, known.drops)
    return touched


def _assess(catalogue: Catalogue, touched: set[StepKey]) -> dict[StepKey, StepFacts]:
    chosen: dict[StepKey, StepFacts] = {}
    for attempt in sorted(catalogue.expected, reverse=True):
        rest = touched - chosen.keys()
        expected = catalogue.expected[attempt]
        found = all_step_facts(catalogue.view, attempt, expected, rest)
        if catalogue.attempt is None:
            found = mark_superseded(catalogue.view, attempt, expected, found)
        chosen |= found
    for key, facts in chosen.items():
        damaged = catalogue.damaged(facts)
        if damaged:
            chosen[key] = facts.with_damage(Members(to_intervals(damaged)))
    if catalogue.range_steps == (None, None):
        return chosen
    return {key: facts for key, facts in chosen.items() if catalogue.in_range(facts.step)}
