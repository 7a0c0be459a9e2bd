"""A store in the memory of this process, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smdist.errors import ObjectExists, ObjectNotFound
from smdist.storage.store import Buffer, check_key, check_range, check_size

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MemoryStore"]


class MemoryStore:
    def __init__(self, name: str = "") -> None:
        self._url = f"memory://{name}"
        self.objects: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return self._url

    async def check(self) -> None:
        pass

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        check_key(self._url, key)
        if if_absent and key in self.objects:
            raise ObjectExists(self._url, key, "put")
        self.objects[key] = b"".join(data)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        check_key(self._url, key)
        check_range(start, stop)
        if key not in self.objects:
            raise ObjectNotFound(self._url, key, "get")
        if stop is None:
            check_size(self._url, key, len(self.objects[key]))
        return self.objects[key][start:stop]

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        return sorted(key for key in self.objects if key.startswith(prefix) and key > after)

    async def delete(self, key: str) -> None:
        self.objects.pop(check_key(self._url, key), None)

    async def close(self) -> None:
        pass
