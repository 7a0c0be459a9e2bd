"""What a session's manifests say in fewer objects: spans while it runs, a summary after its end.

`note` is told every manifest that this process has put. `span` puts the last of them together, as
often as `smdist.coordination.rolling` says; `write`, once the last one is in the store, all of them,
with those of earlier uploaders read back. Nobody needs either, so nothing waits for them and nothing
fails for them; what is too long for one object is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from smdist.coordination.rolling import LENGTHS, due
from smdist.identity import worker_name
from smdist.manifest import RankManifest, Session, manifest_key, span_key, summary_key
from smdist.pipeline.attached import settle
from smdist.storage.base import Store

__all__ = ["Made", "Summary"]

_MOST_BYTES = 32 << 20
_MOST_SPAN_BYTES = 8 << 20
_MOST_ATTACHED = 1 << 20  # numbers that come with it; beyond that they are read where they are
_AT_ONCE = 16


class Made(NamedTuple):
    key: str
    data: bytes


class Summary:
    """Used on one event loop."""

    def __init__(self, session: Session) -> None:
        self._session, self._worker = session, worker_name(session.rank)
        self._told: dict[int, bytes] = {}  # by seq, as JSON: entries by the thousand are small so
        self._carrying: dict[int, int] = {}  # of these, what is attached to them, in bytes
        self._attached = self._nbytes = 0  # of all, so far
        self._kept = 0  # bytes in `_told`
        self._long = False

    @property
    def nbytes(self) -> int:
        """About how long it is."""
        return self._nbytes

    @property
    def too_long(self) -> bool:
        """Not all manifests are known any more: there will be no summary."""
        return self._long

    def note(self, manifest: RankManifest) -> None:
        if manifest.seq % LENGTHS[-1] == 0 and sum(self._carrying.values()) > _MOST_ATTACHED:
            self._settle(list(self._carrying))
        self._attached += len(manifest.attached)
        if manifest.attached:
            self._carrying[manifest.seq] = len(manifest.attached)
        self._keep(manifest.seq, msgspec.json.encode(manifest))
        if self._nbytes > _MOST_BYTES:
            self._long = True
        while self._long and self._kept > _MOST_SPAN_BYTES:
            self._drop(next(iter(self._told)))

    def forget(self) -> None:
        """What was told is no longer in the store."""
        self._told.clear()
        self._carrying.clear()
        self._kept, self._long = 0, True

    # -- while it runs ---------------------------------------------------------------------------

    def span(self, count: int) -> Made | None:
        """The one to be written after `count` manifests, if those in it are known here.

        It tells nothing of earlier uploaders' manifests: those may be replaced by late ones of their
        own, and whoever reads finds spans of them that are shorter.
        """
        for span in due(count):
            seqs = range(*span)
            if not all(seq in self._told for seq in seqs):
                continue
            carrying = [seq for seq in seqs if seq in self._carrying]
            if sum(self._carrying[seq] for seq in carrying) > _MOST_ATTACHED:
                self._settle(carrying)
            if sum(len(self._told[seq]) for seq in seqs) <= _MOST_SPAN_BYTES:
                data = msgspec.json.encode({"manifests": self._raw(seqs)})
                return Made(span_key(self._worker, self._session.attempt, *span), data)
        return None

    # -- after its end ---------------------------------------------------------------------------

    async def write(self, store: Store, count: int) -> None:
        """`count`: how many manifests the session has."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def fetch(seq: int) -> None:
            async with gate:
                key = manifest_key(self._worker, self._session.attempt, seq)
                self.note(msgspec.json.decode(await store.get(key), type=RankManifest))

        if not self._long:
            absent = [seq for seq in range(count) if seq not in self._told]
            tasks = [asyncio.ensure_future(fetch(seq)) for seq in absent]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        if self._long:
            return
        if self._attached > _MOST_ATTACHED:
            self._settle(list(self._carrying))
        told = {"session": self._session, "manifests": self._raw(range(count))}
        key = summary_key(self._worker, self._session.attempt)
        await store.put(key, (msgspec.json.encode(told),))

    async def exists(self, store: Store) -> bool:
        key = summary_key(self._worker, self._session.attempt)
        return key in await store.list(key)

    # -- what is kept ----------------------------------------------------------------------------

    def _raw(self, seqs: Iterable[int]) -> list[msgspec.Raw]:
        return [msgspec.Raw(self._told[seq]) for seq in seqs]

    def _keep(self, seq: int, data: bytes) -> None:
        more = len(data) - len(self._told.get(seq, b""))
        self._told[seq] = data
        self._kept, self._nbytes = self._kept + more, self._nbytes + more

    def _drop(self, seq: int) -> None:
        self._kept -= len(self._told.pop(seq))
        self._carrying.pop(seq, None)

    def _settle(self, seqs: Iterable[int]) -> None:
        """What they carry is left where it is."""
        for seq in seqs:
            del self._carrying[seq]
            manifest = msgspec.json.decode(self._told[seq], type=RankManifest)
            key = manifest_key(self._worker, manifest.attempt, seq)
            self._keep(seq, msgspec.json.encode(settle(key, manifest).manifest))
