"""Read objects of a run although some cannot be read: note the trouble, count errors of the store.

Used by `StorePoller` and `RankReader`, on one event loop. A missing object is None. After several
errors in a row the store counts as down, and a poll stops asking.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from smdist.concurrency import bounded_gather
from smdist.errors import CorruptObject, ObjectNotFound, SmdistError
from smdist.storage.run_objects import RunObjects
from smdist.storage.store import Store

__all__ = ["ObjectReader"]

A = TypeVar("A")
T = TypeVar("T")

_MAX_ERRORS = 8  # in a row: the store is down


class ObjectReader:
    """Typed reads of `objects`; `troubles` tells by key what cannot be read."""

    def __init__(self, store: Store, concurrency: int) -> None:
        self.store, self.objects = store, RunObjects(store)
        self.troubles: dict[str, str] = {}
        self.errors = 0  # in a row, without a success
        self._concurrency = concurrency
        self._unanswered: set[str] = set()

    async def get(self, reading: Awaitable[T]) -> T | None:
        """Await a read; None if the object is not there."""
        try:
            value = await reading
        except ObjectNotFound:
            self.errors = 0
            return None
        except CorruptObject:  # the store has answered
            self.errors = 0
            raise
        except (SmdistError, OSError):
            self.errors += 1
            raise
        self.errors = 0
        return value

    async def try_get(self, key: str, reading: Awaitable[T]) -> T | None:
        """Await the read of `key`; None if it is not there or cannot be read, which is noted."""
        self._unanswered.discard(key)
        try:
            value = await self.get(reading)
        except (SmdistError, OSError) as error:
            self.troubles[key] = f"{key} cannot be read: {error}"
            if not isinstance(error, CorruptObject):
                self._unanswered.add(key)
            return None
        self.troubles.pop(key, None)
        return value

    def was_answered(self, key: str) -> bool:
        """Return whether the store answered when `key` was last tried."""
        return key not in self._unanswered

    async def list(self, prefix: str, after: str) -> Sequence[str]:
        try:
            return await self.store.list(prefix, after=after)
        except (SmdistError, OSError):
            self.errors += 1
            raise

    async def for_each(self, call: Callable[[A], Awaitable[None]], items: Iterable[A]) -> None:
        """Call for every item, several at a time; skip the rest when the store is down."""

        async def call_if_up(item: A) -> None:
            if self.errors < _MAX_ERRORS:
                await call(item)

        await bounded_gather(call_if_up, items, self._concurrency)
