"""`OutlierRank`: a rank whose values are far from those of the other ranks, at once or steadily."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from smdist.rules.across_ranks.agreement import sentence_of_ranks
from smdist.rules.across_ranks.drift import Drift, find_drift
from smdist.rules.across_ranks.panels import Array, Panel, RunPart, needs_ranks, panels
from smdist.rules.across_ranks.skipped_steps import skipped_steps
from smdist.rules.across_ranks.windows import in_some_of_last, median_of_last, nan_median
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import Stage, of_stage

__all__ = ["OutlierRank"]

_ADVICE = "Compare the data that this rank reads with that of the others; then its hardware."
_LOCAL = (Stage.INPUT, Stage.OUTPUT, Stage.LOSS, Stage.GRADIENT)


class _Jump(NamedTuple):
    """The first step at which a rank is far off, in causal order."""

    step: int
    stage: Stage
    order: int
    tensor: str
    log_ratio: float
    threshold: float
    ranks: int


@dataclass(frozen=True)
class OutlierRank:
    """Compares the norms of what each rank computes by itself: inputs, outputs, losses, gradients.

    Jump: `at_once` times the median of the ranks (or a fraction of it), `repeated` times in 2 of 3
    saved steps, or with 8 ranks and more beyond `deviations` robust deviations and `least_ratio` in 2
    of 3. Drift: the mean place of a rank in the order of losses, or of gradient norms, over `window`
    steps is further from the middle than chance explains. `calibrate` steps are taken as normal where
    ranks read different kinds of data. A value that is not finite beside finite ones is an outlier,
    unless loss scaling skipped its step.
    """

    at_once: float = 20.0
    repeated: float = 10.0
    deviations: float = 8.0
    least_ratio: float = 3.0
    window: int = 16
    drift: float = 4.5
    calibrate: int = 0

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        rows, rule = evidence.rows, type(self).__name__
        if needs := needs_ranks(rows):
            text = "one rank alone has none to be compared with"
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        stage_of_name = {name: stage for stage in _LOCAL for name in of_stage(rows, stage)}
        if not stage_of_name:
            text, needs = (
                "no values that ranks compute by themselves were saved",
                "losses, gradients",
            )
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        skipped = skipped_steps(rows)
        jumps: dict[tuple[RunPart, int], list[_Jump]] = defaultdict(list)
        judged = 0
        for panel in panels(rows, stage_of_name, least_ranks=2):
            judged += 1
            stage = stage_of_name[panel.name]
            left_out = skipped.get(panel.part, []) if stage is Stage.GRADIENT else []
            for rank, jump in self._jumps(panel, stage, left_out).items():
                jumps[panel.part, rank].append(jump)
        found = [_jumped(rule, part, rank, sorted(those)) for (part, rank), those in jumps.items()]
        drifts = find_drift(rows, self.window, self.drift, self.calibrate)
        found += [_drifted(rule, one) for one in drifts if (one.part, one.rank) not in jumps]
        if found:
            return found
        if not judged:
            text, needs = "no tensor was saved by two ranks", "include_workers='all'"
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        text = f"{judged} tensors are of similar size on all ranks"
        return [Finding(rule=rule, verdict=Verdict.QUIET, message=text)]

    def _jumps(self, panel: Panel, stage: Stage, skipped: list[int]) -> dict[int, _Jump]:
        distance, broken = _distances(panel, skipped)
        far = np.abs(distance)
        with np.errstate(invalid="ignore"):  # NaN is what is missing: no outlier
            at_once = far >= np.log(self.at_once)
            fires = at_once | in_some_of_last(far >= np.log(self.repeated), 2, 3)
            if len(panel.ranks) >= 8:
                scale = 1.4826 * nan_median(far, 1)
                floor, _ = median_of_last(scale, 100)
                scale = np.fmax(np.fmax(scale, floor), 1e-12)[:, None]
                beyond = (far > self.deviations * scale) & (far > np.log(self.least_ratio))
                fires |= in_some_of_last(beyond, 2, 3)
        fires |= broken
        found = {}
        for column in np.flatnonzero(fires.any(axis=0)):
            row = int(np.argmax(fires[:, column]))
            ratio = float("inf") if broken[row, column] else float(distance[row, column])
            limit = self.at_once
            if not (broken[row, column] or at_once[row, column]):
                limit = (
                    self.repeated if far[row, column] >= np.log(self.repeated) else self.least_ratio
                )
            known = int(panel.present[row].sum())
            found[int(panel.ranks[column])] = _Jump(
                int(panel.steps[row]), stage, panel.order, panel.name, ratio, limit, known
            )
        return found


def _distances(panel: Panel, skipped: list[int]) -> tuple[Array, Array]:
    """Return log(norm / median of the ranks), and the cells that are not finite beside finite ones.

    With two ranks the distance is to the other one. Cells that cannot be compared are NaN.
    """
    norm, present = panel.l2, panel.present
    bad = present & ~np.isfinite(norm)
    left_out = bad & np.isin(panel.steps, skipped)[:, None]
    broken = bad & ~left_out & np.isfinite(norm).any(axis=1, keepdims=True)
    norm = np.where(bad, np.nan, norm)
    with np.errstate(all="ignore"):
        log = np.log(np.where(norm > 0, norm, np.nan))
    if len(panel.ranks) == 2:
        distance = log - log[:, ::-1]
    else:
        distance = log - nan_median(log, 1)[:, None]
    # A norm of 0 has no logarithm. It counts as "repeated" if no other rank ever has one.
    zero = norm == 0
    of_ranks = zero.any(axis=0)
    if of_ranks.sum() == 1:
        mostly_more = (norm > 0).sum(axis=1, keepdims=True) * 2 > present.sum(axis=1, keepdims=True)
        distance = np.where(zero & mostly_more, -np.log(10.0) - 1e-9, distance)
    return distance, broken


def _jumped(rule: str, part: RunPart, rank: int, jumps: list[_Jump]) -> Finding:
    first = jumps[0]
    more = len({jump.tensor for jump in jumps}) - 1
    ratio = float(np.exp(min(first.log_ratio, 700.0)))
    size = f"is {ratio:.3g} times the median of the ranks"
    if np.isinf(first.log_ratio):
        ratio, size = float("inf"), "is not finite, unlike that of others"
    elif first.ranks == 2:
        size = f"is {ratio:.3g} times that of the other rank; two cannot tell which is right"
    also = f", and so are {more} more tensors" if more else ""
    return Finding(
        rule=rule,
        verdict=Verdict.FIRES,
        message=f"the norm of {first.tensor} on worker_{rank} {size} at step {first.step}{also}",
        first_step=first.step,
        mode=part.mode,
        attempt=part.attempt,
        tensor=first.tensor,
        ranks=(rank,),
        value=ratio,
        threshold=first.threshold,
        advice=_ADVICE,
    )


def _drifted(rule: str, drift: Drift) -> Finding:
    side = "highest" if drift.high else "lowest"
    return Finding(
        rule=rule,
        verdict=Verdict.FIRES,
        message=f"{drift.what} of {sentence_of_ranks((drift.rank,))} is steadily among the {side} of "
        f"the ranks from step {drift.step} on, {drift.ratio:.3g} times the median",
        first_step=drift.step,
        mode=drift.part.mode,
        attempt=drift.part.attempt,
        tensor=drift.tensor,
        ranks=(drift.rank,),
        value=drift.deviation,
        threshold=drift.threshold,
        advice=_ADVICE,
    )
