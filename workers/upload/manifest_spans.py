"""Store spans of a session's manifests beside its commits. They are optional and delay nothing.

One at a time; one that waits is left out once another is due, and one that fails is not kept:
readers find shorter ones, and at last the manifests. An uploader that succeeds another takes back what is
said of manifests that the store does not hold, because it writes those numbers anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import re

from smdist.errors import StoreForbidden
from smdist.format.manifest import RankManifest, RankSpan, span_key
from smdist.format.manifest_spans import SPAN_LENGTHS
from smdist.format.stored_json import encode
from smdist.storage.store import Store
from smdist.workers.upload.summaries import Summary

__all__ = ["Rolling", "take_back"]

_PUT_S = 10.0
_CLOSE_S = 2.0
_UPTO = re.compile(r"spans/worker_\d+/\d+-\d+-(\d+)\.json")


class Rolling:
    """Used on one event loop."""

    def __init__(self, store: Store, summary: Summary) -> None:
        self._store, self._summary = store, summary
        self._task: asyncio.Task[None] | None = None
        self._due = 0  # how many manifests there were then

    def stored(self, manifest: RankManifest) -> None:
        """Start writing a span if one ends with `manifest`, which is stored and noted. Does not wait."""
        count = manifest.seq + 1
        # A summary is about to follow the last one, and says it all.
        last = manifest.state != "active" and not self._summary.too_long
        if count % SPAN_LENGTHS[-1] or last:
            return
        self._due = count
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._put())

    async def _put(self) -> None:
        while self._due:
            made, self._due = self._summary.span(self._due), 0
            if made is not None:
                with contextlib.suppress(Exception):  # nobody needs it
                    await asyncio.wait_for(self._store.put(made.key, (made.data,)), _PUT_S)

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_CLOSE_S)
            self._task.cancel()


async def take_back(store: Store, worker: str, attempt: int, count: int) -> None:
    """Empty spans that name more than the `count` manifests in the store, as after a power cut.

    They are emptied, not removed: credentials may allow writing and not removing.
    """
    after = span_key(worker, attempt, max(count - SPAN_LENGTHS[0], 0), 0)
    with contextlib.suppress(StoreForbidden):  # who may not list has to trust
        for key in await store.list(f"spans/{worker}/{attempt:06d}-", after=after):
            match = _UPTO.fullmatch(key)
            if match and int(match[1]) > count:
                await store.put(key, (encode(RankSpan(()), key),))
