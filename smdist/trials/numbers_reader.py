"""Read values that are stored inside manifests, with one request for many of them.

A merged snapshot tells in which manifest a value lies. A rank that has ended has left a summary with all
its manifests. A live rank has none yet, and the summary of a long session leaves the values out. Then
spans of 16 manifests hold them, or the manifests themselves. Used by `SegmentReader`, on the event loop
that owns the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from smdist.errors import CorruptObject, ObjectNotFound
from smdist.format.manifest import RankManifest, RankSpan, manifest_key, span_key, summary_key
from smdist.format.manifest_spans import SPAN_LENGTHS
from smdist.format.stored_json import decode, read
from smdist.storage.store import Store

__all__ = ["InlineValues", "SessionOf", "span_of", "summary_of"]

SessionOf = Callable[[str], str]
"""The session that has written the manifest of that key; "" where that is not known."""

_MANIFEST = re.compile(r"manifests/(worker_\d+)/(\d+)-(\d+)\.json")


def summary_of(key: str) -> str:
    """Return the key of the summary that may hold a manifest; "" for any other object."""
    match = _MANIFEST.fullmatch(key)
    return summary_key(match[1], int(match[2])) if match else ""


def span_of(key: str) -> str:
    """Return the key of the shortest span that may hold a manifest; "" for any other object."""
    match = _MANIFEST.fullmatch(key)
    if match is None:
        return ""
    seq, length = int(match[3]), SPAN_LENGTHS[-1]
    first = seq - seq % length
    return span_key(match[1], int(match[2]), first, first + length)


def _key(manifest: RankManifest) -> str:
    return manifest_key(manifest.worker, manifest.attempt, manifest.seq)


class InlineValues:
    """On the event loop that owns the store."""

    def __init__(
        self, store: Store, troubles: dict[str, str], session: SessionOf = lambda _: ""
    ) -> None:
        """`troubles` is told of summaries and spans that are damaged."""
        self._store, self._troubles, self._session = store, troubles, session
        self._of_no_use: set[str] = set()

    def attached(self, key: str, data: bytes) -> bytes:
        """Return the segment in a manifest; raise CorruptObject if another run has replaced it."""
        manifest = decode(data, RankManifest, key, self._store.url)
        if self._session(key) not in ("", manifest.session):
            detail = "another run was begun in this place after the trial was opened"
            raise CorruptObject(self._store.url, key, "read", detail)
        return manifest.attached

    async def load(self, key: str) -> dict[str, bytes]:
        """Read a summary or span: the segments in its manifests by key; {} if it is missing."""
        if key in self._of_no_use:
            return {}
        try:
            manifests = (await read(self._store, key, RankSpan)).manifests  # either
        except ObjectNotFound:
            manifests = ()
        except CorruptObject as error:
            self._troubles[key] = f"{key} was ignored: {error}"
            manifests = ()
        if any(self._session(_key(one)) not in ("", one.session) for one in manifests[:1]):
            manifests = ()
        found = {_key(one): one.attached for one in manifests}
        found = {name: attached for name, attached in found.items() if attached}
        if not found:
            self._of_no_use.add(key)
        return found
