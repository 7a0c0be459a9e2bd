"""`StepSkew`: ranks that do not do the same work: other tensors at a step, or fewer steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from smdist.messages import count_of
from smdist.rules.across_ranks.agreement import differing_steps, minority, sentence_of_ranks
from smdist.rules.across_ranks.panels import Array, Panel, RunPart, Total, needs_ranks, panels
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import Stage, of_stage
from smdist.tables.rows import Rows

__all__ = ["StepSkew"]

_MODEL = tuple(stage for stage in Stage if stage is not Stage.OTHER)
_DIFFERENT = (
    "Look for code that depends on the rank or on the data; `smdist trial` tells what was dropped."
)
_BEHIND = "Look at where this rank stands, for example with py-spy; the others wait for it."


@dataclass(frozen=True)
class StepSkew:
    """Compares which tensors of the model each rank captured at a step, and how far ranks have come.

    Fires for ranks that captured other tensors than most at the same step, and for ranks more than
    `behind` saved steps behind the front. Tensors that scripts save themselves are left out: often
    rank 0 alone saves them. The newest step of a live run may still be on its way and is left out.
    """

    behind: int = 5

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        rows, rule = evidence.rows, type(self).__name__
        if needs := needs_ranks(rows):
            text = "one rank alone cannot be ahead or behind"
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        of_part: dict[RunPart, list[Panel]] = defaultdict(list)
        for panel in panels(rows, of_stage(rows, *_MODEL)):
            of_part[panel.part].append(panel)
        if not of_part:
            text, needs = "no tensors of the model were saved", "losses, gradients or weights"
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=text, needs=needs)]
        found = []
        for part, members in of_part.items():
            total = Total(members)
            counts, sets = total.zeros(np.int64), total.zeros(np.uint64)
            for panel in members:
                digest = blake2b(panel.name.encode("utf-8", "surrogatepass"), digest_size=8)
                mark = np.uint64(int.from_bytes(digest.digest(), "little"))
                total.add(counts, panel, np.ones(len(panel.rows), np.int64))
                total.add(sets, panel, np.full(len(panel.rows), mark, np.uint64))
            found += self._behind(rule, part, total, counts, rows)
            present = counts > 0
            if not evidence.ended:
                newest = len(total.steps) - 1 - np.argmax(present[::-1], axis=0)
                present[newest, np.arange(len(total.ranks))] = False
            found += _different(rule, part, total, counts, sets, present, members)
        if found:
            return found
        text = "all ranks captured the same tensors at the same steps"
        return [Finding(rule=rule, verdict=Verdict.QUIET, message=text)]

    def _behind(
        self, rule: str, part: RunPart, total: Total, counts: Array, rows: Rows
    ) -> list[Finding]:
        """Return a finding of the ranks that are too far behind, with the first of them to stop."""
        height = len(total.steps)
        last = height - 1 - np.argmax((counts > 0)[::-1], axis=0)
        late = np.flatnonzero(height - 1 - last > self.behind)
        if not len(late):
            return []
        slowest = late[int(np.argmin(last[late]))]
        step = int(total.steps[last[slowest]])
        rank = int(total.ranks[slowest])
        tensor = _last_tensor(rows, part, step, rank)
        ranks = tuple(int(total.ranks[column]) for column in late)
        steps = int(height - 1 - last[slowest])
        return [
            Finding(
                rule=rule,
                verdict=Verdict.FIRES,
                message=f"worker_{rank} stands at step {step}, {count_of(steps, 'saved step')} behind "
                f"the front; the last it captured is {tensor}",
                first_step=step,
                mode=part.mode,
                attempt=part.attempt,
                tensor=tensor,
                ranks=ranks,
                value=float(steps),
                threshold=float(self.behind),
                advice=_BEHIND,
            )
        ]


def _last_tensor(rows: Rows, part: RunPart, step: int, rank: int) -> str:
    here = np.flatnonzero(
        (rows["rank"] == rank)
        & (rows["mode_step"] == step)
        & (rows["attempt"] == part.attempt)
        & (rows["mode"] == part.mode.value)
    )
    return rows.names[int(rows["tensor"][here[int(np.argmax(rows["order"][here]))]])]


def _different(
    rule: str,
    part: RunPart,
    total: Total,
    counts: Array,
    sets: Array,
    present: Array,
    members: list[Panel],
) -> list[Finding]:
    """Return a finding for the first step at which ranks captured different tensors."""
    differ = np.flatnonzero(differing_steps(sets, present))
    if not len(differ):
        return []
    row = int(differ[0])
    blamed = minority(sets[row : row + 1], present[row : row + 1])[0]
    ranks = tuple(int(rank) for rank in total.ranks[blamed])
    step = int(total.steps[row])
    here = [_has(panel, step, total.ranks) for panel in members]
    # The first tensor that some have and others do not.
    unequal = [
        (panel.order, panel.name)
        for panel, has in zip(members, here, strict=True)
        if has[present[row]].any() and not has[present[row]].all()
    ]
    tensor = min(unequal)[1] if unequal else None
    mine, most = int(counts[row][blamed].min()), int(np.median(counts[row][present[row]]))
    return [
        Finding(
            rule=rule,
            verdict=Verdict.FIRES,
            message=f"{sentence_of_ranks(ranks)} captured {count_of(mine, 'tensor')} at step {step}, "
            f"others {most}; the first that is not on all ranks is {tensor}",
            first_step=step,
            mode=part.mode,
            attempt=part.attempt,
            tensor=tensor,
            ranks=ranks,
            value=float(mine),
            threshold=float(most),
            advice=_DIFFERENT,
        )
    ]


def _has(panel: Panel, step: int, ranks: Array) -> Array:
    """Return which of the ranks have the tensor at a step."""
    at = np.searchsorted(panel.steps, step)
    if at == len(panel.steps) or panel.steps[at] != step:
        return np.zeros(len(ranks), np.bool_)
    return np.isin(ranks, panel.ranks[panel.present[at]])
