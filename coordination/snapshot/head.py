"""The head of a snapshot: everything but the blocks, as JSON.

Ranks with all that is known of them, chunks with what each of their steps is over all ranks, and
layouts. What people and jobs repeat (names of dropped tensors, reasons) is in `texts` once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import msgspec

from smdist.coordination.columnar.chunks import ChunkRef
from smdist.coordination.columnar.drop_log import (
    DropRef,
    DropRow,
    TextTable,
    check_texts,
    drop_of_row,
    drop_row,
)
from smdist.coordination.view.run_view import RankHead, RankView, World
from smdist.format.intervals import (
    StoredIntervals,
    check_intervals,
    count_members,
    merge_intervals,
    subtract,
    to_intervals,
)
from smdist.format.manifest import FORMAT, Heartbeat, Session, StepEntry
from smdist.limits import (
    MAX_CELLS,
    MAX_STEPS,
    MergedKey,
    Mode,
    Number,
    Rank,
    Seconds,
    Time,
    check_total,
)

__all__ = [
    "POINTER_KEY",
    "AttemptRow",
    "Pointer",
    "RankRow",
    "SnapshotHead",
    "head_key",
    "rank_row",
    "rank_view",
]

POINTER_KEY = "merged/current.json"


class Pointer(msgspec.Struct, frozen=True):
    """`interval_s`: the next one is to be expected after that long. `final`: there will be none."""

    epoch: Number
    number: Number
    head: MergedKey
    time: Time
    interval_s: Seconds
    final: bool


class RankRow(msgspec.Struct, frozen=True, array_like=True):
    """A `RankView`; of its steps and drops only those that are in no chunk or batch."""

    rank: Rank
    session: Optional[Session]  # noqa: UP045 (3.10)
    heartbeat: Optional[Heartbeat]  # noqa: UP045
    head: Optional[RankHead]  # noqa: UP045
    worlds: tuple[World, ...]
    passed: tuple[tuple[Mode, Number], ...]
    closed_at: Time
    drops: tuple[DropRow, ...]
    troubles: tuple[tuple[Number, Number, str], ...]
    seen: StoredIntervals
    loose: tuple[StepEntry, ...]
    first: Optional[tuple[Number, Time]] = None  # noqa: UP045
    records: StoredIntervals = ()


class AttemptRow(msgspec.Struct, frozen=True):
    attempt: Number
    ranks: tuple[RankRow, ...]
    chunks: tuple[ChunkRef, ...]
    drops: tuple[DropRef, ...] = ()

    def check(self, texts: Sequence[tuple[str, ...]]) -> None:
        """Raise ValueError if smdist cannot have written this."""
        refs: tuple[ChunkRef | DropRef, ...] = (*self.chunks, *self.drops)
        for row in self.ranks:
            check_intervals(row.seen)
            check_intervals(row.records)
            check_texts(row.drops, texts)
        for ref in refs:
            ref.check()
        named = {run.ranks for ref in refs for run in ref.runs}
        known = to_intervals(row.rank for row in self.ranks)
        strange = subtract(merge_intervals(span for spans in named for span in spans), known)
        if strange:
            raise ValueError(f"rank {strange[0][0]} of attempt {self.attempt} has steps and no row")


class SnapshotHead(msgspec.Struct, frozen=True):
    """`layouts` by digest; more of them are in the objects `layout_packs`."""

    run_id: str
    epoch: Number
    number: Number
    writer: str
    time: Time
    interval_s: Seconds
    final: bool
    attempts: tuple[AttemptRow, ...]
    texts: tuple[tuple[str, ...], ...]
    layouts: dict[str, msgspec.Raw]
    layout_packs: tuple[MergedKey, ...]
    format: Number = FORMAT

    def check(self) -> None:
        """Raise ValueError if smdist cannot have written this."""
        for row in self.attempts:
            row.check(self.texts)
        chunks = [ref for row in self.attempts for ref in row.chunks]
        drops = [ref for row in self.attempts for ref in row.drops]
        saved = (run.count for ref in chunks for run in ref.runs)
        check_total("steps in this snapshot", saved, MAX_STEPS)
        dropped = (run.count * count_members(run.ranks) for ref in drops for run in ref.runs)
        check_total("dropped steps of ranks in this snapshot", dropped, MAX_CELLS)


def head_key(epoch: int, number: int, writer: str) -> str:
    return f"merged/heads/{epoch:06d}-{number:010d}-{writer}.json"


def rank_row(rank: int, known: RankView, texts: TextTable) -> RankRow:
    drops = sorted(
        (drop for drops in known.drops.values() for drop in drops), key=msgspec.msgpack.encode
    )
    return RankRow(
        rank,
        known.session,
        known.heartbeat,
        known.head,
        tuple(sorted(known.worlds, key=msgspec.msgpack.encode)),
        tuple(sorted(known.passed.items())),
        known.closed_at,
        tuple(drop_row(drop, texts) for drop in drops),
        tuple(sorted(known.troubles)),
        known.seen,
        tuple(entry for _, blocks in sorted(known.steps.items()) for entry in blocks),
        known.first,
        known.records,
    )


def rank_view(row: RankRow, texts: Sequence[tuple[str, ...]]) -> RankView:
    known = RankView(
        row.session,
        row.heartbeat,
        row.head,
        frozenset(row.worlds),
        {},
        dict(row.passed),
        row.closed_at,
        {},
        frozenset(row.troubles),
        row.seen,
        row.first,
        row.records,
    )
    for entry in row.loose:
        key = (entry.mode, entry.mode_step)
        known.steps[key] = (*known.steps.get(key, ()), entry)
    for drop in row.drops:
        key = (drop.mode, drop.mode_step)
        known.drops[key] = known.drops.get(key, frozenset()) | {drop_of_row(drop, texts)}
    return known
