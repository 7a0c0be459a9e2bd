"""Put new blocks into columns, and split columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from smdist.coordination.columnar.blocks import Blocks, join_blocks
from smdist.coordination.columnar.columns import FIELDS, Array, Columns, Tables

__all__ = ["NewBlocks", "empty_columns", "extend_columns", "split_columns"]

NewBlocks = Mapping[int, Mapping[int, Blocks]]
"""Mode step -> rank -> blocks."""

_Cell = tuple[int, int]


def extend_columns(old: Columns, news: NewBlocks) -> Columns:
    """Return `old` with more blocks; `old` itself if it has them all."""
    changed = _changed(old, news)
    if not changed:
        return old
    mode_steps = _union(old.mode_steps, (mode_step for mode_step, _, _ in changed))
    ranks = _union(old.ranks, (rank for _, rank, _ in changed))
    rows = {number: row for row, number in enumerate(mode_steps.tolist())}
    columns = {rank: column for column, rank in enumerate(ranks.tolist())}
    tables = Tables(old.layouts, old.names)
    cells, kept = _moved(old, mode_steps, ranks)
    firsts: list[tuple[Any, ...]] = []
    others: list[tuple[Any, ...]] = []
    for mode_step, rank, blocks in changed:
        cell = (rows[mode_step], columns[rank])
        for entry in blocks:
            into = others if entry is not blocks[0] else firsts
            into.append((*tables.values(old.attempt, rank, entry), *cell))
    _assign(cells, firsts)
    more = _more(kept, others, {(row[-2], row[-1]) for row in firsts})
    return Columns(
        old.attempt,
        old.mode,
        mode_steps,
        ranks,
        cells,
        more,
        tuple(tables.layouts),
        tuple(tables.names),
    )


def empty_columns(attempt: int, mode: int) -> Columns:
    none = np.zeros(0, np.int64)
    cells = {name: np.zeros((0, 0), dtype) for name, dtype in FIELDS.items()}
    return Columns(attempt, mode, none, none, cells, _more_arrays([]))


def split_columns(columns: Columns, most: int) -> Iterator[Columns]:
    """Split `columns` into parts of at most `most` steps.

    A part has columns for its own ranks alone, as if its steps had come by themselves.
    """
    if len(columns.mode_steps) <= most:
        yield columns
        return
    for begin in range(0, len(columns.mode_steps), most):
        part = slice(begin, begin + most)
        here = np.flatnonzero(columns.cells["flags"][part].any(axis=0))
        inside = (columns.more["row"] >= begin) & (columns.more["row"] < begin + most)
        more = {name: array[inside] for name, array in columns.more.items()}
        more["row"] = more["row"] - begin
        more["column"] = np.searchsorted(here, more["column"])
        yield Columns(
            columns.attempt,
            columns.mode,
            columns.mode_steps[part],
            columns.ranks[here],
            {name: array[part][:, here] for name, array in columns.cells.items()},
            more,
            columns.layouts,
            columns.names,
        )


def _changed(old: Columns, news: NewBlocks) -> list[tuple[int, int, Blocks]]:
    """Return the steps of ranks that have changed, with all their blocks."""
    found = []
    for mode_step, ranks in news.items():
        for rank, blocks in ranks.items():
            before = old.blocks(mode_step, rank)
            after = join_blocks(before, blocks)
            if after != before:
                found.append((mode_step, rank, after))
    return found


def _union(old: Array, new: Any) -> Array:
    return np.array(sorted({*old.tolist(), *new}), np.int64)


def _moved(
    old: Columns, mode_steps: Array, ranks: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Copy the cells and further blocks of `old` to their places among more steps and ranks."""
    rows, columns = np.searchsorted(mode_steps, old.mode_steps), np.searchsorted(ranks, old.ranks)
    cells = {name: np.zeros((len(mode_steps), len(ranks)), dt) for name, dt in FIELDS.items()}
    if len(rows):
        where = np.ix_(rows, columns)
        for name, array in old.cells.items():
            cells[name][where] = array
    more = dict(old.more)
    if len(more["row"]):
        more["row"], more["column"] = rows[more["row"]], columns[more["column"]]
    return cells, more


def _assign(cells: Mapping[str, Array], values: list[tuple[Any, ...]]) -> None:
    *fields, rows, columns = zip(*values, strict=True)
    for name, column in zip(FIELDS, fields, strict=True):
        cells[name][rows, columns] = column


def _more(
    kept: Mapping[str, Array], values: list[tuple[Any, ...]], replaced: set[_Cell]
) -> dict[str, Array]:
    if len(kept["row"]):
        cells = zip(kept["row"].tolist(), kept["column"].tolist(), strict=True)
        stay = np.array([cell not in replaced for cell in cells], bool)
        kept = {name: array[stay] for name, array in kept.items()}
    new = _more_arrays(values)
    both = {name: np.concatenate([kept[name], new[name]]) for name in new}
    order = np.lexsort((both["block"], both["column"], both["row"]))
    return {name: array[order] for name, array in both.items()}


def _more_arrays(values: list[tuple[Any, ...]]) -> dict[str, Array]:
    lists = list(zip(*values, strict=True)) if values else [()] * (len(FIELDS) + 2)
    kinds = {**FIELDS, "row": np.dtype(np.int64), "column": np.dtype(np.int64)}
    return {name: np.array(lists[i], dtype) for i, (name, dtype) in enumerate(kinds.items())}
