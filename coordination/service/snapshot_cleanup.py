"""Remove snapshots some time after newer ones have replaced them.

Every snapshot writes a head and the chunks that changed. Earlier ones are only needed by readers that
have pinned them: these get `keep_s` to move on. After the last snapshot of a run it is less, because
no coordinator may come back to remove them. Used by the lease holder only. What the newest snapshot names is
never removed.
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
_MAX_AT_ONCE = 64
_KEEP_FINISHED_S = 60.0


class SnapshotCleaner:
    """Remembers replaced objects and removes them when they are old enough."""

    def __init__(self, store: Store, now: Callable[[], float], keep_s: float = 900.0) -> None:
        self._store, self._now, self._keep_s = store, now, keep_s
        self._replaced: deque[tuple[float, str]] = deque()  # since when, and key
        self._newest: PackedSnapshot | None = None
        self._in_use: frozenset[str] = frozenset()
        self._forbidden = False  # credentials may allow to write and not to remove

    async def adopt_existing(self, pointer: Pointer | None, chunks: Iterable[str] = ()) -> None:
        """Remember what earlier coordinators left behind, up to the snapshot of `pointer`.

        `chunks` are the keys of the chunks of that snapshot; all others were replaced before it.
        """
        if pointer is None:
            return
        now = self._now()
        self._in_use = frozenset((pointer.head, *chunks))
        for folder in ("merged/heads/", "merged/steps/"):
            for key in await self._store.list(folder):
                found = _NUMBERED.match(key)
                if found and (int(found[1]), int(found[2])) <= (pointer.epoch, pointer.number):
                    since = now if key in self._in_use else min(now, pointer.time)
                    self._replaced.append((since, key))
        self._replaced = deque(sorted(self._replaced))

    async def published(self, packed: PackedSnapshot) -> None:
        """Note that `packed` is the newest snapshot, and remove what is old enough."""
        now, last, self._newest = self._now(), self._newest, packed
        self._in_use = frozenset((packed.head_key, *packed.chunks))
        self._replaced.extend((now, key) for key in packed.replaced)
        if last is not None:
            self._replaced.append((now, last.head_key))
        await self._remove(self._take_due(self._keep_s))

    async def run_finished(self) -> None:
        """Remove what the last snapshot replaced. Call it again later: some may be too new."""
        while due := self._take_due(min(self._keep_s, _KEEP_FINISHED_S)):
            await self._remove(due)

    def _take_due(self, keep_s: float) -> list[str]:
        due: list[str] = []
        now, replaced = self._now(), self._replaced
        while replaced and len(due) < _MAX_AT_ONCE and now - replaced[0][0] >= keep_s:
            due.append(replaced.popleft()[1])
        return due

    async def _remove(self, keys: Iterable[str]) -> None:
        if self._forbidden:
            return
        results = await asyncio.gather(
            *(self._store.delete(key) for key in keys if key not in self._in_use),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, StoreForbidden):
                self._forbidden = True
            elif isinstance(result, BaseException) and not isinstance(
                result, (SmdistError, OSError)
            ):
                raise result
