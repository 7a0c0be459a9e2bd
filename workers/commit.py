"""Into the store, batch by batch: layouts, segment, what was described, then the manifest.

The manifest is the commit point. Batches may be put side by side, their manifests only one after
the other, and a batch is acknowledged in the ledger after its manifest. So whenever the uploader
is killed, the store holds the manifests of batches 0..n and perhaps objects that no manifest
names; the next uploader asks the store (`resume_point`), removes those, and goes on behind n.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from smdist.errors import ObjectExists, StoreForbidden
from smdist.identity import worker_name
from smdist.manifest import RankManifest, RankState, Session, layout_key, manifest_key, segment_key
from smdist.pipeline.attached import attach, attachable
from smdist.storage.base import Buffer, Store
from smdist.workers.batch import Batch
from smdist.workers.ledger import Ledger
from smdist.workers.patience import Conflict, Patience

__all__ = ["Committer", "Ending", "HasParts", "ResumePoint", "resume_point"]


_CLOSE_S = 5.0


class Ending(NamedTuple):
    """What the last manifest of a rank says."""

    state: RankState
    reason: str


class ResumePoint(NamedTuple):
    """The next manifest gets `seq` and begins with journal record `upto`."""

    seq: int
    upto: int
    last: RankManifest | None


async def resume_point(store: Store, session: Session) -> ResumePoint:
    """Where earlier uploaders of this session came to, by what the store holds."""
    worker, attempt = worker_name(session.rank), session.attempt
    last: RankManifest | None = None
    for key in reversed(await store.list(f"manifests/{worker}/{attempt:06d}-")):
        try:
            last = msgspec.json.decode(await store.get(key), type=RankManifest)
        except msgspec.DecodeError:  # a power cut emptied it; the one before it counts
            await store.delete(key)
            continue
        break
    if last is None:
        point = ResumePoint(0, 0, None)
    elif last.session != session.session:
        raise Conflict(
            f"{store.url} has manifests of {worker}, attempt {attempt}, from another process "
            f"(session {last.session}); choose another out_dir, or resume=True"
        )
    else:
        point = ResumePoint(last.seq + 1, last.upto, last)
    await _sweep(store, worker, attempt, point.seq)
    return point


async def _sweep(store: Store, worker: str, attempt: int, seq: int) -> None:
    """Remove segments that no manifest came to name, and uploads that were never completed."""
    prefix = f"segments/{worker}/{attempt:06d}-"
    # Credentials may allow to write and not to remove: then it stays, and harms nobody.
    with contextlib.suppress(StoreForbidden):
        for key in await store.list(prefix, after=segment_key(worker, attempt, seq, "")):
            await store.delete(key)
    if isinstance(store, HasUploads):
        # Segments mostly; a long manifest and the summary of a long session come in parts too.
        for folder in ("segments", "manifests", "summaries"):
            with contextlib.suppress(StoreForbidden):
                await store.sweep_uploads(f"{folder}/{worker}/{attempt:06d}")


@runtime_checkable
class HasUploads(Protocol):
    """A store in which a killed writer may leave uploads that no listing shows."""

    async def sweep_uploads(self, prefix: str) -> int: ...


@runtime_checkable
class HasParts(Protocol):
    """A store that puts large objects in parts; a put that takes long shows here that it goes on."""

    @property
    def parts_stored(self) -> int: ...


class Committer:
    """Owned by the uploader's loop. `launch` batches in order; `seq` is what the next one gets."""

    def __init__(
        self,
        store: Store,
        session: Session,
        ledger: Ledger,
        patience: Patience,
        seq: int,
        attach_bytes: int = 0,
        note: Callable[[RankManifest], None] = lambda _manifest: None,
    ) -> None:
        """`note` is told each manifest once it is in the store."""
        self._note = note
        self.store, self._session = store, session
        self._attach_bytes = attach_bytes
        self.last_commit_at = float("-inf")  # monotonic
        self._ledger, self._patience = ledger, patience
        self._worker = worker_name(session.rank)
        self.seq = seq
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
        self.bytes_in_flight += batch.news.nbytes
        layouts = {k: v for k, v in batch.segment.layouts.items() if k not in self._layouts}
        self._layouts.update(layouts)
        objects = [(layout_key(key), layout.to_json()) for key, layout in layouts.items()]
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
        layouts: list[tuple[str, bytes]],
        before: asyncio.Task[Batch] | None,
        ending: Ending | None,
    ) -> Batch:
        for key, data in layouts:
            await self._put(key, (data,))
        apart = not attachable(batch.segment, self._attach_bytes)
        if batch.segment.chunks and apart:
            await self._put(batch.segment.key, batch.segment.chunks)
        if before is not None:
            await asyncio.wait([before])
            if before.cancelled() or before.exception() is not None:
                raise asyncio.CancelledError  # the owner meets the reason at `before`
        for described in batch.news.described:
            await self._put(described.key, (described.data,))
        manifest = self._manifest(batch, ending or Ending("active", ""))
        manifest = manifest if apart else attach(manifest, batch.segment)
        await self._put_manifest(manifest)
        self._note(manifest)
        closed = sum(entry.closed for entry in batch.segment.entries)
        self._ledger.add_stored(batch.segment.nbytes, closed)
        self._ledger.acked = batch.news.upto
        self.last_commit_at = time.monotonic()
        return batch

    async def _put(self, key: str, data: tuple[Buffer, ...]) -> None:
        await self._patience.insist("writing to the store", lambda: self.store.put(key, data))

    async def _put_manifest(self, manifest: RankManifest) -> None:
        key = manifest_key(self._worker, manifest.attempt, manifest.seq)
        data = msgspec.json.encode(manifest)

        async def put() -> None:
            try:
                await self.store.put(key, (data,), if_absent=True)
            except ObjectExists as error:
                # Ours, if the answer to an earlier try was lost.
                if await self.store.get(key) != data:
                    raise Conflict(
                        f"{key} in {self.store.url} was written by another process"
                    ) from error

        await self._patience.insist("writing to the store", put)

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
            troubles=news.troubles,
            reason=ending.reason,
        )
