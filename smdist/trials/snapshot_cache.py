"""Merged snapshots of a run, as a trial reads them.

The pointer and a head are read on the event loop that owns the store. Columns are fetched when an
entry in them is asked for, in the thread that asks, and kept up to a limit: they never change.
A coordinator removes what it has replaced, but not at once. A trial that has pinned a snapshot for
longer finds the same blocks in the chunks that took the place of its own. What is gone for good, or
makes no sense, is put together again from the manifests of the ranks, and `troubles` says so.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock

from smdist.concurrency import bounded_gather
from smdist.coordination.columnar.blocks import Blocks
from smdist.coordination.columnar.building import empty_columns, extend_columns
from smdist.coordination.columnar.chunks import Chunk
from smdist.coordination.columnar.columns import Columns
from smdist.coordination.columnar.drop_log import Drop, DropBatch, DropsByRank
from smdist.coordination.service.leadership import ClaimId, LeaseRecord
from smdist.coordination.snapshot.head import POINTER_KEY, Pointer, SnapshotHead
from smdist.coordination.snapshot.load import (
    load_columns,
    load_drops,
    load_head,
    load_layouts,
    view_of_head,
)
from smdist.coordination.view.run_view import View, add
from smdist.errors import CorruptObject, ObjectNotFound, StoreError
from smdist.format.inline_segment import extract_segment
from smdist.format.intervals import Members, merge_intervals
from smdist.format.layout import Layout
from smdist.format.manifest import RankManifest
from smdist.format.session_checks import check_session_id
from smdist.format.stored_json import read
from smdist.identity import worker_name
from smdist.storage.store import Store
from smdist.trials.freshness import PointerObservation, WriterState, fresh_for_s, writer_state
from smdist.trials.segment_reader import CoroutineRunner

__all__ = ["Snapshot", "SnapshotCache"]

_UNPACKED = 3  # columns in memory are about that much larger than stored


@dataclass(frozen=True)
class Snapshot:
    pointer: Pointer
    writer: str
    view: View
    layouts: Mapping[str, Layout]

    @property
    def lease_key(self) -> str:
        return ClaimId(self.pointer.epoch, self.writer).lease_key


@dataclass
class SnapshotCache:
    store: Store
    run: CoroutineRunner
    cache_bytes: int = 256 << 20
    concurrency: int = 16
    troubles: dict[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._current: Snapshot | None = None
        self._observation = PointerObservation()
        self._chunks: dict[str, Chunk] = {}
        self._packs: tuple[str, ...] = ()
        self._drops: dict[str, DropsByRank] = {}
        self._columns: OrderedDict[str, Columns] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()
        self._rereading = ManifestFallback(
            self.store, self._session, self.troubles, self.concurrency
        )

    async def newest(self, run_id: str) -> Snapshot | None:
        """Return the snapshot that the pointer names; the one before if that cannot be read.

        One of another run is none: its folder was used before.
        """
        pointer = await self._pointer()
        if pointer is None:
            return self._current
        current = self._current
        if current is not None and current.pointer.head == pointer.head:
            self._current = replace(current, pointer=pointer)
        elif current is None or _order(pointer) > _order(current.pointer):
            self._current = await self._load(pointer, run_id) or current
        if self._current is not None and self._current.pointer == pointer:
            self._observation.saw(pointer, self.clock(), time.time())
        return self._current

    def _session(self, attempt: int, rank: int) -> str:
        return self._current.view.session(attempt, rank) if self._current is not None else ""

    async def _pointer(self) -> Pointer | None:
        try:
            return await read(self.store, POINTER_KEY, Pointer)
        except ObjectNotFound:
            return None
        except CorruptObject as error:
            self.troubles[POINTER_KEY] = f"{POINTER_KEY} was ignored: {error}"
            return None

    async def _load(self, pointer: Pointer, run_id: str) -> Snapshot | None:
        try:
            head = await load_head(self.store, pointer)
            if head.run_id != run_id:
                raise CorruptObject(self.store.url, pointer.head, "read", "it is of another run")
            layouts = await load_layouts(self.store, head, self._packs)
        except (ObjectNotFound, CorruptObject) as error:
            # The manifests say the same.
            self.troubles[pointer.head] = f"{pointer.head} was ignored: {error}"
            return None
        view = view_of_head(head, self.columns, self.drops, self._chunks)
        self._chunks = {
            chunk.ref.key: chunk for sealed in view.sealed.values() for chunk in sealed.chunks
        }
        if self._current is not None:
            layouts = {**self._current.layouts, **layouts}
        self._packs = head.layout_packs
        return Snapshot(pointer, head.writer, view, layouts)

    async def writer_state(self, snapshot: Snapshot) -> WriterState:
        """Return whether the writer of a snapshot still works."""
        pointer, age_s = snapshot.pointer, self._observation.age_s(self.clock())
        if not pointer.interval_s:  # whoever wrote it did not stay
            return "gone"
        if age_s <= fresh_for_s(pointer):
            return "live"
        try:
            lease = await read(self.store, snapshot.lease_key, LeaseRecord)
        except ObjectNotFound:
            lease = None
        except CorruptObject as error:
            self.troubles[error.key] = f"{error.key} was ignored: {error}"
            lease = None
        return writer_state(pointer, age_s, lease, time.time())

    # -- columns -----------------------------------------------------------------------------

    def columns(self, chunk: Chunk) -> Columns:
        kept = self._kept(chunk.ref.key)
        return kept if kept is not None else self.run(self._fetch(chunk))

    def drops(self, batch: DropBatch) -> DropsByRank:
        key = batch.ref.key
        if key not in self._drops:
            self._drops[key] = self.run(self._fetch_drops(batch))
        return self._drops[key]

    async def _fetch_drops(self, batch: DropBatch) -> DropsByRank:
        try:
            return await load_drops(self.store, batch.ref.key)
        except (ObjectNotFound, CorruptObject) as error:
            self._did_without(batch.ref.key, error)
            return await self._rereading.drops(batch)

    def warm(self, chunks: Iterable[Chunk]) -> None:
        """Fetch several at once, so that `columns` finds them; as many as are kept."""
        absent, room = [], self.cache_bytes
        for chunk in chunks:
            room -= _UNPACKED * chunk.ref.nbytes
            if room < 0:
                break
            if self._kept(chunk.ref.key) is None:
                absent.append(chunk)
        if absent:
            self.run(bounded_gather(self._fetch, absent, self.concurrency))

    async def _fetch(self, chunk: Chunk) -> Columns:
        key = chunk.ref.key
        try:
            columns = await load_columns(self.store, key)
        except (ObjectNotFound, CorruptObject) as error:
            columns = await self._instead(chunk, error)
        with self._lock:
            if key not in self._columns:
                self._columns[key] = columns
                self._nbytes += columns.nbytes
            while self._nbytes > self.cache_bytes and len(self._columns) > 1:
                _, old = self._columns.popitem(last=False)
                self._nbytes -= old.nbytes
        return columns

    async def _instead(self, chunk: Chunk, error: StoreError) -> Columns:
        try:
            found = await self._successor(chunk)
        except (ObjectNotFound, CorruptObject):
            found = None
        if found is not None and _has_all(found, chunk):
            return found  # in the course of things
        self._did_without(chunk.ref.key, error)
        found = await self._rereading.columns(chunk)
        if not _has_all(found, chunk):
            self.troubles[chunk.ref.key] += "; nor is all of it in the manifests"
        return found

    def _did_without(self, key: str, error: StoreError) -> None:
        self.troubles[key] = f"{key} was ignored, the manifests were read instead: {error}"

    async def _successor(self, gone: Chunk) -> Columns | None:
        """Read the steps of a removed chunk from the chunks that the newest snapshot names."""
        pointer = await self._pointer()
        if pointer is None:
            return None
        head = await load_head(self.store, pointer)
        news: dict[int, dict[int, Blocks]] = {}
        for chunk in _overlapping(head, gone):
            columns = await load_columns(self.store, chunk.ref.key)
            for mode_step in gone.rows.keys() & chunk.rows.keys():
                # What has come since is not in the snapshot that was pinned.
                known = Members(gone.rows[mode_step].ranks)
                step = columns.step(mode_step)
                news[mode_step] = {r: blocks for r, blocks in step.items() if r in known}
        return extend_columns(empty_columns(gone.attempt, gone.ref.mode), news)

    def _kept(self, key: str) -> Columns | None:
        with self._lock:
            columns = self._columns.get(key)
            if columns is not None:
                self._columns.move_to_end(key)
            return columns


def _order(pointer: Pointer) -> tuple[int, int]:
    return (pointer.epoch, pointer.number)


def _has_all(columns: Columns, chunk: Chunk) -> bool:
    return all(
        columns.step(mode_step).keys() >= set(Members(row.ranks))
        for mode_step, row in chunk.rows.items()
    )


def _overlapping(head: SnapshotHead, gone: Chunk) -> list[Chunk]:
    return [
        chunk
        for row in head.attempts
        if row.attempt == gone.attempt
        for chunk in (Chunk(row.attempt, ref, None) for ref in row.chunks)
        if gone.first <= chunk.last and chunk.first <= gone.last
    ]


class ManifestFallback:
    """On the event loop that owns the store."""

    def __init__(
        self,
        store: Store,
        session: Callable[[int, int], str],
        troubles: dict[str, str],
        concurrency: int = 16,
    ) -> None:
        """`session` of an attempt and a rank; `troubles` is told of manifests that are damaged."""
        self._store, self._concurrency = store, concurrency
        self._session, self._troubles = session, troubles
        self._view = View()
        self._read: set[str] = set()
        self._lock = asyncio.Lock()

    async def columns(self, chunk: Chunk) -> Columns:
        """Build the columns of a chunk, as far as there are manifests."""
        wanted = {step: Members(row.ranks) for step, row in chunk.rows.items()}
        spans = {span for ranks in wanted.values() for span in ranks.intervals}
        await self._load(chunk.attempt, Members(merge_intervals(spans)))
        news: dict[int, dict[int, Blocks]] = {}
        for mode_step, ranks in wanted.items():
            key = (chunk.ref.mode, mode_step)
            for rank in ranks:
                known = self._view.rank(chunk.attempt, rank)
                blocks = () if known is None else known.steps.get(key, ())
                if blocks:
                    news.setdefault(mode_step, {})[rank] = blocks
        return extend_columns(empty_columns(chunk.attempt, chunk.ref.mode), news)

    async def drops(self, batch: DropBatch) -> DropsByRank:
        attempt = int(batch.ref.key.rsplit("-", 2)[1])
        wanted = [
            (key, rank)
            for run in batch.ref.runs
            for key, _ in run.steps()
            for rank in Members(run.ranks)
        ]
        await self._load(attempt, {rank for _, rank in wanted})
        found: dict[int, set[Drop]] = {}
        for key, rank in wanted:
            known = self._view.rank(attempt, rank)
            if known is not None and key in known.drops:
                found.setdefault(rank, set()).update(known.drops[key])
        return {rank: tuple(drops) for rank, drops in found.items()}

    async def _load(self, attempt: int, ranks: Iterable[int]) -> None:
        prefixes = [f"manifests/{worker_name(rank)}/{attempt:06d}-" for rank in sorted(ranks)]
        async with self._lock:
            listed = await bounded_gather(self._store.list, prefixes, self._concurrency)
            fresh = [key for keys in listed for key in keys if key not in self._read]
            await bounded_gather(self._manifest, fresh, self._concurrency)

    async def _manifest(self, key: str) -> None:
        try:
            manifest = await read(self._store, key, RankManifest)
            session = self._session(manifest.attempt, manifest.rank)
            check_session_id(manifest, session, key, self._store.url)
        except (ObjectNotFound, CorruptObject) as error:
            self._troubles[key] = f"{key} was ignored: {error}"
            return
        add(self._view, extract_segment(key, manifest).manifest)
        self._read.add(key)
