"""A view as objects of a store, so that a reader of a thousand ranks needs a handful of requests.

    merged/current.json                            Pointer   overwritten: which snapshot is the newest
    merged/heads/<epoch>-<number>-<writer>.json    Head      ranks, steps, which chunks; immutable
    merged/steps/<...>-<digest>.safetensors        a range of steps of all ranks; immutable
    merged/layouts/<digest>.json                   layouts that the head has no room for; immutable
    merged/drops/<...>-<digest>.json               drops that the head has no room for; immutable

`pack` is pure. Who writes puts the objects, then the head, then the pointer; `previous` is the last
`Packed` of which all that was put. Its `view` holds the facts of the view it was given, and is to
be added to from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from smdist.coordination.blocks import Blocks, StepKey
from smdist.coordination.chunk_file import from_bytes, to_bytes
from smdist.coordination.columns import Columns, fits
from smdist.coordination.drop_log import (
    NO_DROPS,
    Content,
    Drop,
    DropBatch,
    DropLog,
    Texts,
    from_json,
    made_batch,
)
from smdist.coordination.head import (
    POINTER_KEY,
    AttemptRow,
    Head,
    Pointer,
    head_key,
    rank_row,
    rank_view,
)
from smdist.coordination.layout_packs import pack_layouts, unpack_layouts
from smdist.coordination.membership import PATIENCE, Patience
from smdist.coordination.merge import RankView, View
from smdist.coordination.sealed import NOTHING, Chunk, Fetch, Sealed, seal
from smdist.errors import CorruptObject
from smdist.layout import Layout
from smdist.manifest import FORMAT

if TYPE_CHECKING:
    from smdist.storage.base import Buffer, Store

__all__ = [
    "POINTER_KEY",
    "Head",
    "Loaded",
    "Packed",
    "Pointer",
    "head_key",
    "load_columns",
    "load_drops",
    "load_head",
    "load_layouts",
    "load_view",
    "pack",
    "together",
    "view_of",
]

A = TypeVar("A")
T = TypeVar("T")

_MOST_DROPS = 4096  # in a head


@dataclass(frozen=True)
class Packed:
    """`objects` are to be put before the head, the pointer after it."""

    objects: tuple[tuple[str, Buffer], ...]
    head_key: str
    head: bytes
    pointer: Pointer
    view: View
    chunks: frozenset[str] = frozenset()  # keys of all chunks that the head names
    replaced: tuple[str, ...] = ()  # keys of chunks that the one before names and this one does not
    layout_packs: tuple[str, ...] = ()
    layout_texts: Mapping[str, bytes] = field(default_factory=dict)
    drops: frozenset[str] = frozenset()  # keys of the batches of drops


@dataclass(frozen=True)
class Loaded:
    view: View
    layouts: Mapping[str, Layout]
    head: Head


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
    """The snapshot `(epoch, number)` of `view`. Costs as much as what is new since `previous`.

    It holds facts, no judgements of time: `patience` is with who reads it, and changes nothing here.
    """
    stored = previous.chunks if previous is not None else frozenset()
    name = f"{epoch:06d}-{number:010d}-{writer}"
    whole, made = _sealed(view, f"merged/steps/{name}")
    batches = _log_drops(whole, f"merged/drops/{name}")
    described = pack_layouts(
        layouts,
        previous.layout_texts if previous is not None else {},
        previous.layout_packs if previous is not None else (),
    )
    texts = Texts()
    rows = tuple(
        AttemptRow(
            attempt,
            tuple(rank_row(rank, known, texts) for rank, known in sorted(ranks.items())),
            tuple(chunk.ref for chunk in whole.sealed.get(attempt, NOTHING).chunks),
            tuple(batch.ref for batch in whole.drop_logs.get(attempt, NO_DROPS).batches),
        )
        for attempt, ranks in sorted(whole.attempts.items())
    )
    head = Head(
        run_id,
        epoch,
        number,
        writer,
        now,
        interval_s,
        final,
        rows,
        tuple(texts),
        described.inline,
        described.keys,
    )
    chunks = frozenset(ref.key for row in rows for ref in row.chunks)
    key = head_key(epoch, number, writer)
    return Packed(
        (
            *described.objects,
            *_unlogged(whole, batches, previous.drops if previous is not None else frozenset()),
            *_unstored(whole, made, stored),
        ),
        key,
        msgspec.json.encode(head),
        Pointer(epoch, number, key, now, interval_s, final),
        whole,
        chunks,
        tuple(sorted(stored - chunks)),
        described.keys,
        described.texts,
        frozenset(ref.key for row in rows for ref in row.drops),
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
    return View(attempts, sealed, dict(view.drop_logs)), made


def _log_drops(view: View, prefix: str) -> dict[str, bytes]:
    """Move the drops of the ranks into the log of `view`, our own, if they are many."""
    made: dict[str, bytes] = {}
    for attempt, ranks in view.attempts.items():
        if sum(len(known.drops) for known in ranks.values()) <= _MOST_DROPS:
            continue
        content: dict[int, tuple[Drop, ...]] = {}
        for rank, known in ranks.items():
            if known.drops:
                content[rank] = tuple(d for drops in known.drops.values() for d in drops)
                known.drops = {}
        batch, data = made_batch(attempt, content, prefix)
        made[batch.ref.key] = data
        log = view.drop_logs.get(attempt, NO_DROPS)
        view.drop_logs[attempt] = DropLog((*log.batches, batch))
    return made


def _unlogged(
    view: View, made: Mapping[str, bytes], stored: frozenset[str]
) -> Iterator[tuple[str, Buffer]]:
    for attempt, log in view.drop_logs.items():
        for batch in log.batches:
            key = batch.ref.key
            if key in made:
                yield key, made[key]
            elif key not in stored and not batch.stored:
                prefix = key[: key.rindex(f"-{attempt:06d}-")]
                yield key, made_batch(attempt, batch.content, prefix)[1]


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


# -- reading ---------------------------------------------------------------------------------


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


async def load_drops(store: Store, key: str) -> Content:
    data = await store.get(key)
    try:
        return from_json(data)
    except ValueError as error:
        raise CorruptObject(store.url, key, "read", str(error)) from error


async def load_layouts(store: Store, head: Head, known: Iterable[str] = ()) -> dict[str, Layout]:
    """The layouts of a head, in their order. Packs that are `known`, by key, are left out."""

    async def load(key: str) -> dict[str, msgspec.Raw]:
        data = await store.get(key)
        try:
            return unpack_layouts(data)
        except msgspec.DecodeError as error:
            raise CorruptObject(store.url, key, "read", str(error)) from error

    packs = await together(load, [key for key in head.layout_packs if key not in set(known)])
    return {
        digest: msgspec.json.decode(text, type=Layout)
        for texts in (*packs, head.layouts)
        for digest, text in texts.items()
    }


async def load_view(store: Store, pointer: Pointer) -> Loaded:
    """The snapshot that `pointer` names, whole: `pack` goes on from its view."""
    head = await load_head(store, pointer)
    keys = [ref.key for row in head.attempts for ref in row.chunks]
    loaded = await together(partial(load_columns, store), keys)
    columns = dict(zip(keys, loaded, strict=True))
    batches = [ref.key for row in head.attempts for ref in row.drops]
    drops = dict(zip(batches, await together(partial(load_drops, store), batches), strict=True))
    view = view_of(head, lambda chunk: columns[chunk.ref.key], lambda batch: drops[batch.ref.key])
    return Loaded(view, await load_layouts(store, head), head)


def view_of(
    head: Head,
    fetch: Fetch,
    fetch_drops: Callable[[DropBatch], Content],
    known: Mapping[str, Chunk] | None = None,
) -> View:
    """The view of a head; `fetch` is asked for the columns of a chunk whenever they are needed.

    `known` are chunks of an earlier view by key, to be used again.
    """
    known = known or {}
    return View(
        {
            row.attempt: {rank.rank: rank_view(rank, head.texts) for rank in row.ranks}
            for row in head.attempts
        },
        {
            row.attempt: Sealed(
                known.get(ref.key) or Chunk(row.attempt, ref, None, fetch) for ref in row.chunks
            )
            for row in head.attempts
        },
        {
            row.attempt: DropLog(DropBatch(ref, None, fetch_drops) for ref in row.drops)
            for row in head.attempts
        },
    )


async def together(
    call: Callable[[A], Awaitable[T]], items: Iterable[A], concurrency: int = 16
) -> list[T]:
    """`call` of every item, some at a time, results in order; the first error ends the rest."""
    gate = asyncio.Semaphore(concurrency)

    async def guarded(item: A) -> T:
        async with gate:
            return await call(item)

    tasks = [asyncio.ensure_future(guarded(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
