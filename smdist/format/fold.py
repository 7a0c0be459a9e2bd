"""Fold journal records into blocks.

A range of records `[first, upto)` gives at most one block per step, named by the ordinal of the
step's first record in the range. Wherever the journal is cut, a reader that joins the blocks of a
step in the order of their names, later tensors replacing earlier ones, finds the same tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

import msgspec

from smdist.format.journal_records import (
    Close,
    Declare,
    Describe,
    Drop,
    End,
    Flush,
    Inline,
    Part,
    Piece,
    TensorSpec,
    Trouble,
)
from smdist.format.manifest import Dropped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smdist.identity import StepRef

__all__ = ["Block", "FoldedRecords", "Source", "fold"]

OfStep = Union[Part, Inline, Close, Drop]  # noqa: UP007 (3.10)


class Source(msgspec.Struct, frozen=True):
    """Where the bytes of a part are, and which of its tensors count.

    `tensors` leaves out those that a later part of the block recorded again. Inline parts have
    their bytes in `data` and `arena` -1.
    """

    kind: Declare
    tensors: tuple[TensorSpec, ...]
    arena: int
    offset: int
    guard: int
    data: bytes


class Block(msgspec.Struct, frozen=True):
    """What one range of the journal holds of one step; without sources it only says "closed"."""

    ref: StepRef
    block: int
    closed: bool
    planned: bool
    began: float
    time: float
    sources: tuple[Source, ...]


class FoldedRecords(msgspec.Struct, frozen=True):
    """Everything in the records `[first, upto)`. `nbytes` is what their parts occupy in buffers.

    `described` has one entry per key, the newest. `flush`: the training thread waits for room.
    """

    first: int
    upto: int
    blocks: tuple[Block, ...]
    dropped: tuple[Dropped, ...]
    troubles: tuple[str, ...]
    described: tuple[Describe, ...]
    end: End | None
    flush: bool
    nbytes: int


class _Step:
    """A block in the making."""

    __slots__ = ("block", "closed", "opening", "parts", "planned", "time")

    def __init__(self, opening: OfStep, block: int) -> None:
        self.opening, self.block, self.time = opening, block, opening.time
        self.closed = self.planned = False
        self.parts: list[tuple[Declare, Part | Inline]] = []

    def finish(self) -> Block:
        last = {
            spec.name: (index, spec)
            for index, (kind, _) in enumerate(self.parts)
            for spec in kind.tensors
        }
        sources = []
        for index, (kind, part) in enumerate(self.parts):
            tensors = tuple(spec for spec in kind.tensors if last[spec.name] == (index, spec))
            if isinstance(part, Inline):
                sources.append(Source(kind, tensors, -1, 0, 0, part.data))
            else:
                place = (part.arena, part.offset, part.guard)
                sources.append(Source(kind, tensors, *place, b""))
        return Block(
            ref=self.opening.ref,
            block=self.block,
            closed=self.closed,
            planned=self.planned or not self.closed,
            began=self.opening.time,
            time=self.time,
            sources=tuple(source for source in sources if source.tensors),
        )


class _News:
    """What a range says, in the making."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int, int], _Step] = {}
        self.dropped: list[Dropped] = []
        self.troubles: list[str] = []
        self.described: dict[str, Describe] = {}
        self.end: End | None = None
        self.flush = False
        self.nbytes = 0

    def of_step(self, ordinal: int, record: OfStep, kind: Declare | None) -> None:
        # The global number belongs to the key: ranks that number wrongly are shown, not mended.
        key = (record.mode, record.mode_step, record.step)
        step = self.steps.get(key)
        if step is None:
            step = self.steps[key] = _Step(record, ordinal)
        step.time = max(step.time, record.time)
        if isinstance(record, Close):
            step.closed = True
            step.planned |= record.planned
        elif isinstance(record, Drop):
            what = (record.names, record.nbytes, record.reason)
            for i in range(record.steps):
                mode_step = record.mode_step + i * record.mode_stride
                step_number = record.step + i * record.stride
                self.dropped.append(Dropped(record.mode, mode_step, step_number, *what))
        elif kind is None:
            raise ValueError(f"record {ordinal} of the journal was never declared")
        else:
            step.parts.append((kind, record))
            self.nbytes += kind.nbytes

    def other(self, record: Declare | Describe | Trouble | Flush | End) -> None:
        if isinstance(record, Trouble):
            self.troubles.append(record.message)
        elif isinstance(record, Describe):
            self.described[record.key] = record
        elif isinstance(record, Flush):
            self.flush = True
        elif isinstance(record, End):
            self.end = record


def fold(pieces: Sequence[Piece]) -> FoldedRecords:
    """The blocks and the news of consecutive records, at least one."""
    news = _News()
    for ordinal, record, kind in pieces:
        if isinstance(record, (Part, Inline, Close, Drop)):
            news.of_step(ordinal, record, kind)
        else:
            news.other(record)
    steps = news.steps.values()
    return FoldedRecords(
        first=pieces[0].ordinal,
        upto=pieces[-1].ordinal + 1,
        blocks=tuple(step.finish() for step in steps if step.parts or step.closed),
        dropped=tuple(news.dropped),
        troubles=tuple(news.troubles),
        described=tuple(news.described.values()),
        end=news.end,
        flush=news.flush,
        nbytes=news.nbytes,
    )
