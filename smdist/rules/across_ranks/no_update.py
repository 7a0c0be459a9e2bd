"""`NoUpdate`: weights that have a gradient and do not change."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from smdist.rules.across_ranks.agreement import sentence_of_ranks
from smdist.rules.across_ranks.panels import Array, Panel, RunPart, Total, panels
from smdist.rules.across_ranks.windows import successive
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import GRADIENT_PREFIX, Stage, of_stage

__all__ = ["NoUpdate"]


class _Pair(NamedTuple):
    """A weight and its gradient, by the interval between two saved steps, [intervals, ranks]."""

    weight: Panel
    stayed: Array  # unchanged although its gradient is not negligible
    moved: Array


@dataclass(frozen=True)
class NoUpdate:
    """Looks for weights whose bits stay the same although their gradient is not zero.

    Fires after `intervals` saved steps in a row while other weights of the rank change. Where no
    weight changes at all it waits for `intervals_of_all`, as gradients may be accumulated. A gradient
    whose norm is below `negligible` times that of the weight does not count: such an update is lost
    in rounding. Nor does one that is not finite: loss scaling skips it.
    """

    intervals: int = 2
    intervals_of_all: int = 10
    negligible: float = 1e-3

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        rows, rule = evidence.rows, type(self).__name__
        gradients = set(of_stage(rows, Stage.GRADIENT))
        weights = [n for n in of_stage(rows, Stage.WEIGHT) if f"{GRADIENT_PREFIX}{n}" in gradients]
        gradient_of = {
            (panel.name, panel.part): panel
            for panel in panels(rows, [f"{GRADIENT_PREFIX}{name}" for name in weights])
        }
        of_part: dict[RunPart, list[_Pair]] = defaultdict(list)
        inexact = 0
        for weight in panels(rows, weights):
            gradient = gradient_of.get((f"{GRADIENT_PREFIX}{weight.name}", weight.part))
            if gradient is None or len(weight.steps) < 2:
                continue
            inexact += not weight.exact
            of_part[weight.part].append(self._pair(weight, gradient))
        found = [one for part, those in of_part.items() for one in self._stuck(rule, part, those)]
        if found and not inexact:
            return found
        if found or not of_part:
            text = "there are no weights together with their gradients at two steps or more"
            needs = "collections weights and gradients at the same steps"
            if found:  # a change of statistics is a change, but no change of them proves nothing
                text = f"{inexact} weights have no fingerprint, so equal statistics prove nothing"
                needs = "rows with fingerprints"
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        if all(len(pair.stayed) < self.intervals for those in of_part.values() for pair in those):
            text, needs = "too few steps were saved", f"at least {self.intervals + 1} saved steps"
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        text = f"{sum(map(len, of_part.values()))} weights change as their gradients ask"
        return [Finding(rule=rule, verdict=Verdict.QUIET, message=text)]

    def _pair(self, weight: Panel, gradient: Panel) -> _Pair:
        signatures, present = weight.signatures, weight.present
        known = present[1:] & present[:-1]
        same = known & (signatures[1:] == signatures[:-1])
        norm = _aligned(gradient, weight)[:-1]
        with np.errstate(invalid="ignore"):  # NaN: not known, or skipped
            asks = (norm > 0) & (norm > self.negligible * weight.l2[:-1]) & np.isfinite(norm)
        return _Pair(weight, same & asks, known & ~same)

    def _stuck(self, rule: str, part: RunPart, pairs: list[_Pair]) -> list[Finding]:
        total = Total([pair.weight for pair in pairs])
        moved = total.zeros(np.int64)
        for pair in pairs:
            rows, columns = _cells(total, pair.weight)
            moved[np.ix_(rows[:-1], columns)] += pair.moved
        found, none_moves = [], []
        for pair in pairs:
            rows, columns = _cells(total, pair.weight)
            others = moved[np.ix_(rows[:-1], columns)] > 0
            fires = successive(pair.stayed & others, self.intervals)
            if fires.any():
                found.append(_finding(rule, part, pair.weight, fires, self.intervals, "others do"))
            fires = successive(pair.stayed & ~others, self.intervals_of_all)
            if fires.any():
                none_moves.append((pair, fires))
        if none_moves:
            pair, fires = min(none_moves, key=lambda one: one[0].weight.order)
            text = f"nor do {len(none_moves) - 1} others"
            found.append(_finding(rule, part, pair.weight, fires, self.intervals_of_all, text))
        return found


def _cells(total: Total, panel: Panel) -> tuple[Array, Array]:
    return np.searchsorted(total.steps, panel.steps), np.searchsorted(total.ranks, panel.ranks)


def _aligned(gradient: Panel, weight: Panel) -> Array:
    """Return the norms of the gradient at the steps and ranks of the weight; NaN where it has none."""
    norms = np.full((len(weight.steps), len(weight.ranks)), np.nan)
    _, mine, its = np.intersect1d(weight.steps, gradient.steps, return_indices=True)
    _, my_ranks, its_ranks = np.intersect1d(weight.ranks, gradient.ranks, return_indices=True)
    norms[np.ix_(mine, my_ranks)] = gradient.l2[np.ix_(its, its_ranks)]
    return norms


def _finding(
    rule: str, part: RunPart, weight: Panel, fires: Array, intervals: int, others: str
) -> Finding:
    row = int(np.argmax(fires.any(axis=1)))
    ranks = tuple(int(rank) for rank in weight.ranks[fires[row]])
    step = int(weight.steps[row])
    return Finding(
        rule=rule,
        verdict=Verdict.FIRES,
        message=f"{weight.name} does not change from step {step} on although it has a gradient on "
        f"{sentence_of_ranks(ranks)}; {others}",
        first_step=step,
        mode=part.mode,
        attempt=part.attempt,
        tensor=weight.name,
        ranks=ranks,
        value=0.0,
        threshold=float(intervals),
        advice="Check that the optimizer holds this very parameter, and that its rate is not 0.",
    )
