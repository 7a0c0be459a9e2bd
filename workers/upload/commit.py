"""Into the store, batch by batch: layouts, segment, what was described, then the manifest.

The manifest is the commit point. Batches may be put side by side, their manifests only one after
the other, and a batch is acknowledged in the acknowledgement page after its manifest. So whenever the uploader
is killed, the store holds the manifests of batches 0..n and perhaps objects that no manifest
names; the next uploader asks the store (`resume_point`), removes those, and goes on behind n.

The last manifest that a killed uploader sent may arrive late: while its successor works. Which it can
be is known, n + 1: an uploader sends one after the answer to the one before. So

- segments of n + 1 are left alone until the successor's own manifest n + 1 is in the store;
- if the late one is there first, it counts, and the successor starts over behind it (`LateManifestFound`);
- where a server ignores conditions, it may replace the successor's: `verify_before_exit` puts that back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from smdist.errors import CorruptObject, ObjectExists, ObjectNotFound, StoreError, StoreForbidden
from smdist.format.inline_segment import can_embed, embed_segment
from smdist.format.manifest import (
    RankManifest,
    RankState,
    SamplingChanges,
    Session,
    layout_key,
    manifest_key,
    sampling_changes_key,
    segment_key,
)
from smdist.format.segment import mark_continued
from smdist.format.stored_json import decode, encode, read
from smdist.identity import worker_name
from smdist.storage.store import Buffer, HasUploads, Store
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.spool import UNKNOWN_ATTEMPT
from smdist.workers.upload.batch import Batch
from smdist.workers.upload.manifest_spans import take_back
from smdist.workers.upload.retry import ForeignObject, Retrier
from smdist.workers.upload.run_guard import RunCheck, RunGuard

__all__ = [
    "Committer",
    "Ending",
    "LateManifestFound",
    "ResumePoint",
    "resume_point",
    "sweep_dangling",
]

_CLOSE_S = 5.0
_SUFFIX = ".safetensors"


class LateManifestFound(ForeignObject):
    """A manifest that our predecessor sent has arrived. It counts: go on behind it."""


class Ending(NamedTuple):
    """What the last manifest of a rank says."""

    state: RankState
    reason: str


class ResumePoint(NamedTuple):
    """The next manifest gets `seq` and begins with journal record `upto`."""

    seq: int
    upto: int
    last: RankManifest | None


async def resume_point(store: Store, session: Session, *, tidy: bool = True) -> ResumePoint:
    """Where earlier uploaders of this session came to, by what the store holds.

    `tidy` False: there was none before, and so nothing of theirs to remove.
    """
    worker, attempt = worker_name(session.rank), session.attempt
    last: RankManifest | None = None
    for key in reversed(await store.list(f"manifests/{worker}/{attempt:06d}-")):
        try:
            last = await read(store, key, RankManifest)
        except CorruptObject:  # a power cut emptied it; the one before it counts
            await store.delete(key)
            continue
        break
    if last is None:
        point = ResumePoint(0, 0, None)
    elif last.session != session.session:
        raise ForeignObject(
            f"{store.url} has manifests of {worker}, attempt {attempt}, from another process "
            f"(session {last.session}); choose another out_dir, or resume=True"
        )
    else:
        point = ResumePoint(last.seq + 1, last.upto, last)
    if tidy:
        await _sweep(store, worker, attempt, point)
        await take_back(store, worker, attempt, point.seq)
    return point


async def _sweep(store: Store, worker: str, attempt: int, point: ResumePoint) -> None:
    """Remove segments that no manifest can name any more, and uploads that were never completed."""
    named = {entry.segment for entry in point.last.steps} if point.last is not None else set()
    first = segment_key(worker, attempt, max(point.seq - 1, 0), "")
    kept = segment_key(worker, attempt, point.seq, "").removesuffix(_SUFFIX)
    # Credentials may allow to write and not to remove: then it stays, and harms nobody.
    with contextlib.suppress(StoreForbidden):
        for key in await store.list(f"segments/{worker}/{attempt:06d}-", after=first):
            if key not in named and not key.startswith(kept):
                await store.delete(key)
    await _sweep_uploads(store, worker, attempt)


async def _sweep_uploads(store: Store, worker: str, attempt: int) -> None:
    if isinstance(store, HasUploads):
        # Segments mostly; a long manifest and the summary of a long session come in parts too.
        for folder in ("segments", "manifests", "spans", "summaries"):
            with contextlib.suppress(StoreForbidden):
                await store.sweep_uploads(f"{folder}/{worker}/{attempt:06d}")


async def sweep_dangling(store: Store, session: Session, retrier: Retrier) -> None:
    """After the last put: uploads of which the store is not sure that they ended."""
    if isinstance(store, HasUploads) and store.dangling_uploads:
        worker, attempt = worker_name(session.rank), session.attempt
        await retrier.run("tidying the store", lambda: _sweep_uploads(store, worker, attempt))


class Committer:
    """Owned by the uploader's loop. `launch` batches in order; `seq` is what the next one gets."""

    def __init__(
        self,
        store: Store,
        session: Session,
        ack_page: AckPage,
        retrier: Retrier,
        start: ResumePoint,
        attach_bytes: int = 0,
        note: Callable[[RankManifest], None] = lambda _manifest: None,
        *,
        succeeds: bool = False,
        guard: RunGuard | None = None,
    ) -> None:
        """`note` is told each manifest once it is in the store. `succeeds`: somebody was before us."""
        self.run_check = RunCheck(store, guard, retrier)
        self._note = note
        self._start, self._succeeds = start, succeeds
        self._overwritable = [start.last] if succeeds and start.last is not None else []
        self._own: set[str] = set()  # segments
        steps = start.last.steps if start.last is not None else ()
        self._begun = {(entry.mode, entry.mode_step) for entry in steps if not entry.closed}
        self.store, self._session = store, session
        self._attach_bytes = attach_bytes
        self.last_commit_at = float("-inf")  # monotonic
        self._ack_page, self._retrier = ack_page, retrier
        self._worker = worker_name(session.rank)
        self.seq = start.seq
        self._layouts: set[str] = set()  # in the store, or on their way in an earlier batch
        self._tasks: list[asyncio.Task[Batch]] = []
        self.bytes_in_flight = 0

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def launch(self, batch: Batch, ending: Ending | None, done: Callable[[], None]) -> None:
        """Put `batch` in the background and call `done`; `ending` makes its manifest the last."""
        assert batch.seq == self.seq
        self.seq += 1
        batch = batch._replace(segment=mark_continued(batch.segment, self._begun))
        self.bytes_in_flight += batch.news.nbytes
        self._own.add(batch.segment.key)
        layouts = {k: v for k, v in batch.segment.layouts.items() if k not in self._layouts}
        self._layouts.update(layouts)
        objects = {layout_key(key): layout.to_json() for key, layout in layouts.items()}
        self.run_check.needed.update(objects)
        before = self._tasks[-1] if self._tasks else None
        commit = self._commit(batch, objects, before, ending)
        task = asyncio.get_running_loop().create_task(commit)
        task.add_done_callback(lambda _task: done())
        self._tasks.append(task)

    def finished(self) -> list[Batch]:
        """Batches committed since the last call, in order. Raises what ended a commit."""
        done = []
        while self._tasks and self._tasks[0].done():
            batch = self._tasks.pop(0).result()
            self.bytes_in_flight -= batch.news.nbytes
            done.append(batch)
        return done

    async def close(self) -> None:
        """Give up what is on its way. A put that hangs in a dead file system is left to itself."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            for task in done:
                if not task.cancelled():
                    task.exception()  # retrieved, so that nobody complains of it

    async def _commit(
        self,
        batch: Batch,
        layouts: dict[str, bytes],
        before: asyncio.Task[Batch] | None,
        ending: Ending | None,
    ) -> Batch:
        removals = self.run_check.removals
        for key, data in layouts.items():
            await self._put(key, (data,))
        apart = not can_embed(batch.segment, self._attach_bytes)
        if batch.segment.chunks and apart:
            await self._put(batch.segment.key, batch.segment.chunks)
        if before is not None:
            await asyncio.wait([before])
            if before.cancelled() or before.exception() is not None:
                raise asyncio.CancelledError  # the owner meets the reason at `before`
        for described in batch.news.described:
            key, data = self._described(described.key, described.data)
            self.run_check.needed[key] = data
            await self._put(key, (data,))
        if ending is not None:  # what is found missing now can still be told in the run
            await self.run_check.run()
        manifest = self._manifest(batch, ending or Ending("active", ""))
        manifest = manifest if apart else embed_segment(manifest, batch.segment)
        await self._put_manifest(manifest)
        if self.run_check.due:
            await self.run_check.run()
        if self.run_check.removals != removals and batch.segment.chunks and apart:
            await self._put(batch.segment.key, batch.segment.chunks)
        self._note(manifest)
        closed = sum(entry.closed for entry in batch.segment.entries)
        self._ack_page.add_stored(batch.news.nbytes, closed)
        self._ack_page.acked = batch.news.upto
        self.last_commit_at = time.monotonic()
        if self._succeeds:
            await self._settle(manifest)
        return batch

    async def _settle(self, manifest: RankManifest) -> None:
        """Our own manifest is in the place of one that may still arrive: that one names nothing now."""
        since_start = manifest.seq - self._start.seq
        if since_start == 0:
            self._overwritable.append(manifest)
        if since_start <= 1:
            with contextlib.suppress(StoreError):  # `verify_before_exit` comes back to it
                await (self._restore() if since_start else self._remove_others())

    def _described(self, key: str, data: bytes) -> tuple[str, bytes]:
        """Fill in the attempt, which the hook did not know when it wrote this."""
        if key != sampling_changes_key(self._worker, UNKNOWN_ATTEMPT):
            return key, data
        attempt = self._session.attempt
        thinned = decode(data, SamplingChanges, key)
        key = sampling_changes_key(self._worker, attempt)
        return key, encode(msgspec.structs.replace(thinned, attempt=attempt), key)

    async def verify_before_exit(self) -> None:
        """Before the end: what a late request of a predecessor may have replaced is what we put."""
        await self.run_check.run()
        if self._succeeds:
            await self._retrier.run("reading the store", self._restore)
            await self._retrier.run("tidying the store", self._remove_others)

    async def _restore(self) -> None:
        for manifest in self._overwritable:
            key = manifest_key(self._worker, manifest.attempt, manifest.seq)
            try:
                found = await read(self.store, key, RankManifest)
            except (ObjectNotFound, CorruptObject):
                found = None
            except StoreForbidden:  # who may write and not read has to trust
                continue
            if found != manifest:
                await self.store.put(key, (encode(manifest, key),))

    async def _remove_others(self) -> None:
        """Every manifest from our first on is ours: no other segment there belongs to anything."""
        attempt, first = self._session.attempt, self._start.seq
        with contextlib.suppress(StoreForbidden):  # who may write and not remove leaves it there
            after = segment_key(self._worker, attempt, first, "")
            prefix = f"segments/{self._worker}/{attempt:06d}-"
            for key in await self.store.list(prefix, after=after):
                if key not in self._own:
                    await self.store.delete(key)

    async def _put(self, key: str, data: tuple[Buffer, ...]) -> None:
        await self._retrier.run("writing to the store", lambda: self.store.put(key, data))

    async def _put_manifest(self, manifest: RankManifest) -> None:
        key = manifest_key(self._worker, manifest.attempt, manifest.seq)
        data = encode(manifest, key)
        # Only in the place of our first can there be one: a predecessor's, or a stranger's. A condition
        # costs another request on servers that are not AWS.
        first = manifest.seq == self._start.seq

        async def put() -> None:
            try:
                await self.store.put(key, (data,), if_absent=first)
            except ObjectExists as error:
                # Ours, if the answer to an earlier try was lost.
                found = await self.store.get(key)
                if found != data:
                    raise self._not_ours(key, found) from error

        await self._retrier.run("writing to the store", put)

    def _not_ours(self, key: str, found: bytes) -> ForeignObject:
        text = f"{key} in {self.store.url} was written by another process"
        with contextlib.suppress(CorruptObject):
            manifest = decode(found, RankManifest, key)
            if manifest.session == self._session.session and self._succeeds:
                return LateManifestFound(text)
        return ForeignObject(text)

    def _manifest(self, batch: Batch, ending: Ending) -> RankManifest:
        session, news = self._session, batch.news
        return RankManifest(
            session=session.session,
            rank=session.rank,
            world_size=session.world_size,
            attempt=session.attempt,
            include_workers=session.include_workers,
            seq=batch.seq,
            first=news.first,
            upto=news.upto,
            state=ending.state,
            time=time.time(),
            steps=batch.segment.entries,
            dropped=news.dropped,
            troubles=(*news.troubles, *self.run_check.take_troubles()),
            reason=ending.reason,
        )
