"""A view as objects of a store, so that a reader of a thousand ranks needs a handful of requests.

    merged/current.json                            Pointer   overwritten: which snapshot is the newest
    merged/heads/<epoch>-<number>-<writer>.json    Head      ranks, steps, which chunks; immutable
    merged/steps/<...>-<digest>.safetensors        a range of steps of all ranks; immutable

`pack` is pure. Who writes puts the objects, then the head, then the pointer; `previous` is the last
`Packed` of which all that was put. Its `view` holds the facts of the view it was given, and is to
be added to from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import msgspec

from smdist.coordination.membership import PATIENCE, Patience
from smdist.coordination.merge import Head as RankHead
from smdist.coordination.merge import RankView, View, World
from smdist.coordination.spans import Spans
from smdist.errors import CorruptObject
from smdist.layout import Layout
from smdist.manifest import FORMAT, Dropped, Heartbeat, Session, StepEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smdist.storage.base import Buffer, Store

__all__ = ["POINTER_KEY", "Head", "Loaded", "Packed", "Pointer", "head_key", "load_view", "pack"]

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
    """A `RankView`; of its steps only those that are in no chunk."""

    rank: int
    session: Optional[Session]  # noqa: UP045 (3.10)
    heartbeat: Optional[Heartbeat]  # noqa: UP045
    head: Optional[RankHead]  # noqa: UP045
    worlds: tuple[World, ...]
    passed: tuple[tuple[int, int], ...]
    closed_at: float
    drops: tuple[tuple[int, int, Dropped], ...]
    troubles: tuple[tuple[int, int, str], ...]
    seen: Spans
    loose: tuple[StepEntry, ...]


class AttemptRow(msgspec.Struct, frozen=True):
    attempt: int
    ranks: tuple[RankRow, ...]


class Head(msgspec.Struct, frozen=True):
    run_id: str
    epoch: int
    number: int
    writer: str
    time: float
    interval_s: float
    final: bool
    attempts: tuple[AttemptRow, ...]
    layouts: dict[str, Layout]
    format: int = FORMAT


@dataclass(frozen=True)
class Packed:
    """`objects` are to be put before the head, the pointer after it."""

    objects: tuple[tuple[str, Buffer], ...]
    head_key: str
    head: bytes
    pointer: Pointer
    view: View


@dataclass(frozen=True)
class Loaded:
    view: View
    layouts: Mapping[str, Layout]
    head: Head


def head_key(epoch: int, number: int, writer: str) -> str:
    return f"merged/heads/{epoch:06d}-{number:010d}-{writer}.json"


def pack(
    view: View,
    previous: Packed | None,
    *,
    run_id: str,
    epoch: int,
    number: int,
    writer: str,
    now: float,
    interval_s: float,
    final: bool,
    layouts: Mapping[str, Layout],
    patience: Patience = PATIENCE,
) -> Packed:
    rows = tuple(
        AttemptRow(attempt, tuple(_row(rank, known) for rank, known in sorted(ranks.items())))
        for attempt, ranks in sorted(view.attempts.items())
    )
    head = Head(
        run_id, epoch, number, writer, now, interval_s, final, rows, dict(sorted(layouts.items()))
    )
    key = head_key(epoch, number, writer)
    pointer = Pointer(epoch, number, key, now, interval_s, final)
    return Packed((), key, msgspec.json.encode(head), pointer, view)


async def load_view(store: Store, pointer: Pointer) -> Loaded:
    """The snapshot that `pointer` names, whole."""
    data = await store.get(pointer.head)
    try:
        head = msgspec.json.decode(data, type=Head)
    except msgspec.DecodeError as error:
        raise CorruptObject(store.url, pointer.head, "read", str(error)) from error
    attempts = {
        row.attempt: {rank.rank: _known(rank) for rank in row.ranks} for row in head.attempts
    }
    return Loaded(View(attempts), head.layouts, head)


def _row(rank: int, known: RankView) -> RankRow:
    return RankRow(
        rank,
        known.session,
        known.heartbeat,
        known.head,
        tuple(sorted(known.worlds, key=msgspec.msgpack.encode)),
        tuple(sorted(known.passed.items())),
        known.closed_at,
        tuple(sorted((drop for drops in known.drops.values() for drop in drops), key=_drop_order)),
        tuple(sorted(known.troubles)),
        known.seen,
        tuple(entry for _, blocks in sorted(known.steps.items()) for entry in blocks),
    )


def _drop_order(drop: tuple[int, int, Dropped]) -> bytes:
    return msgspec.msgpack.encode(drop)


def _known(row: RankRow) -> RankView:
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
    )
    for entry in row.loose:
        key = (entry.mode, entry.mode_step)
        known.steps[key] = (*known.steps.get(key, ()), entry)
    for drop in row.drops:
        key = (drop[2].mode, drop[2].mode_step)
        known.drops[key] = known.drops.get(key, frozenset()) | {drop}
    return known
