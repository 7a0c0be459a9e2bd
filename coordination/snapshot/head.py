"""The head of a snapshot: everything but the blocks, as JSON.

Ranks with all that is known of them, chunks with what each of their steps is over all ranks, and
layouts. What people and jobs repeat (names of dropped tensors, reasons) is in `texts` once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import msgspec

from smdist.coordination.drop_log import DropRef, DropRow, Texts, drop_row, dropped_of
from smdist.coordination.merge import Head as RankHead
from smdist.coordination.merge import RankView, World
from smdist.coordination.sealed import ChunkRef
from smdist.coordination.spans import Spans
from smdist.manifest import FORMAT, Heartbeat, Session, StepEntry

__all__ = [
    "POINTER_KEY",
    "AttemptRow",
    "Head",
    "Pointer",
    "RankRow",
    "head_key",
    "rank_row",
    "rank_view",
]

POINTER_KEY = "merged/current.json"


class Pointer(msgspec.Struct, frozen=True):
    """`interval_s`: the next one is to be expected after that long. `final`: there will be none."""

    epoch: int
    number: int
    head: str
    time: float
    interval_s: float
    final: bool


class RankRow(msgspec.Struct, frozen=True, array_like=True):
    """A `RankView`; of its steps and drops only those that are in no chunk or batch."""

    rank: int
    session: Optional[Session]  # noqa: UP045 (3.10)
    heartbeat: Optional[Heartbeat]  # noqa: UP045
    head: Optional[RankHead]  # noqa: UP045
    worlds: tuple[World, ...]
    passed: tuple[tuple[int, int], ...]
    closed_at: float
    drops: tuple[DropRow, ...]
    troubles: tuple[tuple[int, int, str], ...]
    seen: Spans
    loose: tuple[StepEntry, ...]
    first: Optional[tuple[int, float]] = None  # noqa: UP045


class AttemptRow(msgspec.Struct, frozen=True):
    attempt: int
    ranks: tuple[RankRow, ...]
    chunks: tuple[ChunkRef, ...]
    drops: tuple[DropRef, ...] = ()


class Head(msgspec.Struct, frozen=True):
    """`layouts` by digest; more of them are in the objects `layout_packs`."""

    run_id: str
    epoch: int
    number: int
    writer: str
    time: float
    interval_s: float
    final: bool
    attempts: tuple[AttemptRow, ...]
    texts: tuple[tuple[str, ...], ...]
    layouts: dict[str, msgspec.Raw]
    layout_packs: tuple[str, ...]
    format: int = FORMAT


def head_key(epoch: int, number: int, writer: str) -> str:
    return f"merged/heads/{epoch:06d}-{number:010d}-{writer}.json"


def rank_row(rank: int, known: RankView, texts: Texts) -> RankRow:
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
    )
    for entry in row.loose:
        key = (entry.mode, entry.mode_step)
        known.steps[key] = (*known.steps.get(key, ()), entry)
    for drop in row.drops:
        key = (drop.mode, drop.mode_step)
        known.drops[key] = known.drops.get(key, frozenset()) | {dropped_of(drop, texts)}
    return known
