"""A trial's tensors as a table, for pandas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys, worker_name
from smdist.trials.reductions import reduce_all, reduction_name

if TYPE_CHECKING:
    from smdist.trials.catalogue import TensorLocation
    from smdist.trials.segment_reader import SegmentReader

__all__ = ["REDUCTIONS", "Selected", "to_dataframe"]

REDUCTIONS = ("min", "max", "mean", "std", "l2", "nans", "infs")

_ROWS = 1024


class Selected(NamedTuple):
    """A tensor of a rank at a step; `number` is the step's, in the mode that was asked for."""

    number: int
    attempt: int
    found: TensorLocation


def to_dataframe(
    reader: SegmentReader, selected: Sequence[Selected], reductions: Sequence[str]
) -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "to_dataframe() needs pandas: pip install smdist[dataframe]"
        ) from error
    names = [reduction_name(name) for name in reductions]
    columns = ["step", "mode", "mode_step", "attempt", "worker", "tensor", "shape", "value", *names]
    rows = [
        row
        for start in range(0, len(selected), _ROWS)
        for row in _rows(reader, selected[start : start + _ROWS], names)
    ]
    return pd.DataFrame.from_records(rows, columns=columns)


def _rows(
    reader: SegmentReader, selected: Sequence[Selected], names: Sequence[str]
) -> Iterator[tuple[object, ...]]:
    found = [one.found for one in selected]
    reduced = reduce_all(found, names, reader)
    single = [i for i, one in enumerate(found) if one.tensor.offset >= 0 and _is_scalar(one)]
    values = dict(zip(single, reader.values([found[i] for i in single]), strict=True))
    for place, (number, attempt, one) in enumerate(selected):
        value = values[place].reshape(()).astype(object).item() if place in values else None
        numbers = reduced[place] or {}
        yield (
            number,
            ModeKeys(one.entry.mode).name,
            one.entry.mode_step,
            attempt,
            worker_name(one.rank),
            one.tensor.name,
            one.tensor.shape,
            value,
            *(numbers.get(name) for name in names),
        )


def _is_scalar(one: TensorLocation) -> bool:
    return all(size == 1 for size in one.tensor.shape)
