"""Sufficient statistics of tensors: measure them in one pass, merge them, derive reductions.

A row has the base `COLUMNS` (see `smdist.kernel` for their meaning), then extras. Extras need a pass
of their own and are only measured when requested:

    prod                  product, in float64
    median, abs_median    of the elements, of their magnitudes
    q<p>                  quantile, 0 <= p <= 1, interpolated linearly: q0.5, q0.99

`derive` computes every reduction from such a row, whether it was stored or measured from raw values,
so both give the same number. Standard deviation and variance are those of the population (ddof 0);
norms are those of the flattened tensor. Values that a tensor without elements does not have (mean,
min, ...) are NaN.

`merge_rows` merges rows of shards, ranks or steps. It is commutative and associative up to rounding,
and the row of an empty tensor is its identity. Medians and quantiles of a union cannot be computed
from those of its parts, so they become NaN when two parts have elements.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from smdist import kernel
from smdist.errors import UnknownKey
from smdist.kernel import COLUMNS, DTYPES, ELEMENT_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "COLUMNS",
    "COUNTS",
    "DERIVABLE",
    "DTYPES",
    "REDUCTIONS",
    "canonical",
    "columns_for",
    "derivable",
    "derive",
    "derive_many",
    "is_reduction",
    "measure",
    "measure_into",
    "measure_many",
    "merge_rows",
]

_SEED: Final = ("min", "max", "median", "mean", "std", "variance", "sum", "prod", "l1", "l2")

COUNTS: Final = ("count", "nans", "infs", "zeros")
REDUCTIONS: Final = (*_SEED, *(f"abs_{name}" for name in _SEED), *COUNTS)
"""All named reductions; the quantiles `q<p>` come in addition."""

_EXTRA_OF: Final = {
    "median": "median",
    "abs_median": "abs_median",
    "prod": "prod",
    "abs_prod": "prod",
}
DERIVABLE: Final = frozenset(REDUCTIONS) - frozenset(_EXTRA_OF)
"""Reductions that need only the base columns."""


# -- names -----------------------------------------------------------------------------------


def _quantile(name: str) -> float | None:
    if not name.startswith("q") or not name[1:2].isdigit():
        return None
    try:
        p = float(name[1:])
    except ValueError:
        return None
    return p if 0.0 <= p <= 1.0 else None


def is_reduction(name: str) -> bool:
    return name in REDUCTIONS or _quantile(name) is not None


def canonical(name: str) -> str:
    """Return the canonical spelling of a reduction (`q0.50` is `q0.5`); raise UnknownKey otherwise."""
    if name in REDUCTIONS:
        return name
    p = _quantile(name)
    if p is None:
        raise UnknownKey(name, (*REDUCTIONS, "q0.5"), "reductions")
    return f"q{p!r}"


def _extra(name: str) -> str | None:
    """Return the extra column that a canonical name needs; None if the base columns are enough."""
    if name in ("q0.0", "q1.0"):
        return None
    return name if name.startswith("q") else _EXTRA_OF.get(name)


def columns_for(reductions: Iterable[str]) -> tuple[str, ...]:
    """Return the base columns and the sorted extras that the reductions need."""
    extras = {_extra(canonical(name)) for name in reductions}
    return (*COLUMNS, *sorted(extra for extra in extras if extra is not None))


def derivable(name: str, columns: Sequence[str]) -> bool:
    """Check whether `derive` can compute `name` from rows with these columns."""
    extra = _extra(canonical(name))
    return extra is None or extra in columns or (extra == "q0.5" and "median" in columns)


# -- measuring -------------------------------------------------------------------------------

_CODES: Final = {name: code for code, name in ELEMENT_NAMES.items()}


def measure(array: Array, columns: Sequence[str] = COLUMNS) -> Array:
    """Return the row of one array of any shape and memory order.

    It equals, to the last bit, the row that a capture of the same elements stores. Raises
    ValueError for element types without statistics, such as complex ones.
    """
    array = np.asarray(array)
    code = _CODES.get(array.dtype.name)
    if code is None:
        raise ValueError(f"no statistics for elements of type {array.dtype}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    flat = array.ravel()  # in C order, as it is captured; copies only other orders
    return np.asarray(measure_many([int(flat.ctypes.data)], [flat.size], [code], columns)[0])


def measure_many(
    addresses: Sequence[int],
    counts: Sequence[int],
    dtypes: Sequence[str],
    columns: Sequence[str] = COLUMNS,
) -> Array:
    """Return a new matrix with one row per tensor in memory; see `measure_into`."""
    matrix = np.empty((len(addresses), len(columns)), np.float64)
    measure_into(addresses, counts, dtypes, columns, int(matrix.ctypes.data), matrix.strides[0])
    return matrix


def measure_into(
    addresses: Sequence[int],
    counts: Sequence[int],
    dtypes: Sequence[str],
    columns: Sequence[str],
    out: int,
    stride: int,
) -> None:
    """Write the row of each tensor (address, elements, dtype code) at `out + i * stride` bytes.

    Runs on the training thread, under the contract of `smdist.kernel`. Without extras it is one
    kernel call. Raises ValueError for a dtype that is not in `DTYPES` before it writes anything.
    """
    kernel.statistics(addresses, counts, dtypes, out, stride)
    if len(columns) == len(COLUMNS):
        return
    extras = columns[len(COLUMNS) :]
    for index, (address, count, dtype) in enumerate(zip(addresses, counts, dtypes, strict=True)):
        row = kernel.values(out + index * stride, len(columns), "F64")
        row[len(COLUMNS) :] = _extras(address, count, dtype, int(row[1]), extras)


def _extras(address: int, count: int, dtype: str, nans: int, names: Sequence[str]) -> list[float]:
    if nans or not count:
        return [1.0 if name == "prod" and not nans else math.nan for name in names]
    elements = kernel.values(address, count, dtype)
    shares = {name: p for name in names if (p := _share(name)) is not None}
    with np.errstate(all="ignore"):
        found = _quantiles(elements, shares)
        if "abs_median" in names:
            # float64 because the magnitude of the least integer is no integer of that type
            wide = elements if elements.dtype.kind == "f" else elements.astype(np.float64)
            found["abs_median"] = _quantiles(np.abs(wide), {"abs_median": 0.5})["abs_median"]
        if "prod" in names:
            found["prod"] = float(np.multiply.reduce(elements, dtype=np.float64))
    return [found[name] for name in names]


def _share(name: str) -> float | None:
    return 0.5 if name == "median" else _quantile(name)


def _quantiles(elements: Array, shares: Mapping[str, float]) -> dict[str, float]:
    """Return the quantile of each share. Partitions once for all, in the elements' own type."""
    if not shares:
        return {}
    last = elements.size - 1
    places = {name: p * last for name, p in shares.items()}
    kth = {math.floor(at) for at in places.values()} | {math.ceil(at) for at in places.values()}
    parted = np.partition(elements, sorted(kth))
    return {
        name: _between(
            float(parted[math.floor(at)]), float(parted[math.ceil(at)]), at - math.floor(at)
        )
        for name, at in places.items()
    }


