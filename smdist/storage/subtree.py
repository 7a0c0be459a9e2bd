"""A folder of a store as a store of its own, over the same connections."""

from __future__ import annotations

from collections.abc import Sequence

from smdist.storage.store import Buffer, HasFolders, Store, check_key

__all__ = ["StoreSubtree", "folders"]


class StoreSubtree:
    """The keys under `folder`. `close` leaves the enclosing store open for its owner."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._prefix = f"{check_key(store.url, folder.strip('/'))}/"

    @property
    def url(self) -> str:
        place, mark, query = self._store.url.partition("?")
        return f"{place.rstrip('/')}/{self._prefix[:-1]}{mark}{query}"

    def __repr__(self) -> str:
        return f"StoreSubtree({self._store!r}, {self._prefix!r})"

    async def check(self) -> None:
        await self._store.check()

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        await self._store.put(self._name(key), data, if_absent=if_absent)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return await self._store.get(self._name(key), start, stop)

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        after = f"{self._prefix}{after}" if after else ""
        found = await self._store.list(f"{self._prefix}{prefix}", after=after)
        return [key[len(self._prefix) :] for key in found]

    async def delete(self, key: str) -> None:
        await self._store.delete(self._name(key))

    async def close(self) -> None:
        pass

    def _name(self, key: str) -> str:
        return self._prefix + check_key(self.url, key)


async def folders(store: Store, prefix: str = "") -> Sequence[str]:
    """Return the names directly under `prefix` ("" or ending in "/") that have keys below them.

    In text order, and without reading every key where the store supports that.
    """
    if isinstance(store, HasFolders):
        return await store.folders(prefix)
    rest = [key[len(prefix) :] for key in await store.list(prefix)]
    return sorted({name.partition("/")[0] for name in rest if "/" in name})
