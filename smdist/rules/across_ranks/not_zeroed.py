"""`NotZeroed`: gradients that were not reset, so that they pile up from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smdist.rules.across_ranks.panels import Panel, RunPart, panels
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import GRADIENT_PREFIX, Stage, of_stage

__all__ = ["NotZeroed"]


@dataclass(frozen=True)
class NotZeroed:
    """Compares the gradient of one backward pass with what has accumulated in `.grad` after it.

    The first is saved by the hook as `gradient/NAME`; the second is not, so a script has to save it
    as `accumulated/NAME`. Fires where their norms differ by more than the share `tolerance`. With
    several ranks `.grad` is an average and rightly differs, so the rule decides for one rank alone.
    """

    tolerance: float = 1e-3
    prefix: str = "accumulated/"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        rows, rule = evidence.rows, type(self).__name__
        found = (
            {(panel.name, panel.part): panel for panel in panels(rows, rows.names)}
            if any(name.startswith(self.prefix) for name in rows.names)
            else {}
        )
        pairs = [
            (panel, own)
            for (name, part), panel in found.items()
            if name.startswith(self.prefix)
            and (own := found.get((GRADIENT_PREFIX + name.removeprefix(self.prefix), part)))
        ]
        needs = None
        if not pairs:
            text = "only one of the two gradients of a weight was saved"
            if not of_stage(rows, Stage.GRADIENT):
                text = "no gradients were saved"
            needs = f"gradients, and .grad after backward saved as {self.prefix}NAME"
        elif rows["rank"].min() != rows["rank"].max():
            text, needs = ".grad is an average over the ranks", "a run with one rank"
        if needs:
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        fired = [one for both in pairs for one in self._compare(rule, *both)]
        if fired:
            return fired
        text = f"{len(pairs)} gradients are those of their own step alone"
        return [Finding(rule=rule, verdict=Verdict.QUIET, message=text)]

    def _compare(self, rule: str, accumulated: Panel, own: Panel) -> list[Finding]:
        steps, mine, its = np.intersect1d(accumulated.steps, own.steps, return_indices=True)
        sums, norms = accumulated.l2[mine, 0], own.l2[its, 0]
        with np.errstate(invalid="ignore"):
            off = np.isfinite(norms) & ~(np.abs(sums - norms) <= self.tolerance * norms)
        if not off.any():
            return []
        at = int(np.argmax(off))
        part: RunPart = own.part
        return [
            Finding(
                rule=rule,
                verdict=Verdict.FIRES,
                message=f"{own.name} has norm {norms[at]:.4g} at step {int(steps[at])}, but what "
                f"accumulated has {sums[at]:.4g}",
                first_step=int(steps[at]),
                mode=part.mode,
                attempt=part.attempt,
                tensor=own.name,
                ranks=(int(own.ranks[0]),),
                value=float(np.abs(sums[at] - norms[at]) / norms[at]) if norms[at] else np.inf,
                threshold=self.tolerance,
                advice="Call optimizer.zero_grad() before each backward, or after each step.",
            )
        ]
