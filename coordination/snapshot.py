"""A view as objects of a store, so that a reader of a thousand ranks needs a handful of requests.

    merged/current.json                            Pointer   overwritten: which snapshot is the newest
    merged/heads/<epoch>-<number>-<writer>.json    Head      ranks, steps, which chunks; immutable
    merged/steps/<...>-<digest>.safetensors        a range of steps of all ranks; immutable

`pack` is pure. Who writes puts the objects, then the head, then the pointer; `previous` is the last
`Packed` of which all that was put. Its `view` holds the facts of the view it was given, and is to
be added to from then on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import msgspec

from smdist.coordination.blocks import Blocks, StepKey
from smdist.coordination.chunk_file import from_bytes, to_bytes
from smdist.coordination.columns import fits
from smdist.coordination.membership import PATIENCE, Patience
from smdist.coordination.merge import Head as RankHead
from smdist.coordination.merge import RankView, View, World
from smdist.coordination.sealed import NOTHING, Chunk, ChunkRef, Fetch, Sealed, seal
from smdist.coordination.spans import Spans
from smdist.errors import CorruptObject
from smdist.layout import Layout
from smdist.manifest import FORMAT, Dropped, Heartbeat, Session, StepEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smdist.coordination.columns import Columns
    from smdist.storage.base import Buffer, Store

__all__ = [
    "POINTER_KEY",
    "Head",
    "Loaded",
    "Packed",
    "Pointer",
    "head_key",
    "load_columns",
    "load_head",
    "load_view",
    "pack",
    "view_of",
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
    chunks: tuple[ChunkRef, ...]


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
    chunks: frozenset[str] = frozenset()  # keys of all that the head names
    replaced: tuple[str, ...] = ()  # keys that the one before names and this one does not


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
    prefix = f"merged/steps/{epoch:06d}-{number:010d}-{writer}"
    stored = previous.chunks if previous is not None else frozenset()
    whole, made = _sealed(view, prefix)
    rows = tuple(
        AttemptRow(
            attempt,
            tuple(_row(rank, known) for rank, known in sorted(ranks.items())),
            tuple(chunk.ref for chunk in whole.sealed.get(attempt, NOTHING).chunks),
        )
        for attempt, ranks in sorted(whole.attempts.items())
    )
    head = Head(
        run_id, epoch, number, writer, now, interval_s, final, rows, dict(sorted(layouts.items()))
    )
    chunks = frozenset(ref.key for row in rows for ref in row.chunks)
    key = head_key(epoch, number, writer)
    return Packed(
        tuple(_unstored(whole, made, stored)),
        key,
        msgspec.json.encode(head),
        Pointer(epoch, number, key, now, interval_s, final),
        whole,
        chunks,
        tuple(sorted(stored - chunks)),
    )


def _sealed(view: View, prefix: str) -> tuple[View, dict[str, bytes]]:
    """`view` with its steps in chunks, and the chunks that were made for it.

    Left out are numbers that no job counts to: an array cannot hold them, the head can.
    """
    attempts: dict[int, dict[int, RankView]] = {}
    sealed: dict[int, Sealed] = {}
    made: dict[str, bytes] = {}
    for attempt, ranks in view.attempts.items():
        recent: dict[StepKey, dict[int, Blocks]] = {}
        bare = attempts[attempt] = {rank: known.without_steps() for rank, known in ranks.items()}
        for rank, known in ranks.items():
            for key, blocks in known.steps.items():
                if all(map(fits, blocks)):
                    recent.setdefault(key, {})[rank] = blocks
                else:
                    bare[rank].steps[key] = blocks
        done = seal(attempt, view.sealed.get(attempt, NOTHING), recent, prefix)
        sealed[attempt] = done.sealed
        made |= {chunk.ref.key: data for chunk, data in done.made}
    return View(attempts, sealed), made


def _unstored(
    view: View, made: Mapping[str, bytes], stored: frozenset[str]
) -> Iterator[tuple[str, Buffer]]:
    """Chunks that are in no snapshot yet: new ones, and those of a snapshot that was never put."""
    for sealed in view.sealed.values():
        for chunk in sealed.chunks:
            key = chunk.ref.key
            if key in made:
                yield key, made[key]
            elif key not in stored and not chunk.stored:
                yield key, to_bytes(chunk.columns)


async def load_head(store: Store, pointer: Pointer) -> Head:
    data = await store.get(pointer.head)
    try:
        head = msgspec.json.decode(data, type=Head)
    except msgspec.DecodeError as error:
        raise CorruptObject(store.url, pointer.head, "read", str(error)) from error
    if head.format > FORMAT:
        detail = f"written in format {head.format}, this smdist reads up to {FORMAT}"
        raise CorruptObject(store.url, pointer.head, "read", detail)
    return head


async def load_columns(store: Store, key: str) -> Columns:
    data = await store.get(key)
    try:
        return from_bytes(data)
    except ValueError as error:
        raise CorruptObject(store.url, key, "read", str(error)) from error


async def load_view(store: Store, pointer: Pointer, *, concurrency: int = 16) -> Loaded:
    """The snapshot that `pointer` names, whole: `pack` goes on from its view."""
    head = await load_head(store, pointer)
    gate = asyncio.Semaphore(concurrency)
    columns: dict[str, Columns] = {}

    async def load(key: str) -> None:
        async with gate:
            columns[key] = await load_columns(store, key)

    tasks = [asyncio.ensure_future(load(ref.key)) for row in head.attempts for ref in row.chunks]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return Loaded(view_of(head, lambda chunk: columns[chunk.ref.key]), head.layouts, head)


def view_of(head: Head, fetch: Fetch, known: Mapping[str, Chunk] | None = None) -> View:
    """The view of a head; `fetch` is asked for the columns of a chunk whenever they are needed.

    `known` are chunks of an earlier view by key, to be used again.
    """
    known = known or {}
    return View(
        {row.attempt: {rank.rank: _known(rank) for rank in row.ranks} for row in head.attempts},
        {
            row.attempt: Sealed(
                known.get(ref.key) or Chunk(row.attempt, ref, None, fetch) for ref in row.chunks
            )
            for row in head.attempts
        },
    )


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
