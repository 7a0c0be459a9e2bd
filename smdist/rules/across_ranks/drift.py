"""A rank test over steps: whether a rank is steadily above or below the others. No scale is needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from smdist.rules.across_ranks.panels import Array, Panel, RunPart, Total, panels
from smdist.rules.across_ranks.windows import nan_median
from smdist.rules.stages import Stage, of_stage
from smdist.tables.rows import Rows

__all__ = ["Drift", "find_drift", "places"]

_GROUPS = 10  # of gradients, by the order of capture: more tests would need more evidence each
_FALSE_ALARMS = 0.01  # in a run


class Drift(NamedTuple):
    part: RunPart
    rank: int
    step: int
    what: str
    tensor: str
    high: bool
    deviation: float
    threshold: float
    ratio: float


class _Series(NamedTuple):
    """A number of each rank at each step, [steps, ranks]; NaN where it is not known."""

    part: RunPart
    what: str
    tensor: str
    steps: Array
    ranks: Array
    values: Array


def find_drift(rows: Rows, window: int, least: float, calibrate: int) -> list[Drift]:
    """Return the first drift of each rank that drifts."""
    every = [*_losses(rows), *_gradient_norms(rows)]
    first: dict[tuple[RunPart, int], Drift] = {}
    for series in every:
        tests = len(series.ranks) * len(every) * max(len(series.steps) // window, 1)
        limit = max(least, NormalDist().inv_cdf(1 - _FALSE_ALARMS / tests / 2))
        for drift in _drifts(series, window, limit, calibrate):
            key = (drift.part, drift.rank)
            if key not in first or drift.step < first[key].step:
                first[key] = drift
    return list(first.values())


def _losses(rows: Rows) -> Iterator[_Series]:
    for panel in panels(rows, of_stage(rows, Stage.LOSS), least_ranks=3):
        values = np.where(panel.present & np.isnan(panel.mean), np.inf, panel.mean)
        known = panel.present.all(axis=1)
        yield _Series(
            panel.part,
            f"loss {panel.name}",
            panel.name,
            panel.steps[known],
            panel.ranks,
            values[known],
        )


def _gradient_norms(rows: Rows) -> Iterator[_Series]:
    of_part: dict[RunPart, list[Panel]] = defaultdict(list)
    for panel in panels(rows, of_stage(rows, Stage.GRADIENT), least_ranks=3):
        of_part[panel.part].append(panel)
    for part, members in of_part.items():
        members.sort(key=lambda panel: panel.order)
        count = min(_GROUPS, len(members))
        for number in range(count):
            of_group = members[
                number * len(members) // count : (number + 1) * len(members) // count
            ]
            total = Total(of_group)
            squares, seen = total.zeros(np.float64), total.zeros(np.int64)
            for panel in of_group:
                total.add(squares, panel, np.where(np.isnan(l2 := panel.rows.l2), np.inf, l2**2))
                total.add(seen, panel, np.ones(len(panel.rows), np.int64))
            known = (seen == len(of_group)).all(axis=1)
            name = of_group[0].name
            what = f"the norm of {name}" + (f" to {of_group[-1].name}" if len(of_group) > 1 else "")
            norms = np.sqrt(squares[known])
            yield _Series(part, what, name, total.steps[known], total.ranks, norms)


def places(values: Array) -> Array:
    """Return the place of each value in its row, from 1; equal values share the mean of theirs."""
    height, width = values.shape
    if not values.size:
        return np.zeros(values.shape)
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    begins = np.ones((height, width), np.bool_)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group = np.cumsum(begins.ravel()) - 1
    mean = np.bincount(group, np.tile(np.arange(1, width + 1), height)) / np.bincount(group)
    result = np.empty((height, width))
    np.put_along_axis(result, order, mean[group].reshape(height, width), axis=1)
    return result


def _drifts(series: _Series, window: int, limit: float, calibrate: int) -> Iterator[Drift]:
    height, width = series.values.shape
    if height < window:
        return
    away = places(series.values) - (width + 1) / 2
    if calibrate:
        away = away - away[:calibrate].mean(axis=0)
    sums = np.concatenate([np.zeros((1, width)), np.cumsum(away, axis=0)])
    z = (sums[window:] - sums[:-window]) / window / np.sqrt((width**2 - 1) / (12 * window))
    for column in np.flatnonzero((np.abs(z) > limit).any(axis=0)):
        at = int(np.argmax(np.abs(z[:, column]) > limit))
        high = bool(z[at, column] > 0)
        end = at + window
        # It began where the sum of places turned, measured against half of what it rises by now.
        path = sums[:end, column] * (1 if high else -1)
        rise = abs(sums[end, column] - sums[at, column]) / window
        begin = int(np.argmin(path - np.arange(end) * rise / 2))
        values = series.values[begin:end]
        with np.errstate(all="ignore"):
            ratio = float(nan_median(values[:, column] / nan_median(values, 1), 0))
        yield Drift(
            part=series.part,
            rank=int(series.ranks[column]),
            step=int(series.steps[begin]),
            what=series.what,
            tensor=series.tensor,
            high=high,
            deviation=abs(float(z[at, column])),
            threshold=limit,
            ratio=ratio,
        )
