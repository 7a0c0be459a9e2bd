"""Turns rows into an Arrow table. Needs the extra `analysis`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys
from smdist.tables.rows import COLUMN_TYPES

if TYPE_CHECKING:
    from smdist.tables.rows import Rows

__all__ = ["missing_extra", "to_arrow"]


def missing_extra(package: str) -> ConfigurationError:
    """Return the error that names the extra which installs the package."""
    return ConfigurationError(
        f"this needs {package}, which is not installed: pip install 'smdist[analysis]'"
    )


def to_arrow(rows: Rows) -> Any:
    """Return a pyarrow.Table: texts instead of numbers for tensor, dtype and mode.

    `collections` is text, joined by commas. `fingerprint` is null where there is none.
    """
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise missing_extra("pyarrow") from error

    def texts(numbers: Any, words: Any) -> Any:
        indices = pa.array(np.asarray(numbers, np.int32))
        return pa.DictionaryArray.from_arrays(indices, pa.array(words, pa.string()))

    modes = [ModeKeys(mode) for mode in sorted(mode.value for mode in ModeKeys)]
    places = np.zeros(modes[-1].value + 1, np.int32)
    places[[mode.value for mode in modes]] = np.arange(len(modes))
    joined = [",".join(sorted(rows.collections.get(name, ()))) for name in rows.names]
    columns: dict[str, Any] = {}
    for name in COLUMN_TYPES:
        if name == "tensor":
            columns[name] = texts(rows[name], rows.names)
            columns["collections"] = texts(rows[name], joined)
        elif name == "dtype":
            columns[name] = texts(rows[name], rows.dtypes)
        elif name == "mode":
            columns[name] = texts(places[rows[name]], [mode.name for mode in modes])
        elif name == "fingerprint":
            columns[name] = pa.array(rows[name], mask=~rows["has_fingerprint"])
        elif name != "has_fingerprint":
            columns[name] = pa.array(rows[name])
    return pa.table(columns)
