"""From one catalogue to the next: with more facts, or on the base of a newer snapshot. Pure.

Only steps that these touch are looked at again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from smdist.coordination.drop_log import NO_DROPS
from smdist.coordination.membership import StepFacts, all_step_facts, expected_ranks, lost_at
from smdist.coordination.merge import StepKey, View, merge
from smdist.coordination.sealed import NOTHING
from smdist.coordination.spans import joined
from smdist.layout import Layout
from smdist.trials.catalogue import Catalogue, LayoutIndex

__all__ = ["advance", "touched_steps"]


def advance(
    old: Catalogue,
    delta: View,
    layouts: Mapping[str, Layout],
    now: float,
    *,
    base: View | None = None,
) -> Catalogue:
    """The catalogue with the facts of `delta` and the layouts they name, as of `now`.

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
        if lost_at(view, attempt, ranks) != lost_at(old.view, attempt, ranks):
            # They are missing at steps that nobody planned, from there on.
            touched |= {key for key, facts in old.steps.items() if not facts.planned}
    new = replace(
        old,
        view=view,
        expected=expected,
        now=now,
        layouts={**old.layouts, **{d: LayoutIndex(layout) for d, layout in layouts.items()}},
    )
    untouched = {key: facts for key, facts in old.steps.items() if key not in touched}
    return replace(new, steps={**untouched, **_assess(new, touched)})


def touched_steps(delta: View) -> Iterator[tuple[int, StepKey]]:
    """Attempt and key of each step that recent facts of `delta` are about."""
    for attempt, ranks in delta.attempts.items():
        for key in set().union(*(known.steps for known in ranks.values())):
            yield attempt, key
        for key in set().union(*_drops(delta, attempt)):
            yield attempt, key


def _drops(view: View, attempt: int) -> Iterator[Mapping[StepKey, object]]:
    return (known.drops for known in view.attempts.get(attempt, {}).values())


def _beyond(view: View, base: View) -> View:
    """What `view` has read of the ranks that `base` may not know of."""
    found = View()
    for attempt, rank, known in view.ranks():
        covered = base.rank(attempt, rank)
        if covered is not None and joined((*covered.seen, *known.seen)) == covered.seen:
            known = known.without_steps()
        found.attempts.setdefault(attempt, {})[rank] = known
    return found


def _rebased(old: View, new: View, attempt: int) -> set[StepKey]:
    """Steps that may have changed with the snapshot."""
    before, after = old.sealed.get(attempt, NOTHING), new.sealed.get(attempt, NOTHING)
    touched = {
        (chunk.ref.mode, mode_step)
        for chunk in (*after.without(before), *before.without(after))
        for mode_step in chunk.rows
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
        chosen |= all_step_facts(catalogue.view, attempt, catalogue.expected[attempt], rest)
    return {key: facts for key, facts in chosen.items() if catalogue.in_range(facts.step)}
