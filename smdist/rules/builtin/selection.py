"""Which tensors a rule looks at, and in which order it walks over their rows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["chain", "chosen", "in_mode", "matcher", "merge_ranks", "newest", "preferred"]

# A comma separates alternatives unless it is inside brackets, as in x{1,3}.
_COMMA = re.compile(r",(?![^{\[(]*[}\])])")


def matcher(regex: str) -> re.Pattern[str]:
    """Compile alternatives separated by commas. Raises ConfigurationError for a bad pattern."""
    parts = [part.strip() for part in _COMMA.split(regex) if part.strip()]
    try:
        return re.compile("|".join(f"(?:{part})" for part in parts))
    except re.error as error:
        raise ConfigurationError(f"{regex!r} is not a regular expression: {error}") from None


def chosen(
    rows: Rows, collections: Sequence[str] | None = None, regex: str | None = None
) -> Iterator[tuple[str, Rows]]:
    """Yield name and rows of each tensor in a collection or matching `regex`; all for neither.

    The rows are views. Tensors without rows are left out.
    """
    everything = not collections and not regex
    wanted = frozenset(collections or ())
    pattern = matcher(regex) if regex else None
    edges = np.searchsorted(rows["tensor"], np.arange(len(rows.names) + 1))
    for code, name in enumerate(rows.names):
        if edges[code] == edges[code + 1]:
            continue
        if (
            everything
            or (wanted and wanted & rows.collections.get(name, frozenset()))
            or (pattern is not None and pattern.search(name))
        ):
            yield name, rows.where(slice(int(edges[code]), int(edges[code + 1])))


def in_mode(part: Rows, mode: ModeKeys) -> Rows:
    """Return the rows of one mode."""
    return part.where(part["mode"] == mode.value)


def preferred(part: Rows, modes: Sequence[ModeKeys]) -> Rows:
    """Return the rows of the first of the modes that has any; all rows if none has."""
    present = frozenset(np.unique(part["mode"]).tolist())
    for mode in modes:
        if mode.value in present:
            return part if len(present) == 1 else in_mode(part, mode)
    return part


def chain(part: Rows) -> tuple[Array, Array]:
    """Return an order of the rows of one tensor and the group of each row in that order.

    The steps of one rank, mode and attempt are a group and follow each other.
    """
    ranks = int(part["rank"].max(initial=0)) + 1
    group = (part["attempt"].astype(np.int64) * 8 + part["mode"]) * ranks + part["rank"]
    if len(group):
        group = group - group.min()
        if int(group.max()) < 1 << 16:
            group = group.astype(np.uint16)  # sorted by radix: several times as fast
    order = np.argsort(group, kind="stable")
    return order, group[order]


def newest(part: Rows) -> Array:
    """Return the indices of the rows of one tensor that no later attempt has saved again."""
    if part["attempt"].max(initial=0) == part["attempt"].min(initial=0):
        return np.arange(len(part))
    order = np.lexsort([part["attempt"], part["rank"], part["mode_step"], part["mode"]])
    keys = [part[name][order] for name in ("mode", "mode_step", "rank")]
    same = np.logical_and.reduce([key[1:] == key[:-1] for key in keys])
    return np.sort(order[np.append(~same, True)])


def merge_ranks(part: Rows) -> Rows:
    """Return one row per step over all ranks of one tensor; its rank is -1, its order the least."""
    if not len(part):
        return part
    keys = [part[name] for name in ("attempt", "mode", "mode_step")]
    begins = np.append(True, np.logical_or.reduce([key[1:] != key[:-1] for key in keys]))
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, len(part)))
    columns = {name: array[starts].copy() for name, array in part.columns.items()}
    for name in ("count", "nans", "infs", "zeros", "sum", "abs_sum"):
        columns[name] = np.add.reduceat(part[name], starts)
    for name in ("min", "abs_min", "order"):
        columns[name] = np.minimum.reduceat(part[name], starts)
    columns["max"] = np.maximum.reduceat(part["max"], starts)
    with np.errstate(all="ignore"):
        mean = np.repeat(columns["sum"] / columns["count"], lengths)
        apart = np.where(part["count"] > 0, part["sum"] / part["count"] - mean, 0.0)
        columns["m2"] = np.add.reduceat(part["m2"] + part["count"] * apart**2, starts)
    columns["rank"] = np.full(len(starts), -1, np.int32)
    columns["has_fingerprint"] = np.zeros(len(starts), np.bool_)
    return replace(part, columns=columns)
