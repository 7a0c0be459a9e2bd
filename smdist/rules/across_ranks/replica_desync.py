"""`ReplicaDesync`: replicas of a model that are not equal any more."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from smdist.rules.across_ranks.agreement import differing_steps, minority, sentence_of_ranks
from smdist.rules.across_ranks.panels import Panel, RunPart, needs_ranks, panels
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.stages import Stage, of_stage

__all__ = ["ReplicaDesync"]

_AT_START = "Ranks begin with different weights: set the same seed, or wrap the model in DDP."
_LATER = (
    "Compare gradient averaging, clipping and learning rate of these ranks; if those are equal, "
    "check the memory of the host."
)
_RESTORED = "Optimizer state differs: see what each rank restored from its checkpoint."


class _Place(NamedTuple):
    """A tensor at a step, in causal order; `known` is the number of ranks that have it."""

    step: int
    stage: Stage
    order: int
    tensor: str
    known: int
    first_saved: bool


@dataclass(frozen=True)
class ReplicaDesync:
    """Compares fingerprints of weights and optimizer state over the ranks of a data-parallel job.

    Bits must be equal, so there is no threshold. More than half of the ranks are right, the others
    are named; without such a majority all are named. Gradients are left out: those that a rank
    computed by itself differ rightly, and the table does not say which are averaged. Buffers of
    normalisation are left out too, and tensors whose sizes differ: those are shards, not replicas.
    """

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        rows = evidence.rows
        name = type(self).__name__
        weights = set(of_stage(rows, Stage.WEIGHT))
        names = [*weights, *of_stage(rows, Stage.OPTIMIZER)]
        if needs := needs_ranks(rows):
            return [_undecided(name, "one rank alone cannot differ from others", needs)]
        first: dict[tuple[RunPart, int], _Place] = {}
        judged, inexact = 0, 0
        for panel in panels(rows, names, least_ranks=2):
            if panel.rows["count"].min() != panel.rows["count"].max():
                continue
            judged += 1
            inexact += not panel.exact
            stage = Stage.WEIGHT if panel.name in weights else Stage.OPTIMIZER
            for rank, place in _first_of_ranks(panel, stage).items():
                key = (panel.part, rank)
                first[key] = min(first.get(key, place), place)
        if first:
            return _findings(name, first)
        if not judged:
            text = "no weights of two ranks or more were saved"
            return [_undecided(name, text, "collection weights or optimizer_variables")]
        if inexact:
            text = f"statistics agree, but {inexact} of {judged} tensors have no fingerprint"
            return [_undecided(name, text, "rows with fingerprints")]
        text = f"{judged} tensors are equal on all ranks at every saved step"
        return [Finding(rule=name, verdict=Verdict.QUIET, message=text)]


def _undecided(rule: str, message: str, needs: str) -> Finding:
    return Finding(rule=rule, verdict=Verdict.UNDECIDED, message=message, needs=needs)


def _first_of_ranks(panel: Panel, stage: Stage) -> dict[int, _Place]:
    """Return for each rank in a minority the first step at which it is."""
    values, present = panel.signatures, panel.present
    rows = np.flatnonzero(differing_steps(values, present))
    if not len(rows):
        return {}
    blamed = minority(values[rows], present[rows])
    found = {}
    for column in np.flatnonzero(blamed.any(axis=0)):
        row = rows[int(np.argmax(blamed[:, column]))]
        known = int(present[row].sum())
        step = int(panel.steps[row])
        found[int(panel.ranks[column])] = _Place(
            step, stage, panel.order, panel.name, known, row == 0
        )
    return found


def _findings(rule: str, first: dict[tuple[RunPart, int], _Place]) -> list[Finding]:
    together = defaultdict(list)
    for (part, rank), place in first.items():
        together[part, place].append(rank)
    return [
        _finding(rule, part, place, tuple(sorted(ranks)))
        for (part, place), ranks in sorted(
            together.items(), key=lambda item: (item[0][0].attempt, item[0][1])
        )
    ]


def _finding(rule: str, part: RunPart, place: _Place, ranks: tuple[int, ...]) -> Finding:
    who, others = sentence_of_ranks(ranks), place.known - len(ranks)
    verb = "differs" if len(ranks) == 1 else "differ"
    where = f"in {place.tensor} from step {place.step} on"
    if 2 * len(ranks) < place.known:
        message = f"{who} {verb} from the other {others} ranks {where}"
    else:
        message = f"{who} differ {where}; there is no majority that tells which is right"
        if len(ranks) == 1:
            message = f"{who} differs {where}; there is no majority that tells which is right"
    advice = _AT_START if place.first_saved else _LATER
    return Finding(
        rule=rule,
        verdict=Verdict.FIRES,
        message=message,
        first_step=place.step,
        mode=part.mode,
        attempt=part.attempt,
        tensor=place.tensor,
        ranks=ranks,
        value=float(len(ranks)),
        threshold=0.0,
        advice=_RESTORED if place.stage is Stage.OPTIMIZER else advice,
    )
