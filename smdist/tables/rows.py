"""`Rows`: one row of statistics per tensor, step and rank, as numpy columns of equal length.

Trials build it from what is stored, rules read it, and `smdist.tables` turns it into Arrow or Parquet.
Pure data: no file is opened here, and only numpy is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["COLUMN_TYPES", "Rows"]

COLUMN_TYPES: dict[str, np.dtype[Any]] = {
    "tensor": np.dtype(np.int32),
    "attempt": np.dtype(np.int32),
    "mode": np.dtype(np.int8),
    "mode_step": np.dtype(np.int64),
    "step": np.dtype(np.int64),
    "rank": np.dtype(np.int32),
    "order": np.dtype(np.int32),
    "dtype": np.dtype(np.int16),
    "count": np.dtype(np.int64),
    "nans": np.dtype(np.int64),
    "infs": np.dtype(np.int64),
    "zeros": np.dtype(np.int64),
    "sum": np.dtype(np.float64),
    "m2": np.dtype(np.float64),
    "abs_sum": np.dtype(np.float64),
    "min": np.dtype(np.float64),
    "max": np.dtype(np.float64),
    "abs_min": np.dtype(np.float64),
    "fingerprint": np.dtype(np.uint64),
    "has_fingerprint": np.dtype(np.bool_),
}
"""The columns in their order, with their element types."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Statistics, sorted by tensor, attempt, mode, mode_step, rank. `rows["sum"]` is a column.

    `tensor` is an index into `names`, `dtype` into `dtypes`, `mode` a value of `ModeKeys`. `step` is the
    global step, `order` the position in which the rank captured the tensor within its step. The
    statistics mean what they mean in `smdist.kernel`: any NaN makes everything after the counts NaN.
    `fingerprint` is valid where `has_fingerprint` is set; equal values have equal fingerprints.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    collections: Mapping[str, frozenset[str]]  # of each name
    columns: Mapping[str, Array]

    @staticmethod
    def of(
        names: tuple[str, ...],
        dtypes: tuple[str, ...],
        collections: Mapping[str, frozenset[str]],
        columns: Mapping[str, Any],
    ) -> Rows:
        """Convert the columns to their types and sort them. Raises ValueError for unequal lengths."""
        arrays = {name: np.asarray(columns[name], kind) for name, kind in COLUMN_TYPES.items()}
        if len({len(array) for array in arrays.values()}) > 1:
            raise ValueError("the columns differ in length")
        keys = ("rank", "mode_step", "mode", "attempt", "tensor")
        order = np.lexsort([arrays[key] for key in keys])
        return Rows(names, dtypes, collections, {k: a[order] for k, a in arrays.items()})

    def __len__(self) -> int:
        return len(self.columns["tensor"])

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def where(self, chosen: Array | slice) -> Rows:
        """Return the rows that a mask, an index array or a slice selects, in the same order."""
        return replace(self, columns={name: a[chosen] for name, a in self.columns.items()})

    def of_tensor(self, name: str) -> Rows:
        """Return the rows of one tensor; none for a name that is not there."""
        if name not in self.names:
            return self.where(slice(0, 0))
        code = self.names.index(name)
        first, last = np.searchsorted(self["tensor"], [code, code + 1])
        return self.where(slice(int(first), int(last)))

    @property
    def l2(self) -> Array:
        """Return the Euclidean norm of each row; NaN where a value is NaN or infinite."""
        count, total = self["count"], self["sum"]
        with np.errstate(all="ignore"):
            square = np.where(count > 0, total * total / count, 0.0)
            return np.asarray(np.sqrt(self["m2"] + square))
