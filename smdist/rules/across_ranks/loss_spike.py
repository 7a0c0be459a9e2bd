"""`LossSpike`: a loss far above what it was before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smdist.rules.across_ranks.panels import Panel, panels
from smdist.rules.across_ranks.windows import median_of_last, nan_median
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import Stage, of_stage

__all__ = ["LossSpike"]


@dataclass(frozen=True)
class LossSpike:
    """Compares the loss, as the median of the ranks, with the `window` saved steps before.

    Fires where its logarithm is more than `deviations` robust deviations above their median, or where
    it is `times` the greatest of the first `window`. A deviation is at least `least_scale`, so that
    steady losses do not fire for little. It needs `least_steps` before it judges. A loss that is not
    finite on any rank is a spike. Losses of 0 or less have no logarithm and are not judged.
    """

    deviations: float = 6.0
    window: int = 100
    times: float = 10.0
    least_scale: float = 0.1
    least_steps: int = 20

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        rows, rule = evidence.rows, type(self).__name__
        found, judged = [], 0
        for panel in panels(rows, of_stage(rows, Stage.LOSS)):
            spike, usable = self._spike(rule, panel)
            found += spike
            judged += usable
        if found:
            return found
        if judged:
            text = f"no spike in {judged} losses"
            return [Finding(rule=rule, verdict=Verdict.QUIET, message=text)]
        text = "there are too few positive losses"
        needs = f"losses of more than {self.least_steps} saved steps"
        return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]

    def _spike(self, rule: str, panel: Panel) -> tuple[list[Finding], bool]:
        mean = panel.mean
        broken = panel.present & ~np.isfinite(mean)
        loss = nan_median(np.where(np.isfinite(mean), mean, np.nan), 1)
        with np.errstate(all="ignore"):
            log = np.where(loss > 0, np.log(loss), np.nan)
            centre, spread = median_of_last(log, self.window, least=self.least_steps)
            scale = np.fmax(1.4826 * spread, self.least_scale)
            z = (log - centre) / scale
            first = loss[: self.window]
            greatest = np.max(first, initial=-np.inf, where=np.isfinite(first))
            high = (loss > self.times * greatest) & (greatest > 0)
            high[: self.window] = False
            fires = (z > self.deviations) | high | broken.any(axis=1)
        if not fires.any():
            return [], bool(np.isfinite(z).any())
        at = int(np.argmax(fires))
        step, rank_flags = int(panel.steps[at]), broken[at]
        ranks = tuple(
            int(r) for r in panel.ranks[rank_flags if rank_flags.any() else panel.present[at]]
        )
        before = float(np.exp(centre[at]))
        text = f"{panel.name} is {loss[at]:.4g} at step {step}, {before:.4g} in the steps before"
        value, limit = float(z[at]), self.deviations
        if rank_flags.any():
            text, value = f"{panel.name} is not finite at step {step}", float("inf")
        elif not z[at] > self.deviations:
            value, limit = float(loss[at] / greatest), self.times
        finding = Finding(
            rule=rule,
            verdict=Verdict.FIRES,
            message=text,
            first_step=step,
            mode=panel.part.mode,
            attempt=panel.part.attempt,
            tensor=panel.name,
            ranks=ranks,
            value=value,
            threshold=limit,
            advice="Look at the batch of this step; skip it, or lower the learning rate.",
        )
        return [finding], True
