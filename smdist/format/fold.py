"""Fold journal records into blocks. Pure; called by the uploader.

A range of records `[first, upto)` gives at most one block per step, named by the ordinal of the
step's first record in the range. A reader joins the blocks of a step in the order of their names, and
later tensors replace earlier ones. The result does not depend on where the journal was cut.
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

_StepRecord = Union[Part, Inline, Close, Drop]  # noqa: UP007 (3.10)


class Source(msgspec.Struct, frozen=True):
    """Where the bytes of a part are, and which of its tensors are used.

    `tensors` omits those that a later part of the block replaces. Inline parts have their bytes in
    `data` and `arena` -1.
    """

    kind: Declare
    tensors: tuple[TensorSpec, ...]
    arena: int
    offset: int
    guard: int
    data: bytes


class Block(msgspec.Struct, frozen=True):
    """The content of one range of the journal for one step; without sources it only closes the step."""

    ref: StepRef
    block: int
    closed: bool
    planned: bool
    began: float
    time: float
    sources: tuple[Source, ...]


class FoldedRecords(msgspec.Struct, frozen=True):
    """The content of the records `[first, upto)`. `nbytes`: what their parts occupy in buffers.

    `described` has the newest entry of each key. `flush`: the training thread waits for room.
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
    """Builds one block."""

    __slots__ = ("block", "closed", "opening", "parts", "planned", "time")

    def __init__(self, opening: _StepRecord, block: int) -> None:
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


class _Collector:
    """Collects the content of a range, record by record."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int, int], _Step] = {}
        self.dropped: list[Dropped] = []
        self.troubles: list[str] = []
        self.described: dict[str, Describe] = {}
        self.end: End | None = None
        self.flush = False
        self.nbytes = 0

    def add_to_step(self, ordinal: int, record: _StepRecord, kind: Declare | None) -> None:
        # The global number is part of the key: wrong numbers are shown to the user, not corrected.
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
            raise ValueError(f"journal record {ordinal} has no declaration")
        else:
            step.parts.append((kind, record))
            self.nbytes += kind.nbytes

    def add_other(self, record: Declare | Describe | Trouble | Flush | End) -> None:
        if isinstance(record, Trouble):
            self.troubles.append(record.message)
        elif isinstance(record, Describe):
            self.described[record.key] = record
        elif isinstance(record, Flush):
            self.flush = True
        elif isinstance(record, End):
            self.end = record


def fold(pieces: Sequence[Piece]) -> FoldedRecords:
    """Return the blocks and other content of consecutive records (at least one)."""
    collector = _Collector()
    for ordinal, record, kind in pieces:
        if isinstance(record, (Part, Inline, Close, Drop)):
            collector.add_to_step(ordinal, record, kind)
        else:
            collector.add_other(record)
    steps = collector.steps.values()
    return FoldedRecords(
        first=pieces[0].ordinal,
        upto=pieces[-1].ordinal + 1,
        blocks=tuple(step.finish() for step in steps if step.parts or step.closed),
        dropped=tuple(collector.dropped),
        troubles=tuple(collector.troubles),
        described=tuple(collector.described.values()),
        end=collector.end,
        flush=collector.flush,
        nbytes=collector.nbytes,
    )
