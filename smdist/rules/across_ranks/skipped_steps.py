"""Steps that loss scaling skips: gradients overflow on purpose, and the weights stay as they are."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from smdist.rules.across_ranks.panels import Array, Panel, RunPart, Total, panels
from smdist.rules.stages import Stage, of_stage
from smdist.tables.rows import Rows

__all__ = ["skipped_steps"]


def skipped_steps(rows: Rows) -> dict[RunPart, list[int]]:
    """Return the steps with overflowed gradients that were not applied, ascending.

    With weights saved: at the next saved step no weight has changed on any rank. Without: gradients
    and losses of the next saved step are finite, which they are not after such an update.
    """
    found = {}
    gradients = _by_part(rows, of_stage(rows, Stage.GRADIENT))
    weights = _by_part(rows, of_stage(rows, Stage.WEIGHT))
    for part, members in gradients.items():
        total = Total(members)
        bad = total.zeros(np.int64)
        for panel in members:
            total.add(bad, panel, panel.rows["nans"] + panel.rows["infs"])
        overflowed = np.asarray((bad > 0).any(axis=1))
        if not overflowed.any():
            continue
        kept = np.append(~overflowed[1:], False)  # the next saved step is fine
        if part in weights:
            kept = _unchanged_after(total.steps, weights[part])
        found[part] = [int(step) for step in total.steps[overflowed & kept]]
    return found


def _by_part(rows: Rows, names: list[str]) -> dict[RunPart, list[Panel]]:
    found = defaultdict(list)
    for panel in panels(rows, names):
        found[panel.part].append(panel)
    return dict(found)


def _unchanged_after(steps: Array, weights: list[Panel]) -> Array:
    """Return for each step whether the weights of the next saved one are equal and finite."""
    total = Total(weights)
    mixed, bad = total.zeros(np.uint64), total.zeros(np.int64)
    for place, panel in enumerate(weights):
        factor = np.uint64(2 * place + 0x9E3779B97F4A7C15)
        total.add(mixed, panel, panel.row_signatures() * factor)
        total.add(bad, panel, panel.rows["nans"] + panel.rows["infs"])
    same = (mixed[1:] == mixed[:-1]).all(axis=1) & (bad[1:] == 0).all(axis=1)
    unchanged = dict(zip(total.steps[:-1].tolist(), same.tolist(), strict=True))
    return np.asarray([unchanged.get(int(step), False) for step in steps], np.bool_)
