"""Merged snapshots of a run, as a trial reads them.

The pointer and a head are read on the event loop that owns the store. Columns are fetched when an
entry in them is asked for, in the thread that asks, and kept up to a limit: they never change.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock

import msgspec

from smdist.coordination.columns import Columns
from smdist.coordination.merge import View
from smdist.coordination.sealed import Chunk, ChunkRef
from smdist.coordination.snapshot import (
    POINTER_KEY,
    Pointer,
    load_columns,
    load_head,
    view_of,
)
from smdist.errors import CorruptObject, ObjectNotFound
from smdist.layout import Layout
from smdist.storage.base import Store
from smdist.trials.reader import Run

__all__ = ["Snapshot", "Snapshots"]

_FRESH_INTERVALS, _FRESH_MARGIN_S = 3.0, 1.0


@dataclass(frozen=True)
class Snapshot:
    pointer: Pointer
    view: View
    layouts: Mapping[str, Layout]

    def fresh(self, now: float) -> bool:
        """Its writer is at work, so what it does not say was not there a moment ago."""
        age = now - self.pointer.time
        return age <= _FRESH_INTERVALS * self.pointer.interval_s + _FRESH_MARGIN_S


@dataclass
class Snapshots:
    store: Store
    run: Run
    cache_bytes: int = 256 << 20
    concurrency: int = 16
    troubles: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._current: Snapshot | None = None
        self._chunks: dict[str, Chunk] = {}
        self._columns: OrderedDict[str, Columns] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()

    async def newest(self) -> Snapshot | None:
        """The snapshot that the pointer names; the one before if that cannot be read."""
        pointer = await self._pointer()
        if pointer is None:
            return self._current
        current = self._current
        if current is not None and current.pointer.head == pointer.head:
            self._current = Snapshot(pointer, current.view, current.layouts)
        elif current is None or _order(pointer) > _order(current.pointer):
            self._current = await self._load(pointer) or current
        return self._current

    async def _pointer(self) -> Pointer | None:
        try:
            return msgspec.json.decode(await self.store.get(POINTER_KEY), type=Pointer)
        except ObjectNotFound:
            return None
        except msgspec.DecodeError as error:
            self.troubles[POINTER_KEY] = f"{POINTER_KEY} was passed over: {error}"
            return None

    async def _load(self, pointer: Pointer) -> Snapshot | None:
        try:
            head = await load_head(self.store, pointer)
        except (ObjectNotFound, CorruptObject) as error:
            # The manifests say the same.
            self.troubles[pointer.head] = f"{pointer.head} was passed over: {error}"
            return None
        view = view_of(head, self.columns, self._chunks)
        self._chunks = {
            chunk.ref.key: chunk for sealed in view.sealed.values() for chunk in sealed.chunks
        }
        return Snapshot(pointer, view, head.layouts)

    # -- columns -----------------------------------------------------------------------------

    def columns(self, ref: ChunkRef) -> Columns:
        kept = self._kept(ref.key)
        return kept if kept is not None else self.run(self._fetch(ref))

    def warm(self, refs: Iterable[ChunkRef]) -> None:
        """Fetch several at once, so that `columns` finds them."""
        absent = [ref for ref in refs if self._kept(ref.key) is None]
        if absent:
            self.run(self._fetch_all(absent))

    async def _fetch_all(self, refs: list[ChunkRef]) -> None:
        gate = asyncio.Semaphore(self.concurrency)

        async def fetch(ref: ChunkRef) -> None:
            async with gate:
                await self._fetch(ref)

        tasks = [asyncio.ensure_future(fetch(ref)) for ref in refs]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _fetch(self, ref: ChunkRef) -> Columns:
        columns = await load_columns(self.store, ref)
        with self._lock:
            if ref.key not in self._columns:
                self._columns[ref.key] = columns
                self._nbytes += columns.nbytes
            while self._nbytes > self.cache_bytes and len(self._columns) > 1:
                _, old = self._columns.popitem(last=False)
                self._nbytes -= old.nbytes
        return columns

    def _kept(self, key: str) -> Columns | None:
        with self._lock:
            columns = self._columns.get(key)
            if columns is not None:
                self._columns.move_to_end(key)
            return columns


def _order(pointer: Pointer) -> tuple[int, int]:
    return (pointer.epoch, pointer.number)
