"""Read snapshots from a store: the head, and the objects that it names.

Runs on the event loop that owns the store. Raises ObjectNotFound, CorruptObject, and the store's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from smdist.concurrency import bounded_gather
from smdist.coordination.columnar.chunk_file import content_digest, decode_columns
from smdist.coordination.columnar.chunks import Chunk, ChunkSet, Fetch
from smdist.coordination.columnar.columns import Columns
from smdist.coordination.columnar.drop_log import (
    DropBatch,
    DropLog,
    DropsByRank,
    StoredDrops,
    decode_drops,
)
from smdist.coordination.snapshot.head import Pointer, SnapshotHead, head_key, rank_view
from smdist.coordination.snapshot.layout_packs import read_pack
from smdist.coordination.view.run_view import View
from smdist.errors import CorruptObject
from smdist.format.layout import Layout
from smdist.format.manifest import FORMAT
from smdist.format.stored_json import read

if TYPE_CHECKING:
    from smdist.storage.store import Store

__all__ = [
    "LoadedSnapshot",
    "load_columns",
    "load_drops",
    "load_head",
    "load_layouts",
    "load_view",
    "view_of_head",
]

_AT_ONCE = 16  # requests


@dataclass(frozen=True)
class LoadedSnapshot:
    view: View
    layouts: Mapping[str, Layout]
    head: SnapshotHead


async def load_head(store: Store, pointer: Pointer) -> SnapshotHead:
    head = await read(store, pointer.head, SnapshotHead)
    if head.format > FORMAT:
        detail = f"written in format {head.format}, this smdist reads up to {FORMAT}"
        raise CorruptObject(store.url, pointer.head, "read", detail)
    return head


async def load_columns(store: Store, key: str) -> Columns:
    data = await store.get(key)
    try:
        if not key.endswith(f"-{content_digest(data)}.safetensors"):
            raise ValueError("the content is not what the name says")
        return decode_columns(data)
    except ValueError as error:
        raise CorruptObject(store.url, key, "read", str(error)) from error


async def load_drops(store: Store, key: str) -> DropsByRank:
    return decode_drops(await read(store, key, StoredDrops))


async def load_layouts(
    store: Store, head: SnapshotHead, known: Iterable[str] = ()
) -> dict[str, Layout]:
    """Read the layouts of a head in their order, without the packs that are `known` by key."""

    def unpacked(key: str, texts: Mapping[str, msgspec.Raw]) -> dict[str, Layout]:
        return {
            digest: Layout.from_json(memoryview(text), digest, key, store.url)
            for digest, text in texts.items()
        }

    async def load(key: str) -> dict[str, Layout]:
        return unpacked(key, await read_pack(store, key))

    packs = await bounded_gather(
        load, [k for k in head.layout_packs if k not in set(known)], _AT_ONCE
    )
    inline = unpacked(head_key(head.epoch, head.number, head.writer), head.layouts)
    return {digest: layout for some in (*packs, inline) for digest, layout in some.items()}


async def load_view(store: Store, pointer: Pointer) -> LoadedSnapshot:
    """Read the whole snapshot that `pointer` names; `pack` can continue from its view."""
    head = await load_head(store, pointer)
    keys = [ref.key for row in head.attempts for ref in row.chunks]
    loaded = await bounded_gather(partial(load_columns, store), keys, _AT_ONCE)
    columns = dict(zip(keys, loaded, strict=True))
    batches = [ref.key for row in head.attempts for ref in row.drops]
    contents = await bounded_gather(partial(load_drops, store), batches, _AT_ONCE)
    drops = dict(zip(batches, contents, strict=True))
    view = view_of_head(
        head, lambda chunk: columns[chunk.ref.key], lambda batch: drops[batch.ref.key]
    )
    return LoadedSnapshot(view, await load_layouts(store, head), head)


def view_of_head(
    head: SnapshotHead,
    fetch: Fetch,
    fetch_drops: Callable[[DropBatch], DropsByRank],
    known: Mapping[str, Chunk] | None = None,
) -> View:
    """Build the view of a head; `fetch` gets the columns of a chunk whenever they are needed.

    `known` are chunks of an earlier view by key, to be used again.
    """
    known = known or {}
    return View(
        {
            row.attempt: {rank.rank: rank_view(rank, head.texts) for rank in row.ranks}
            for row in head.attempts
        },
        {
            row.attempt: ChunkSet(
                known.get(ref.key) or Chunk(row.attempt, ref, None, fetch) for ref in row.chunks
            )
            for row in head.attempts
        },
        {
            row.attempt: DropLog(DropBatch(ref, None, fetch_drops) for ref in row.drops)
            for row in head.attempts
        },
    )
