"""`NormMismatch`: a gradient norm that the job logged, beside the one of the gradients saved."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from smdist.rules.across_ranks.agreement import differing_steps
from smdist.rules.across_ranks.panels import Panel, RunPart, Total, panels
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import GRADIENT_PREFIX, Stage, of_stage

__all__ = ["NormMismatch"]


@dataclass(frozen=True)
class NormMismatch:
    """Compares a logged norm of all gradients with the exact one.

    `logged` is a regular expression of the scalar. Fires where they differ by more than the share
    `tolerance`. It decides where gradients are equal on all ranks, so averaged, or one rank was
    saved, and each saved weight has a gradient: local gradients have other norms.
    """

    logged: str = r"(?i)grad(ient)?s?[_/. -]?norm"
    tolerance: float = 0.01

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        rows, rule = evidence.rows, type(self).__name__
        gradients = of_stage(rows, Stage.GRADIENT)
        logged = [name for name in of_stage(rows, Stage.OTHER) if re.search(self.logged, name)]
        of_part: dict[RunPart, list[Panel]] = defaultdict(list)
        for panel in panels(rows, gradients):
            of_part[panel.part].append(panel)
        text, needs = "no logged norm and gradients are there together", ""
        if not logged or not gradients:
            needs = "gradients, and the norm saved as a scalar such as grad_norm"
        elif bare := set(of_stage(rows, Stage.WEIGHT)) - {
            name.removeprefix(GRADIENT_PREFIX) for name in gradients
        }:
            text = f"{len(bare)} weights have no gradient, such as {min(bare)}"
            needs = "the gradients of all weights"
        elif not of_stage(rows, Stage.WEIGHT):
            text, needs = "whether all gradients were saved is not known", "collection weights"
        elif any(_local(panel) for panel in panels(rows, gradients, least_ranks=2)):
            text, needs = "gradients differ between ranks, so they are local", "averaged gradients"
        if needs:
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        judged, found = 0, []
        for panel in panels(rows, logged):
            if panel.part in of_part and panel.rows["count"].max() == 1:
                judged += 1
                found += self._compare(rule, panel, of_part[panel.part])
        if found:
            return found
        if not judged:
            needs = "a scalar such as grad_norm at the steps of the gradients"
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        return [Finding(rule=rule, verdict=Verdict.QUIET, message="logged norms are exact")]

    def _compare(self, rule: str, logged: Panel, gradients: list[Panel]) -> list[Finding]:
        total = Total(gradients)
        squares, seen = total.zeros(np.float64), total.zeros(np.int64)
        for panel in gradients:
            total.add(squares, panel, panel.rows.l2**2)
            total.add(seen, panel, np.ones(len(panel.rows), np.int64))
        exact = np.sqrt(np.where(seen == len(gradients), squares, np.nan))
        steps, mine, its = np.intersect1d(logged.steps, total.steps, return_indices=True)
        ranks, columns, its_columns = np.intersect1d(logged.ranks, total.ranks, return_indices=True)
        told, exact = logged.mean[np.ix_(mine, columns)], exact[np.ix_(its, its_columns)]
        with np.errstate(all="ignore"):
            # What is not finite in the gradients belongs to FirstNonFinite.
            off = np.isfinite(exact) & logged.present[np.ix_(mine, columns)]
            off &= ~(np.abs(told - exact) <= self.tolerance * exact)
            share = np.abs(told - exact) / exact
        if not off.any():
            return []
        row = int(np.argmax(off.any(axis=1)))
        column = int(np.argmax(off[row]))
        return [
            Finding(
                rule=rule,
                verdict=Verdict.FIRES,
                message=f"{logged.name} is {told[row, column]:.4g} at step {int(steps[row])}, but the "
                f"{len(gradients)} gradients have norm {exact[row, column]:.4g}",
                first_step=int(steps[row]),
                mode=logged.part.mode,
                attempt=logged.part.attempt,
                tensor=logged.name,
                ranks=tuple(int(rank) for rank in ranks[off[row]]),
                value=float(share[row, column]),
                threshold=self.tolerance,
                advice="See over which parameters and ranks the job sums; clipping uses that norm.",
            )
        ]


def _local(panel: Panel) -> bool:
    return bool(differing_steps(panel.signatures, panel.present).any())
