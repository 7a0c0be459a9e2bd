"""A session in one object, for readers who come after its end.

`note` is told every manifest that this process has put; `write`, once the last one is in the store,
puts them together, with those of earlier uploaders read back. Nobody needs the summary, so nothing
waits for it and nothing fails for it; a session too long for one object gets none.
"""

from __future__ import annotations

import asyncio

import msgspec

from smdist.identity import worker_name
from smdist.manifest import RankManifest, Session, manifest_key, summary_key
from smdist.pipeline.attached import settle
from smdist.storage.base import Store

__all__ = ["Summary"]

_MOST_BYTES = 32 << 20
_MOST_ATTACHED = 1 << 20  # numbers that come with it; beyond that they are read where they are
_AT_ONCE = 16


class Summary:
    """Used on one event loop."""

    def __init__(self, session: Session) -> None:
        self._session, self._worker = session, worker_name(session.rank)
        self._told: dict[int, bytes] = {}  # by seq, as JSON: entries by the thousand are small so
        self._attached = self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """About how long it is."""
        return self._nbytes

    def note(self, manifest: RankManifest) -> None:
        if self._nbytes > _MOST_BYTES:
            return
        self._attached += len(manifest.attached)
        data = self._encode(manifest)
        self._told[manifest.seq] = data
        self._nbytes += len(data)
        if self._nbytes > _MOST_BYTES:
            self._told.clear()

    async def write(self, store: Store, count: int) -> None:
        """`count`: how many manifests the session has."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def fetch(seq: int) -> None:
            async with gate:
                key = manifest_key(self._worker, self._session.attempt, seq)
                self.note(msgspec.json.decode(await store.get(key), type=RankManifest))

        if self._nbytes <= _MOST_BYTES:
            absent = [seq for seq in range(count) if seq not in self._told]
            tasks = [asyncio.ensure_future(fetch(seq)) for seq in absent]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        if self._nbytes > _MOST_BYTES:
            return
        if self._attached > _MOST_ATTACHED:
            self._told = {
                seq: self._encode(msgspec.json.decode(data, type=RankManifest))
                for seq, data in self._told.items()
            }
        told = [msgspec.Raw(self._told[seq]) for seq in range(count)]
        data = msgspec.json.encode({"session": self._session, "manifests": told})
        await store.put(summary_key(self._worker, self._session.attempt), (data,))

    async def exists(self, store: Store) -> bool:
        key = summary_key(self._worker, self._session.attempt)
        return key in await store.list(key)

    def _encode(self, manifest: RankManifest) -> bytes:
        if self._attached > _MOST_ATTACHED:
            key = manifest_key(self._worker, manifest.attempt, manifest.seq)
            manifest = settle(key, manifest).manifest
        return msgspec.json.encode(manifest)
