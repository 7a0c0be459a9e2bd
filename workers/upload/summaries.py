"""What a session's manifests say in fewer objects: spans while it runs, a summary after its end.

`note` is told every manifest that this process has put. `span` puts the last of them together, as
often as `smdist.format.manifest_spans` says; `write`, once the last one is in the store, all of them.
What is kept in memory is bounded by what a span may hold: earlier ones, and those of earlier uploaders, are
read back then, by spans. Nobody needs either, so nothing waits for them and nothing
fails for them; what is too long for one object is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from smdist.errors import CorruptObject, ObjectNotFound
from smdist.format.inline_segment import extract_segment
from smdist.format.manifest import RankManifest, Session, manifest_key, span_key, summary_key
from smdist.format.manifest_spans import SPAN_LENGTHS, ManifestSpan, covering_spans, spans_ending_at
from smdist.format.stored_json import encode, encode_parts, read
from smdist.identity import worker_name
from smdist.storage.store import Buffer, Store

__all__ = ["Made", "Summary"]

_MOST_BYTES = 32 << 20
_LEAST_MANIFEST = 128  # bytes of one that says nothing
_MOST_SPAN_BYTES = 8 << 20
_MOST_ATTACHED = 1 << 20  # numbers that come with it; beyond that they are read where they are
_AT_ONCE = 16
_SPANS_AT_ONCE = 2  # they may be long


class _Name(msgspec.Struct):
    """Which manifest it is; the rest is not unpacked: entries by the thousand would be large."""

    session: str
    rank: int
    attempt: int
    seq: int


class _Carried(msgspec.Struct):
    attached: bytes = b""


class _Span(msgspec.Struct):
    manifests: tuple[msgspec.Raw, ...]


class Made(NamedTuple):
    key: str
    data: bytes


class Summary:
    """Used on one event loop."""

    def __init__(self, session: Session) -> None:
        self.session, self._worker = session, worker_name(session.rank)
        self._told: dict[int, bytes] = {}  # by seq, as JSON: entries by the thousand are small so
        self._carrying: dict[int, int] = {}  # of these, what is attached to them, in bytes
        self._attached = self.nbytes = 0  # of all, so far
        self._kept = 0  # bytes in `_told`
        self.too_long = False  # not all manifests are known any more: there will be no summary

    def note(self, manifest: RankManifest) -> None:
        if manifest.seq % SPAN_LENGTHS[-1] == 0 and sum(self._carrying.values()) > _MOST_ATTACHED:
            self._settle(list(self._carrying))
        self._attached += len(manifest.attached)
        if manifest.attached:
            self._carrying[manifest.seq] = len(manifest.attached)
        self._keep(manifest.seq, msgspec.json.encode(manifest))
        if self.nbytes > _MOST_BYTES:
            self.too_long = True
        while self._kept > _MOST_SPAN_BYTES:
            self._drop(next(iter(self._told)))

    def forget(self) -> None:
        """Forget all manifests: the store no longer has them."""
        self._told.clear()
        self._carrying.clear()
        self._kept, self.too_long = 0, True

    # -- while it runs ---------------------------------------------------------------------------

    def span(self, count: int) -> Made | None:
        """Return the span to write after `count` manifests, if all manifests in it are known here.

        It never holds manifests of earlier uploaders: late ones of their own may replace those, and
        readers find shorter spans of them.
        """
        for span in spans_ending_at(count):
            seqs = range(*span)
            if not all(seq in self._told for seq in seqs):
                continue
            carrying = [seq for seq in seqs if seq in self._carrying]
            if sum(self._carrying[seq] for seq in carrying) > _MOST_ATTACHED:
                self._settle(carrying)
            if sum(len(self._told[seq]) for seq in seqs) <= _MOST_SPAN_BYTES:
                key = span_key(self._worker, self.session.attempt, *span)
                return Made(key, encode({"manifests": self._raw(seqs)}, key))
        return None

    # -- after its end ---------------------------------------------------------------------------

    async def write(self, store: Store, count: int) -> None:
        """`count`: how many manifests the session has."""
        if count * _LEAST_MANIFEST > _MOST_BYTES:  # a resumed session says so, whoever wrote it
            return
        told: dict[int, Buffer] = dict(self._told)
        spans = (
            [] if self.too_long else covering_spans(seq for seq in range(count) if seq not in told)
        )
        while spans and sum(map(len, told.values())) <= _MOST_BYTES:
            missing = await self._read_back(store, spans, told)
            spans = [part for span in missing for part in span.children()]
        if self.too_long or sum(map(len, told.values())) > _MOST_BYTES:
            return
        carrying = {seq: nbytes for seq in told if (nbytes := _attached(told[seq]))}
        if max(self._attached, sum(carrying.values())) > _MOST_ATTACHED:
            told.update({seq: self._bare(seq, told[seq]) for seq in carrying})
        # In pieces: in one it would take as much memory again.
        parts = [part for seq in range(count) for part in (b",", told[seq])][1:]
        head = b'{"session":' + msgspec.json.encode(self.session) + b',"manifests":['
        key = summary_key(self._worker, self.session.attempt)
        await store.put(key, encode_parts((head, *parts, b"]"), key))

    async def _read_back(
        self, store: Store, spans: Sequence[ManifestSpan], told: dict[int, Buffer]
    ) -> list[ManifestSpan]:
        """Those that are missing."""
        gate, few = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_SPANS_AT_ONCE)

        async def fetch(span: ManifestSpan) -> None:
            async with few if span.length > 1 else gate:
                told.update(await self._read(store, span))

        tasks = [asyncio.ensure_future(fetch(span)) for span in spans]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [span for span in spans if span.first not in told]

    async def _read(self, store: Store, span: ManifestSpan) -> dict[int, Buffer]:
        """By seq, as JSON. Of a span that is missing or strange nothing."""
        attempt = self.session.attempt
        if span.length == 1:
            manifest = await read(
                store, manifest_key(self._worker, attempt, span.first), RankManifest
            )
            return {span.first: msgspec.json.encode(manifest)}
        try:
            found = (await read(store, span_key(self._worker, attempt, *span), _Span)).manifests
            names = [msgspec.json.decode(raw, type=_Name) for raw in found]
        except (ObjectNotFound, CorruptObject, msgspec.DecodeError):
            return {}
        session = self.session
        wanted = [_Name(session.session, session.rank, attempt, seq) for seq in range(*span)]
        if names != wanted:
            return {}
        return {seq: memoryview(raw) for seq, raw in zip(range(*span), found, strict=True)}

    async def exists(self, store: Store) -> bool:
        key = summary_key(self._worker, self.session.attempt)
        return key in await store.list(key)

    # -- what is kept ----------------------------------------------------------------------------

    def _raw(self, seqs: Iterable[int]) -> list[msgspec.Raw]:
        return [msgspec.Raw(self._told[seq]) for seq in seqs]

    def _keep(self, seq: int, data: bytes) -> None:
        more = len(data) - len(self._told.get(seq, b""))
        self._told[seq] = data
        self._kept, self.nbytes = self._kept + more, self.nbytes + more

    def _drop(self, seq: int) -> None:
        self._kept -= len(self._told.pop(seq))
        self._carrying.pop(seq, None)

    def _settle(self, seqs: Iterable[int]) -> None:
        """Drop the inline segments of these manifests; they stay in the manifests themselves."""
        for seq in seqs:
            del self._carrying[seq]
            self._keep(seq, self._bare(seq, self._told[seq]))

    def _bare(self, seq: int, data: Buffer) -> bytes:
        manifest = msgspec.json.decode(data, type=RankManifest)
        key = manifest_key(self._worker, manifest.attempt, seq)
        return msgspec.json.encode(extract_segment(key, manifest).manifest)


def _attached(data: Buffer) -> int:
    return len(msgspec.json.decode(data, type=_Carried).attached)
