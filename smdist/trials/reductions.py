"""Reductions of stored tensors: from their saved statistics, else from their raw values.

Both ways go through `smdist.kernel.tensor_stats`, so they give the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smdist.config.reduction_config import canonical_reduction
from smdist.kernel.tensor_stats import (
    COLUMNS,
    REDUCTIONS,
    columns_for,
    derivable,
    derive,
    measure,
    merge_rows,
)
from smdist.trials.catalogue import TensorLocation
from smdist.trials.segment_reader import Array, SegmentReader, StatisticsRow

__all__ = ["merged", "reduce_all", "reduction_name", "saved_reductions"]


def _float(number: float) -> np.float64:
    """Return a float that has the methods of arrays, such as `item()`."""
    result: np.float64 = np.float64(number)
    return result


def reduction_name(name: str, absolute: bool = False) -> str:
    """Return the canonical name of a reduction; raise ConfigurationError if there is none."""
    return canonical_reduction(f"abs_{name}" if absolute and not name.startswith("abs_") else name)


def _measured(
    found: Sequence[TensorLocation], names: Sequence[str], reader: SegmentReader
) -> list[StatisticsRow | None]:
    """Return statistics that suffice for `names`, or None without statistics and raw values."""
    rows: list[StatisticsRow | None] = [None] * len(found)
    saved = [place for place, one in enumerate(found) if _suffices(one, names)]
    for place, row in zip(saved, reader.rows([found[i] for i in saved]), strict=True):
        rows[place] = row
    needed = columns_for(names)
    raw = [i for i, one in enumerate(found) if rows[i] is None and one.tensor.offset >= 0]
    for place, value in zip(raw, reader.values([found[i] for i in raw]), strict=True):
        rows[place] = _measure(value, needed)
    return rows


def _measure(value: Array, columns: tuple[str, ...]) -> StatisticsRow | None:
    try:
        return columns, measure(value, columns)
    except ValueError:
        return None  # complex numbers have no order, so no statistics


def _suffices(one: TensorLocation, names: Sequence[str]) -> bool:
    columns = [c for c in one.layout.columns if c not in one.tensor.unmeasured]
    return one.tensor.row >= 0 and all(derivable(name, columns) for name in names)


def reduce_all(
    found: Sequence[TensorLocation], names: Sequence[str], reader: SegmentReader
) -> list[dict[str, np.float64] | None]:
    """Return the reductions `names` (canonical) of each; None if there is nothing to compute from."""
    return [
        None if row is None else {name: _float(derive(row[1], row[0], name)) for name in names}
        for row in _measured(found, names, reader)
    ]


def merged(found: Sequence[TensorLocation], name: str, reader: SegmentReader) -> np.float64 | None:
    """Return one reduction of all of `found`, as if they were one tensor."""
    needed = columns_for([name])
    if derivable(name, (*COLUMNS, "prod")):
        rows = _measured(found, [name], reader)
        if any(row is None for row in rows):
            return None
        picked = [row[1][[row[0].index(c) for c in needed]] for row in rows if row is not None]
        return _float(derive(merge_rows(picked, needed), needed, name))
    # Quantiles do not merge.
    if not all(one.tensor.offset >= 0 for one in found):
        return None
    every = np.concatenate([value.ravel() for value in reader.values(found)])
    return _float(derive(measure(every, needed), needed, name))


def saved_reductions(found: TensorLocation, reader: SegmentReader) -> dict[str, np.float64]:
    """Return all reductions that derive from the saved statistics, without raw values."""
    if found.tensor.row < 0:
        return {}
    ((columns, row),) = reader.rows([found])
    extras = [column for column in columns if column.startswith("q")]
    names = [name for name in (*REDUCTIONS, *extras) if derivable(name, columns)]
    return {name: _float(derive(row, columns, name)) for name in names}
