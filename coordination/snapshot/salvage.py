"""Load a snapshot of which objects may be damaged, so that the next snapshot knows no less.

A reader of a snapshot with a damaged chunk reads the manifests of that chunk instead. So a merge must
not begin from nothing: layouts and other chunks may be all that is left of some objects. Everything
that can be read is kept. Attempts with a lost chunk or drop batch are read again from their manifests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from smdist.concurrency import bounded_gather
from smdist.coordination.snapshot.head import AttemptRow, Pointer, SnapshotHead
from smdist.coordination.snapshot.load import (
    load_columns,
    load_drops,
    load_head,
    load_layouts,
    view_of_head,
)
from smdist.coordination.view.run_view import View
from smdist.errors import CorruptObject, ObjectNotFound
from smdist.format.layout import Layout
from smdist.storage.store import Store

__all__ = ["ReadableSnapshot", "load_readable"]

T = TypeVar("T")

_CONCURRENCY = 16


@dataclass(frozen=True)
class ReadableSnapshot:
    """The readable part of a snapshot. `reread`: attempts whose manifests are to be read again."""

    head: SnapshotHead
    view: View
    layouts: Mapping[str, Layout]
    damaged: Mapping[str, str]  # key of an object -> why it cannot be read
    reread: frozenset[int]
    lost: View  # the ranks of these attempts as the head describes them

    def describe_damage(self) -> str:
        key, why = next(iter(self.damaged.items()))
        more = f" (and {len(self.damaged) - 1} more)" if len(self.damaged) > 1 else ""
        return f"{key}{more} of snapshot {self.head.number} is damaged: {why}"


async def load_readable(store: Store, pointer: Pointer) -> ReadableSnapshot:
    """Load the snapshot of `pointer` without its damaged objects. Raise if its head is damaged."""
    head = await load_head(store, pointer)
    damaged: dict[str, str] = {}

    async def load_all(load: Callable[[str], Awaitable[T]], keys: Iterable[str]) -> dict[str, T]:
        async def attempt(key: str) -> tuple[str, T] | None:
            try:
                return key, await load(key)
            except (ObjectNotFound, CorruptObject) as error:
                damaged[key] = str(error)
                return None

        return dict(
            found
            for found in await bounded_gather(attempt, keys, _CONCURRENCY)
            if found is not None
        )

    async def load_pack(key: str) -> dict[str, Layout]:
        return await load_layouts(
            store, msgspec.structs.replace(head, layouts={}, layout_packs=(key,))
        )

    columns = await load_all(
        lambda key: load_columns(store, key), [c.key for row in head.attempts for c in row.chunks]
    )
    drops = await load_all(
        lambda key: load_drops(store, key), [d.key for row in head.attempts for d in row.drops]
    )
    packs = await load_all(load_pack, head.layout_packs)
    inline = await load_layouts(store, msgspec.structs.replace(head, layout_packs=()))
    layouts = {digest: one for some in (*packs.values(), inline) for digest, one in some.items()}
    rows = tuple(_without_damaged(row, damaged) for row in head.attempts)
    view = view_of_head(
        msgspec.structs.replace(head, attempts=rows),
        lambda chunk: columns[chunk.ref.key],
        lambda batch: drops[batch.ref.key],
    )
    pairs = zip(head.attempts, rows, strict=True)
    reread = frozenset(whole.attempt for whole, row in pairs if row is not whole)
    lost = View({attempt: {} for attempt in reread})
    for attempt in reread:
        for rank, known in view.attempts[attempt].items():
            lost.attempts[attempt][rank] = known.copy()
            known.seen = known.records = ()
    return ReadableSnapshot(head, view, layouts, damaged, reread, lost)


def _without_damaged(row: AttemptRow, damaged: Mapping[str, str]) -> AttemptRow:
    chunks = tuple(ref for ref in row.chunks if ref.key not in damaged)
    drops = tuple(ref for ref in row.drops if ref.key not in damaged)
    if (len(chunks), len(drops)) == (len(row.chunks), len(row.drops)):
        return row
    return msgspec.structs.replace(row, chunks=chunks, drops=drops)
