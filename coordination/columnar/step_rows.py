"""What a step of an attempt is over all ranks, without its blocks, and runs of such steps.

A `StepRow` is enough for every question about steps. Rows of a usual job repeat themselves with a
stride, so a thousand of them are one `StepRun`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from smdist.coordination.columnar.blocks import Blocks
from smdist.format.intervals import (
    Intervals,
    RankIntervals,
    check_intervals,
    count_members,
    merge_intervals,
    subtract,
    to_intervals,
)
from smdist.limits import Digest, Number, Stride, check_progression

__all__ = ["StepRow", "StepRun", "compress_rows", "expand_runs", "summarize_step"]


class StepRow(NamedTuple):
    """One step over all ranks.

    `step` is the global number of the lowest rank; `numbers` lists all numbers with their ranks if
    they differ. `ranks` have stored something of it, `open` of them have not closed it. `planned` is
    false if every rank closed it and nothing was due on any.
    """

    mode_step: int
    step: int
    ranks: Intervals
    layouts: tuple[str, ...]
    open: Intervals = ()
    planned: bool = True
    numbers: tuple[tuple[int, Intervals], ...] = ()


class StepRun(msgspec.Struct, frozen=True, array_like=True):
    """`count` rows; `mode_step` and `step` of each are that much more than those of the last."""

    mode_step: Number
    mode_stride: Number
    step: Number
    step_stride: Stride
    count: Number
    ranks: RankIntervals
    layouts: tuple[Digest, ...]
    open: RankIntervals = ()
    planned: bool = True
    numbers: tuple[tuple[Number, RankIntervals], ...] = ()

    def check(self) -> None:
        """Raise ValueError if smdist cannot have written this."""
        check_progression(self.mode_step, self.mode_stride, self.count)
        check_progression(self.step, self.step_stride, self.count)
        for spans in (self.ranks, self.open, *(spans for _, spans in self.numbers)):
            check_intervals(spans)
        if not self.ranks or subtract(merge_intervals((*self.open, *self._numbered)), self.ranks):
            raise ValueError(f"step {self.mode_step} is of ranks that it has nothing of")

    @property
    def cells(self) -> int:
        return self.count * count_members(self.ranks)

    @property
    def last(self) -> int:
        return self.mode_step + (self.count - 1) * self.mode_stride

    @property
    def _numbered(self) -> Intervals:
        return tuple(span for _, spans in self.numbers for span in spans)

    def mode_steps(self) -> range:
        return range(self.mode_step, self.last + 1, self.mode_stride or 1)

    def global_steps(self) -> Iterator[int]:
        return (self.step + i * self.step_stride for i in range(self.count))

    def row(self, mode_step: int) -> StepRow:
        """Return the row of one of `mode_steps()`."""
        place = (mode_step - self.mode_step) // (self.mode_stride or 1)
        step = self.step + place * self.step_stride
        return StepRow(
            mode_step, step, self.ranks, self.layouts, self.open, self.planned, self.numbers
        )

    def rows(self) -> Iterator[StepRow]:
        return map(self.row, self.mode_steps())


def expand_runs(runs: Iterable[StepRun]) -> Iterator[StepRow]:
    for run in runs:
        yield from run.rows()


def compress_rows(rows: Sequence[StepRow]) -> tuple[StepRun, ...]:
    found: list[StepRun] = []
    begin = 0
    while begin < len(rows):
        end, strides = _run_end(rows, begin)
        first = rows[begin]
        found.append(
            StepRun(first.mode_step, strides[0], first.step, strides[1], end - begin, *first[2:])
        )
        begin = end
    return tuple(found)


def _run_end(rows: Sequence[StepRow], begin: int) -> tuple[int, tuple[int, int]]:
    first, end, strides = rows[begin], begin + 1, (0, 0)
    if first.numbers:
        return end, strides
    while end < len(rows) and rows[end][2:] == first[2:]:
        before = rows[end - 1]
        found = (rows[end].mode_step - before.mode_step, rows[end].step - before.step)
        if end > begin + 1 and found != strides:
            break
        strides = found
        end += 1
    return end, strides


def summarize_step(mode_step: int, blocks: Mapping[int, Blocks]) -> StepRow:
    """Return the row of a step with these blocks, of at least one rank."""
    numbers: dict[int, list[int]] = {}
    layouts: set[str] = set()
    unclosed: list[int] = []
    planned = False
    for rank in sorted(blocks):
        of_rank = blocks[rank]
        numbers.setdefault(of_rank[0].step, []).append(rank)
        layouts.update(entry.layout for entry in of_rank if entry.layout)
        closings = [entry.planned for entry in of_rank if entry.closed]
        planned = planned or not closings or any(closings)
        if not closings:
            unclosed.append(rank)
    return StepRow(
        mode_step,
        next(iter(numbers)),
        to_intervals(blocks),
        tuple(sorted(layouts)),
        to_intervals(unclosed),
        planned,
        tuple((n, to_intervals(r)) for n, r in numbers.items()) if len(numbers) > 1 else (),
    )
