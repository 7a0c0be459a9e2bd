"""Rows and evidence for tests of rules, measured from arrays as a capture measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from smdist.identity import ModeKeys
from smdist.kernel.tensor_stats import COLUMNS, measure
from smdist.rules.evidence import Evidence
from smdist.tables.rows import COLUMN_TYPES, Rows

Array = np.ndarray[Any, np.dtype[Any]]
Key = tuple[str, ModeKeys, int, int]  # tensor, mode, mode_step, rank
Values = Mapping[Key, Any]


def steps_of(
    tensor: str,
    arrays: Iterable[Any],
    *,
    mode: ModeKeys = ModeKeys.TRAIN,
    rank: int = 0,
    steps: Iterable[int] | None = None,
) -> dict[Key, Any]:
    """Return the values of one tensor at successive steps."""
    arrays = list(arrays)
    chosen = range(len(arrays)) if steps is None else steps
    return {(tensor, mode, step, rank): array for step, array in zip(chosen, arrays, strict=True)}


def rows_of(
    values: Values,
    collections: Mapping[str, Iterable[str]] | None = None,
    *,
    fingerprints: bool = False,
    global_steps: Mapping[tuple[ModeKeys, int], int] | None = None,
) -> Rows:
    """Return the rows of the arrays. `order` is that of the names in `values`."""
    names = tuple(dict.fromkeys(key[0] for key in values))
    columns: dict[str, list[Any]] = {name: [] for name in COLUMN_TYPES}
    for (tensor, mode, step, rank), value in values.items():
        array = np.asarray(value)
        row = dict(zip(COLUMNS, measure(array).tolist(), strict=True))
        where = (global_steps or {}).get((mode, step), step)
        mark = hash(array.tobytes()) & (2**64 - 1) if fingerprints else 0
        row |= {
            "tensor": names.index(tensor),
            "attempt": 0,
            "mode": mode.value,
            "mode_step": step,
            "step": where,
            "rank": rank,
            "order": names.index(tensor),
            "dtype": 0,
            "fingerprint": mark,
            "has_fingerprint": fingerprints,
        }
        for name, column in columns.items():
            column.append(row[name])
    arrays = {name: np.array(column, COLUMN_TYPES[name]) for name, column in columns.items()}
    groups = {name: frozenset((collections or {}).get(name, ())) for name in names}
    return Rows.of(names, ("F64",), groups, arrays)


def raw_of(values: Values) -> Callable[[str, ModeKeys, int, int], Array | None]:
    """Return the raw values of a run that saved all."""

    def raw(tensor: str, mode: ModeKeys, mode_step: int, rank: int) -> Array | None:
        found = values.get((tensor, mode, mode_step, rank))
        return None if found is None else np.asarray(found)

    return raw


def evidence_of(
    values: Values,
    collections: Mapping[str, Iterable[str]] | None = None,
    *,
    raw: bool = False,
    fingerprints: bool = False,
    global_steps: Mapping[tuple[ModeKeys, int], int] | None = None,
    ended: bool = True,
    now: float = 0.0,
    last_progress: Mapping[int, float] | None = None,
    others: tuple[Evidence, ...] = (),
) -> Evidence:
    """Return evidence over the arrays, with or without their raw values."""
    return Evidence(
        rows_of(values, collections, fingerprints=fingerprints, global_steps=global_steps),
        raw_of(values if raw else {}),
        ended,
        now,
        last_progress or {},
        others,
    )
