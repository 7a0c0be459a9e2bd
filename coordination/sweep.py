"""Removes snapshots that newer ones have replaced, some time after.

Every snapshot writes a head and the chunks that changed; the ones before it are of use only to
readers that have pinned them. They get `keep_s` to move on. Used by the coordinator alone, right
after it has published: what is named by the newest snapshot is never removed.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable

from smdist.coordination.snapshot import Packed, Pointer
from smdist.errors import SmdistError, StoreForbidden
from smdist.storage.base import Store

__all__ = ["Sweeper"]

_NUMBERED = re.compile(r"merged/(?:heads|steps)/(\d+)-(\d+)-")
_AT_ONCE = 64


class Sweeper:
    def __init__(self, store: Store, now: Callable[[], float], keep_s: float = 900.0) -> None:
        self._store, self._now, self._keep_s = store, now, keep_s
        self._old: deque[tuple[float, str]] = deque()
        self._last: Packed | None = None
        self._forbidden = False

    async def inherit(self, pointer: Pointer | None) -> None:
        """Once, at the start: what earlier coordinators have left up to `pointer`."""
        if pointer is None:
            return
        now = self._now()
        for folder in ("merged/heads/", "merged/steps/"):
            for key in await self._store.list(folder):
                found = _NUMBERED.match(key)
                if found and (int(found[1]), int(found[2])) <= (pointer.epoch, pointer.number):
                    self._old.append((now, key))

    async def published(self, packed: Packed) -> None:
        """`packed` is the newest snapshot; remove what has been old for long enough."""
        now, last, self._last = self._now(), self._last, packed
        self._old.extend((now, key) for key in packed.replaced)
        if last is not None:
            self._old.append((now, last.head_key))
        due: list[str] = []
        while self._old and len(due) < _AT_ONCE and now - self._old[0][0] >= self._keep_s:
            due.append(self._old.popleft()[1])
        if due and not self._forbidden:
            live = {packed.head_key, *packed.chunks}
            await self._remove(key for key in due if key not in live)

    async def _remove(self, keys: Iterable[str]) -> None:
        results = await asyncio.gather(
            *(self._store.delete(key) for key in keys), return_exceptions=True
        )
        for result in results:
            if isinstance(result, StoreForbidden):
                self._forbidden = True  # credentials may allow to write and not to remove
            elif isinstance(result, BaseException) and not isinstance(
                result, (SmdistError, OSError)
            ):
                raise result
