"""Whether two tensors are close, as `numpy.allclose(a, b)` says it: bounds from rows, else raw values.

All elements are close if |a - b| <= atol + rtol * |b|. Then sums, minima and maxima are close too; if
those are not, the tensors differ for certain. Equal fingerprints mean equal tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["COMPARED", "Tolerance", "pick"]

COMPARED = (
    *("count", "nans", "infs", "sum", "abs_sum", "min", "max", "abs_min"),
    *("fingerprint", "has_fingerprint"),
)
"""The columns that a comparison reads."""

_ROUNDING = 1e-12  # of sums, relative: two kernels add in another order


def pick(rows: Rows, at: Array, columns: tuple[str, ...] = COMPARED) -> dict[str, Array]:
    """Return some columns of some rows."""
    return {name: rows[name][at] for name in columns}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What still counts as equal."""

    rtol: float = 1e-5
    atol: float = 1e-8
    equal_nan: bool = False

    def compare(self, a: Mapping[str, Array], b: Mapping[str, Array]) -> tuple[Array, Array]:
        """Return where rows are equal for certain and where they differ for certain."""
        with np.errstate(all="ignore"):
            return self._compare(a, b)

    def _compare(self, a: Mapping[str, Array], b: Mapping[str, Array]) -> tuple[Array, Array]:
        size = np.maximum(np.abs(b["min"]), np.abs(b["max"]))
        per_element = self.atol + self.rtol * size
        rounding = _ROUNDING * (a["abs_sum"] + b["abs_sum"])
        in_sum = b["count"] * self.atol + self.rtol * b["abs_sum"] + rounding
        differ = (
            (a["count"] != b["count"])
            | (a["nans"] != b["nans"])
            | (a["infs"] != b["infs"])
            | (np.abs(a["sum"] - b["sum"]) > in_sum)
            | (np.abs(a["min"] - b["min"]) > per_element)
            | (np.abs(a["max"] - b["max"]) > per_element)
        )
        if not self.equal_nan:
            differ |= b["nans"] > 0
        # No element is further from its partner than the extremes are from each other.
        apart = np.maximum(np.abs(a["max"] - b["min"]), np.abs(b["max"] - a["min"]))
        within = apart <= self.atol + self.rtol * b["abs_min"]
        same = a["has_fingerprint"] & b["has_fingerprint"] & (a["fingerprint"] == b["fingerprint"])
        equal = (same | within | (a["count"] == 0)) & ~differ
        return equal, differ

    def close(self, a: Array, b: Array) -> bool:
        """Compare raw values."""
        if a.shape != b.shape:
            return False
        wide_a, wide_b = (np.asarray(x, np.float64) for x in (a, b))
        return bool(
            np.allclose(wide_a, wide_b, rtol=self.rtol, atol=self.atol, equal_nan=self.equal_nan)
        )
