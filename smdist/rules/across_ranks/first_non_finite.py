"""`FirstNonFinite`: where the first NaN or infinity came into being, and on which ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.across_ranks.agreement import sentence_of_ranks
from smdist.rules.across_ranks.panels import Array, RunPart
from smdist.rules.across_ranks.skipped_steps import skipped_steps
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import Stage, stage_of
from smdist.tables.rows import Rows

__all__ = ["FirstNonFinite"]

_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FirstNonFinite:
    """Reports the first NaN or infinity of each attempt in the order of step, stage and capture.

    Ranks named are those whose own values are not finite while their weights still are; all that
    follows in the run is a consequence. A step that loss scaling skips does not count, unless more
    than `skipped_most` of `skipped_window` saved steps are skipped. `ignore` is a regular expression
    of tensors that may be infinite, such as masked attention scores.
    """

    skipped_most: int = 5
    skipped_window: int = 20
    ignore: str = ""

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        rows, rule = evidence.rows, type(self).__name__
        if not len(rows):
            message, needs = "no tensors were saved", "any collection, such as losses or gradients"
            return [Finding(rule=rule, verdict=Verdict.UNDECIDED, message=message, needs=needs)]
        bad = rows.where(np.flatnonzero((rows["nans"] > 0) | (rows["infs"] > 0)))
        stages = np.asarray(
            [stage_of(name, rows.collections.get(name, _NONE)) for name in rows.names], np.int8
        )
        skipped = skipped_steps(rows) if len(bad) else {}
        keep = _counted(bad, stages, skipped, self.ignore)
        found = self._collapses(rows, skipped)
        bad = bad.where(np.flatnonzero(keep))
        for attempt in np.unique(bad["attempt"]).tolist():
            found.append(_first(rule, bad.where(bad["attempt"] == attempt), stages))
        if found:
            return found
        text = "all values are finite"
        if skipped:
            text += (
                f", apart from {sum(map(len, skipped.values()))} steps that loss scaling skipped"
            )
        return [Finding(rule=rule, verdict=Verdict.QUIET, message=text)]

    def _collapses(self, rows: Rows, skipped: dict[RunPart, list[int]]) -> list[Finding]:
        found = []
        for part, steps in skipped.items():
            here = (rows["attempt"] == part.attempt) & (rows["mode"] == part.mode.value)
            saved = np.unique(rows["mode_step"][here])
            flags = np.isin(saved, steps).astype(np.int64)
            before = np.concatenate([[0], np.cumsum(flags)])
            ends = np.arange(1, len(saved) + 1)
            counts = before[ends] - before[np.maximum(ends - self.skipped_window, 0)]
            beyond = np.flatnonzero(counts > self.skipped_most)
            if not len(beyond):
                continue
            start = max(int(beyond[0]) + 1 - self.skipped_window, 0)
            first = int(saved[start + int(np.argmax(flags[start:]))])
            found.append(
                Finding(
                    rule=type(self).__name__,
                    verdict=Verdict.FIRES,
                    message=f"loss scaling skipped {counts[beyond[0]]} of {self.skipped_window} "
                    f"steps from step {first} on",
                    first_step=first,
                    mode=part.mode,
                    attempt=part.attempt,
                    value=float(counts[beyond[0]]),
                    threshold=float(self.skipped_most),
                    advice="Lower the learning rate, or train in bfloat16, which needs no scaling.",
                )
            )
        return found


def _counted(bad: Rows, stages: Array, skipped: dict[RunPart, list[int]], ignore: str) -> Array:
    """Return which rows count: not the gradients of skipped steps, nor what may be infinite."""
    allowed = [bool(ignore and re.search(ignore, name)) for name in bad.names]
    keep = ~np.asarray(allowed, np.bool_)[bad["tensor"]]
    gradient = stages[bad["tensor"]] == Stage.GRADIENT
    for part, steps in skipped.items():
        here = (bad["attempt"] == part.attempt) & (bad["mode"] == part.mode.value)
        keep &= ~(gradient & here & np.isin(bad["mode_step"], steps))
    return np.asarray(keep)


def _first(rule: str, bad: Rows, stages: Array) -> Finding:
    """Return the finding of one attempt, from its rows that are not finite."""
    stage = stages[bad["tensor"]]
    ordered = np.lexsort((bad["rank"], bad["order"], stage, bad["step"]))
    first = int(ordered[0])
    here = bad["step"] == bad["step"][first]
    everyone = np.unique(bad["rank"][here])
    poisoned = np.unique(bad["rank"][here & (stage >= Stage.WEIGHT)])
    own = np.unique(bad["rank"][here & (stage < Stage.WEIGHT)])
    sources = np.setdiff1d(own, poisoned)
    ranks = tuple(int(rank) for rank in (sources if len(sources) else everyone))
    # Of the ranks that are named, the first tensor.
    mine = ordered[here[ordered] & np.isin(bad["rank"][ordered], ranks)]
    row = int(mine[0])
    tensor, step = bad.names[int(bad["tensor"][row])], int(bad["mode_step"][row])
    nans, infs = int(bad["nans"][row]), int(bad["infs"][row])
    what = f"{nans} NaN" if nans else f"{infs} infinities"
    at = Stage(int(stage[row]))
    advice = f"Look at what {tensor} is computed from on these ranks at step {step}."
    if at is Stage.GRADIENT:
        advice = "Save inputs and outputs too: the first gradient is only the nearest to the loss."
    elif at is Stage.INPUT:
        advice = f"Check the data that these ranks read at step {step}."
    elif at >= Stage.WEIGHT:
        advice = (
            "Save gradients and losses too: a NaN in weights no longer tells where it came from."
        )
    return Finding(
        rule=rule,
        verdict=Verdict.FIRES,
        message=f"{tensor} has {what} on {sentence_of_ranks(ranks)} at step {step}, "
        "the first in this run",
        first_step=step,
        mode=ModeKeys(int(bad["mode"][row])),
        attempt=int(bad["attempt"][row]),
        tensor=tensor,
        ranks=ranks,
        value=float(nans + infs),
        threshold=0.0,
        advice=advice,
    )
