"""Blocks of many steps and ranks as arrays `[steps x ranks]`: of one mode in one attempt.

A cell holds the first block of a step of a rank; the others, if any, are rows of `more`, in order of
cell and block. Entries are made when they are asked for. Immutable; `extend_columns` makes the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from smdist.coordination.columnar.blocks import Blocks
from smdist.coordination.columnar.step_rows import StepRow
from smdist.format.intervals import Intervals, to_intervals
from smdist.format.manifest import StepEntry, manifest_key, segment_key
from smdist.identity import worker_name

__all__ = ["FIELDS", "Array", "Columns", "Tables"]

Array = np.ndarray[Any, np.dtype[Any]]

# `name` counts in `Tables.names`: what a segment's key has besides worker, attempt and `seq`.
FIELDS: dict[str, np.dtype[Any]] = {
    "flags": np.dtype(np.uint8),
    "step": np.dtype(np.int64),
    "block": np.dtype(np.int64),
    "layout": np.dtype(np.int32),
    "seq": np.dtype(np.int64),
    "name": np.dtype(np.int32),
    "offset": np.dtype(np.int64),
    "began": np.dtype(np.float64),
    "time": np.dtype(np.float64),
}
PRESENT, CLOSED, PLANNED, CONTINUES = 1, 2, 4, 32
_NO_SEGMENT, _SEGMENT, _ATTACHED, _OTHER = 0, 8, 16, 24
_KIND = 24

_SEGMENT_KEY = re.compile(r"segments/[^/]+/\d+-(\d+)-([^/]*)\.safetensors")
_MANIFEST_KEY = re.compile(r"manifests/[^/]+/\d+-(\d+)\.json")
_LARGEST = (1 << 63) - 1


class Tables:
    """TextTable by number. Number 0 is the empty text."""

    def __init__(self, layouts: tuple[str, ...] = ("",), names: tuple[str, ...] = ("",)) -> None:
        self.layouts = {text: number for number, text in enumerate(layouts)}
        self.names = {text: number for number, text in enumerate(names)}

    def values(self, attempt: int, rank: int, entry: StepEntry) -> tuple[Any, ...]:
        """Return one value for each of FIELDS."""
        kind, seq, name = self._place(attempt, rank, entry.segment)
        flags = PRESENT | (CLOSED if entry.closed else 0) | (PLANNED if entry.planned else 0) | kind
        flags |= CONTINUES if entry.continues else 0
        layout = self.layouts.setdefault(entry.layout, len(self.layouts))
        return (
            flags,
            entry.step,
            entry.block,
            layout,
            seq,
            self.names.setdefault(name, len(self.names)),
            entry.offset,
            entry.began,
            entry.time,
        )

    @staticmethod
    def _place(attempt: int, rank: int, key: str) -> tuple[int, int, str]:
        if not key:
            return _NO_SEGMENT, 0, ""
        if match := _SEGMENT_KEY.fullmatch(key):
            seq, life = int(match[1]), match[2]
            if seq <= _LARGEST and key == segment_key(worker_name(rank), attempt, seq, life):
                return _SEGMENT, seq, life
        elif match := _MANIFEST_KEY.fullmatch(key):
            seq = int(match[1])
            if seq <= _LARGEST and key == manifest_key(worker_name(rank), attempt, seq):
                return _ATTACHED, seq, ""
        return _OTHER, 0, key


@dataclass(frozen=True, eq=False)
class Columns:
    attempt: int
    mode: int
    mode_steps: Array  # ascending, as are the ranks
    ranks: Array
    cells: Mapping[str, Array]
    more: Mapping[str, Array]  # besides FIELDS: `row` and `column` of the cell
    layouts: tuple[str, ...] = ("",)
    names: tuple[str, ...] = ("",)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for arrays in (self.cells, self.more) for a in arrays.values())

    # -- entries -----------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {number: row for row, number in enumerate(self.mode_steps.tolist())}

    @cached_property
    def _columns(self) -> dict[int, int]:
        return {rank: column for column, rank in enumerate(self.ranks.tolist())}

    @cached_property
    def _more(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        cells = zip(self.more["row"].tolist(), self.more["column"].tolist(), strict=True)
        for at, cell in enumerate(cells):
            found.setdefault(cell, []).append(at)
        return found

    def blocks(self, mode_step: int, rank: int) -> Blocks:
        row, column = self._rows.get(mode_step), self._columns.get(rank)
        if row is None or column is None or not self.cells["flags"][row, column]:
            return ()
        first = self._entry(mode_step, rank, [self.cells[f][row, column].item() for f in FIELDS])
        return (first, *self._others(mode_step, rank, (row, column)))

    def _others(self, mode_step: int, rank: int, cell: tuple[int, int]) -> Iterator[StepEntry]:
        for at in self._more.get(cell, ()):
            yield self._entry(mode_step, rank, [self.more[f][at].item() for f in FIELDS])

    def step(self, mode_step: int) -> dict[int, Blocks]:
        """Return the blocks of a step by rank."""
        row = self._rows.get(mode_step)
        if row is None:
            return {}
        values = zip(*(self.cells[f][row].tolist() for f in FIELDS), strict=True)
        return {
            rank: (
                self._entry(mode_step, rank, cell),
                *self._others(mode_step, rank, (row, column)),
            )
            for column, (rank, cell) in enumerate(zip(self.ranks.tolist(), values, strict=True))
            if cell[0]
        }

    def of_rank(self, rank: int) -> Iterator[Blocks]:
        """Yield all blocks of a rank, in order of step."""
        column = self._columns.get(rank)
        if column is not None:
            for row in np.flatnonzero(self.cells["flags"][:, column]).tolist():
                yield self.blocks(int(self.mode_steps[row]), rank)

    def _entry(self, mode_step: int, rank: int, values: Any) -> StepEntry:
        flags, step, block, layout, seq, name, offset, began, time = values
        return StepEntry(
            self.mode,
            mode_step,
            step,
            block,
            bool(flags & CLOSED),
            self.layouts[layout],
            self._segment(flags & _KIND, rank, seq, self.names[name]),
            offset,
            began,
            time,
            bool(flags & PLANNED),
            bool(flags & CONTINUES),
        )

    def _segment(self, kind: int, rank: int, seq: int, name: str) -> str:
        if kind == _SEGMENT:
            return segment_key(worker_name(rank), self.attempt, seq, name)
        if kind == _ATTACHED:
            return manifest_key(worker_name(rank), self.attempt, seq)
        return name

    # -- steps -------------------------------------------------------------------------------

    def rows(self) -> list[StepRow]:
        """Return the row of each step, equal to `summarize_step` of its blocks."""
        flags = self.cells["flags"]
        present = flags & PRESENT != 0
        closed = flags & CLOSED != 0
        due = closed & (flags & PLANNED != 0)
        at = (self.more["row"], self.more["column"])
        later = self.more["flags"]
        np.logical_or.at(closed, at, later & CLOSED != 0)
        np.logical_or.at(due, at, (later & CLOSED != 0) & (later & PLANNED != 0))
        unclosed = present & ~closed
        planned = unclosed.any(axis=1) | due.any(axis=1)
        layouts = self._row_layouts(present)
        masks = _SpansOf(self.ranks)
        found = []
        for row, mode_step in enumerate(self.mode_steps.tolist()):
            step, numbers = self._numbers(row, present[row], masks)
            found.append(
                StepRow(
                    mode_step,
                    step,
                    masks(present[row]),
                    layouts[row],
                    masks(unclosed[row]),
                    bool(planned[row]),
                    numbers,
                )
            )
        return found

    def _numbers(
        self, row: int, present: Array, masks: _SpansOf
    ) -> tuple[int, tuple[tuple[int, Intervals], ...]]:
        steps = self.cells["step"][row]
        here = steps[present]
        first = int(here[0])
        if (here == first).all():
            return first, ()
        in_order = dict.fromkeys(here.tolist())
        return first, tuple((n, masks(present & (steps == n))) for n in in_order)

    def _row_layouts(self, present: Array) -> list[tuple[str, ...]]:
        ids = np.where(present, self.cells["layout"], 0)
        high = ids.max(axis=1)
        # The usual step: one layout on all its ranks, and no second block.
        alone = (np.where(present, ids, high[:, None]) == high[:, None]).all(axis=1)
        alone[self.more["row"]] = False
        texts: list[tuple[str, ...]] = []
        for row, single in enumerate(alone.tolist()):
            if single:
                used = {int(high[row])}
            else:
                used = set(np.unique(ids[row][present[row]]).tolist())
                used |= set(self.more["layout"][self.more["row"] == row].tolist())
            texts.append(tuple(sorted(self.layouts[i] for i in used if self.layouts[i])))
        return texts


class _SpansOf:
    """The ranks under a mask. The full and the empty one, which are most, cost nothing."""

    def __init__(self, ranks: Array) -> None:
        self._ranks = ranks
        self._all = to_intervals(ranks.tolist())

    def __call__(self, mask: Array) -> Intervals:
        if not mask.any():
            return ()
        return self._all if mask.all() else to_intervals(self._ranks[mask].tolist())