def _between(low: float, high: float, share: float) -> float:
    if low == high or share == 0.0:  # two infinities: their difference would be NaN
        return low
    if math.isinf(low) or math.isinf(high):
        return low * (1.0 - share) + high * share
    return low + (high - low) * share


# -- merging ---------------------------------------------------------------------------------


def merge_rows(rows: Sequence[Array] | Array, columns: Sequence[str] = COLUMNS) -> Array:
    """Return the row of the union of all elements; without rows, that of an empty tensor."""
    matrix = np.asarray(rows, np.float64).reshape(-1, len(columns))
    merged = np.full(len(columns), math.nan)
    merged[: len(COLUMNS)] = kernel.merge(matrix[:, : len(COLUMNS)])
    filled = matrix[matrix[:, 0] > 0]
    for at in range(len(COLUMNS), len(columns)):
        if columns[at] == "prod":
            with np.errstate(all="ignore"):
                merged[at] = np.multiply.reduce(filled[:, at])
        elif len(filled) == 1:
            merged[at] = filled[0, at]
    return merged


# -- deriving --------------------------------------------------------------------------------


def derive(row: Array | Sequence[float], columns: Sequence[str], name: str) -> float:
    """Return one reduction of one row.

    Raises UnknownKey for an unknown name and ValueError when the row lacks an extra column.
    """
    return float(derive_many(np.asarray(row, np.float64), columns, name))


def derive_many(rows: Array, columns: Sequence[str], name: str) -> Array:
    """Return one reduction of many rows: an array of any shape whose last axis are the columns."""
    name = canonical(name)
    if not derivable(name, columns):
        raise ValueError(f"{name!r} was not measured: these rows hold {', '.join(columns)}")
    column = {label: rows[..., at] for at, label in enumerate(columns)}
    if name == "q0.5" and name not in column:
        name = "median"
    with np.errstate(all="ignore"):
        if name in _FORMULAS:
            return np.asarray(_FORMULAS[name](column))
        return np.asarray(column[name])


_Columns = Any  # mapping from column name to array


def _if_any(c: _Columns, value: Array) -> Array:
    return np.where(c["count"] > 0, value, math.nan)


def _variance(c: _Columns) -> Array:
    return np.asarray(c["m2"] / c["count"])


def _abs_variance(c: _Columns) -> Array:
    # Magnitudes have the same sum of squares and another mean. The difference of the sums comes
    # first: it is exactly 0 when all signs agree.
    sums = np.abs(c["sum"])
    m2 = c["m2"] - (c["abs_sum"] - sums) * (c["abs_sum"] + sums) / c["count"]
    return np.asarray(np.maximum(m2, 0.0) / c["count"])


def _l2(c: _Columns) -> Array:
    squares = c["m2"] + c["sum"] * c["sum"] / c["count"]
    norm = np.where((c["infs"] > 0) & (c["nans"] == 0), math.inf, np.sqrt(squares))
    return np.where(c["count"] > 0, norm, 0.0)


_FORMULAS: Final[dict[str, Callable[[_Columns], Array]]] = {
    "min": lambda c: _if_any(c, c["min"]),
    "max": lambda c: _if_any(c, c["max"]),
    "mean": lambda c: np.asarray(c["sum"] / c["count"]),
    "variance": _variance,
    "std": lambda c: np.sqrt(_variance(c)),
    "l1": lambda c: np.asarray(c["abs_sum"]),
    "l2": _l2,
    "abs_min": lambda c: _if_any(c, c["abs_min"]),
    "abs_max": lambda c: _if_any(c, np.maximum(np.abs(c["min"]), np.abs(c["max"]))),
    "abs_mean": lambda c: np.asarray(c["abs_sum"] / c["count"]),
    "abs_variance": _abs_variance,
    "abs_std": lambda c: np.sqrt(_abs_variance(c)),
    "abs_l1": lambda c: np.asarray(c["abs_sum"]),
    "abs_l2": _l2,
    "abs_prod": lambda c: np.abs(c["prod"]),
    "q0.0": lambda c: _if_any(c, c["min"]),
    "q1.0": lambda c: _if_any(c, c["max"]),
}
