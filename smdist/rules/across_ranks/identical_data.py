"""`IdenticalData`: two ranks that read the same batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smdist.rules.across_ranks.agreement import group_sizes, sentence_of_ranks
from smdist.rules.across_ranks.panels import Panel, needs_ranks, panels
from smdist.rules.across_ranks.windows import in_some_of_last, successive
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import Stage, of_stage

__all__ = ["IdenticalData"]


@dataclass(frozen=True)
class IdenticalData:
    """Compares fingerprints of inputs between ranks that should read different data.

    Fires for ranks that share their input with another one in `successive_steps` saved steps in a
    row, or in half of `window`. Inputs of `most_small` elements or fewer, constant ones, and those
    that stay the same from step to step (masks, positions) are left out. Ranks of a tensor or
    pipeline group share their data rightly: the table does not know such groups.
    """

    successive_steps: int = 3
    window: int = 10
    most_small: int = 64

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        rows, rule = evidence.rows, type(self).__name__
        needs = needs_ranks(rows)
        text = "one rank alone has nobody to share data with"
        if needs is None:
            found, judged, inexact = [], 0, 0
            for panel in panels(rows, of_stage(rows, Stage.INPUT), least_ranks=2):
                if panel.rows["count"].max() <= self.most_small:
                    continue
                if not panel.exact:
                    inexact += 1
                    continue
                judged += 1
                found += self._shared(rule, panel)
            if found:
                return [min(found, key=lambda one: one.first_step or 0)]
            if judged:
                text = f"{judged} inputs differ between the ranks"
                return [Finding(rule=rule, verdict=Verdict.QUIET, message=text)]
            needs, text = "collection inputs", "no inputs of more than a few elements were saved"
            if inexact:
                needs, text = "rows with fingerprints", "inputs have no fingerprints"
        return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]

    def _shared(self, rule: str, panel: Panel) -> list[Finding]:
        signatures, m2 = panel.signatures, panel.grid(panel.rows["m2"], 0.0)
        # A NaN batch is compared too: only what is known to be constant is left out.
        usable = panel.present & ~(m2 == 0)
        usable[1:] &= ~((signatures[1:] == signatures[:-1]) & panel.present[:-1])
        same = usable & (group_sizes(signatures, usable) > 1)
        half = in_some_of_last(same, (self.window + 1) // 2, self.window)
        fires = successive(same, self.successive_steps) | half
        if not fires.any():
            return []
        row = int(np.argmax(fires.any(axis=1)))
        lead = int(np.argmax(fires[row]))
        equal = same[row] & (signatures[row] == signatures[row, lead])
        ranks = tuple(int(rank) for rank in panel.ranks[equal])
        steps = int(same[:, lead].sum())
        return [
            Finding(
                rule=rule,
                verdict=Verdict.FIRES,
                message=f"{sentence_of_ranks(ranks)} read the same {panel.name} at {steps} of "
                f"{len(panel.steps)} saved steps, from step {int(panel.steps[row])} on",
                first_step=int(panel.steps[row]),
                mode=panel.part.mode,
                attempt=panel.part.attempt,
                tensor=panel.name,
                ranks=ranks,
                value=float(steps),
                threshold=float(self.successive_steps),
                advice="Use a DistributedSampler, and a random seed that depends on the rank.",
            )
        ]
