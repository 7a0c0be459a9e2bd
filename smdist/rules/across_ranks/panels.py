"""`Panel`: the rows of one tensor as matrices, a row for each step and a column for each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from smdist.identity import ModeKeys
from smdist.tables.rows import Rows

__all__ = ["Array", "Panel", "RunPart", "Total", "needs_ranks", "panels"]

Array = np.ndarray[Any, np.dtype[Any]]

_STATISTICS = ("count", "nans", "infs", "zeros", "sum", "m2", "abs_sum", "min", "max", "abs_min")


class RunPart(NamedTuple):
    """What is compared with each other: steps of one attempt and mode."""

    attempt: int
    mode: ModeKeys


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """One tensor in one attempt and mode. Matrices are [steps, ranks]; not every cell is present."""

    name: str
    part: RunPart
    rows: Rows
    steps: Array  # ascending, of the mode
    ranks: Array  # ascending
    row_of: Array  # the step of each row, as a place in `steps`
    column_of: Array  # its rank, as a place in `ranks`

    def grid(self, values: Array, missing: Any) -> Array:
        """Return values, one for each row of the table, as a matrix."""
        matrix = np.full((len(self.steps), len(self.ranks)), missing, values.dtype)
        matrix[self.row_of, self.column_of] = values
        return matrix

    @property
    def present(self) -> Array:
        return self.grid(np.ones(len(self.rows), np.bool_), False)

    @property
    def l2(self) -> Array:
        """Return norms; NaN for what is missing or not finite."""
        return self.grid(self.rows.l2, np.nan)

    @property
    def mean(self) -> Array:
        """Return means; NaN for what is missing or has a NaN."""
        with np.errstate(all="ignore"):
            return self.grid(self.rows["sum"] / self.rows["count"], np.nan)

    @property
    def not_finite(self) -> Array:
        """Return how many elements are NaN or infinite."""
        return self.grid(self.rows["nans"] + self.rows["infs"], 0)

    @property
    def order(self) -> int:
        """Return the position in which the tensor is captured in its step."""
        return int(self.rows["order"].min())

    @property
    def exact(self) -> bool:
        """Check whether all rows have fingerprints: only then equal signatures mean equal values."""
        return bool(self.rows["has_fingerprint"].all())

    @property
    def signatures(self) -> Array:
        """Return a number for each cell that differs where values differ: the fingerprint.

        Without fingerprints it is made from the statistics. Then a difference is still a difference.
        """
        return self.grid(self.row_signatures(), 0)

    def row_signatures(self) -> Array:
        if self.exact:
            return self.rows["fingerprint"]
        mixed = np.zeros(len(self.rows), np.uint64)
        for name in _STATISTICS:
            column = self.rows[name].astype(np.float64) + 0.0  # -0.0 and 0.0 are one value
            column[np.isnan(column)] = np.nan  # and NaN has one pattern of bits
            mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + column.view(np.uint64)
        return mixed


def panels(rows: Rows, names: Iterable[str], *, least_ranks: int = 1) -> Iterator[Panel]:
    """Yield the panels of these tensors, leaving out those with fewer ranks."""
    wanted = set(names)
    codes = [code for code, name in enumerate(rows.names) if name in wanted]
    column = rows["tensor"]
    edges = np.searchsorted(column, np.asarray([codes, [code + 1 for code in codes]], column.dtype))
    for code, first, last in zip(codes, edges[0], edges[1], strict=True):
        of_name = rows.where(slice(int(first), int(last)))
        for start, stop in _parts(of_name):
            panel = _panel(rows.names[code], of_name.where(slice(start, stop)))
            if len(panel.ranks) >= least_ranks:
                yield panel


def _parts(rows: Rows) -> Iterator[tuple[int, int]]:
    if not len(rows):
        return
    changed = (np.diff(rows["attempt"]) != 0) | (np.diff(rows["mode"]) != 0)
    edges = [0, *(np.flatnonzero(changed) + 1).tolist(), len(rows)]
    yield from pairwise(edges)


def _panel(name: str, rows: Rows) -> Panel:
    step, rank = rows["mode_step"], rows["rank"]
    begins = np.concatenate([[True], np.diff(step) != 0])  # rows are sorted by step
    ranks = np.unique(rank)
    part = RunPart(int(rows["attempt"][0]), ModeKeys(int(rows["mode"][0])))
    column_of = np.searchsorted(ranks, rank)
    return Panel(name, part, rows, step[begins], ranks, np.cumsum(begins) - 1, column_of)


class Total:
    """Sum of matrices of several panels of one part, on the steps and ranks that any of them has."""

    def __init__(self, members: list[Panel]) -> None:
        self.steps = np.unique(np.concatenate([panel.steps for panel in members]))
        self.ranks = np.unique(np.concatenate([panel.ranks for panel in members]))

    def zeros(self, kind: Any) -> Array:
        return np.zeros((len(self.steps), len(self.ranks)), kind)

    def add(self, matrix: Array, panel: Panel, values: Array) -> None:
        """Add a value for each row of the panel to its cell."""
        rows = np.searchsorted(self.steps, panel.steps)[panel.row_of]
        columns = np.searchsorted(self.ranks, panel.ranks)[panel.column_of]
        matrix[rows, columns] += values  # a cell has one row of a tensor


def needs_ranks(rows: Rows) -> str | None:
    """Return what is missing if rows of fewer than two ranks are there."""
    if len(rows) and rows["rank"].min() != rows["rank"].max():
        return None
    return "include_workers='all': rows of at least two ranks"
