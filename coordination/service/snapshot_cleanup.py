"""Removes snapshots that newer ones have replaced, some time after.

Every snapshot writes a head and the chunks that changed; the ones before it are of use only to
readers that have pinned them. They get `keep_s` to move on; less once the last snapshot of a run is
there, as nobody may come back to remove them. Used by the coordinator alone: what is named by the
newest snapshot is never removed.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable

from smdist.coordination.snapshot.pack import PackedSnapshot, Pointer
from smdist.errors import SmdistError, StoreForbidden
from smdist.storage.store import Store

__all__ = ["SnapshotCleaner"]

_NUMBERED = re.compile(r"merged/(?:heads|steps)/(\d+)-(\d+)-")
_AT_ONCE = 64
_KEEP_LAST_S = 60.0


class SnapshotCleaner:
    def __init__(self, store: Store, now: Callable[[], float], keep_s: float = 900.0) -> None:
        self._store, self._now, self._keep_s = store, now, keep_s
        self._old: deque[tuple[float, str]] = deque()
        self._last: PackedSnapshot | None = None
        self._live: frozenset[str] = frozenset()
        self._forbidden = False

    async def inherit(self, pointer: Pointer | None, chunks: Iterable[str] = ()) -> None:
        """Once, at the start: what earlier coordinators have left up to `pointer`.

        `chunks`: the keys of those that it leads to. All others were replaced before it was written.
        """
        if pointer is None:
            return
        now = self._now()
        self._live = frozenset((pointer.head, *chunks))
        for folder in ("merged/heads/", "merged/steps/"):
            for key in await self._store.list(folder):
                found = _NUMBERED.match(key)
                if found and (int(found[1]), int(found[2])) <= (pointer.epoch, pointer.number):
                    since = now if key in self._live else min(now, pointer.time)
                    self._old.append((since, key))
        self._old = deque(sorted(self._old))

    async def published(self, packed: PackedSnapshot) -> None:
        """`packed` is the newest snapshot; remove what has been old for long enough."""
        now, last, self._last = self._now(), self._last, packed
        self._live = frozenset((packed.head_key, *packed.chunks))
        self._old.extend((now, key) for key in packed.replaced)
        if last is not None:
            self._old.append((now, last.head_key))
        await self._remove(self._due(self._keep_s))

    async def finished(self) -> None:
        """The newest snapshot is the last one. To be called again later: some may be too young."""
        while due := self._due(min(self._keep_s, _KEEP_LAST_S)):
            await self._remove(due)

    def _due(self, keep_s: float) -> list[str]:
        due: list[str] = []
        now = self._now()
        while self._old and len(due) < _AT_ONCE and now - self._old[0][0] >= keep_s:
            due.append(self._old.popleft()[1])
        return due

    async def _remove(self, keys: Iterable[str]) -> None:
        if self._forbidden:
            return
        results = await asyncio.gather(
            *(self._store.delete(key) for key in keys if key not in self._live),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, StoreForbidden):
                self._forbidden = True  # credentials may allow to write and not to remove
            elif isinstance(result, BaseException) and not isinstance(
                result, (SmdistError, OSError)
            ):
                raise result
