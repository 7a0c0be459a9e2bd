"""The contract of a store: a flat map from key to immutable bytes.

Called from one event loop, by whoever owns the store (the uploader process, a trial's reader
thread). A key is relative, uses '/', and never leaves the store: `check_key` refuses the rest.

- `put` is atomic: a reader sees all of it or none, whatever dies. It replaces what was there, so
  repeating a put with the same bytes changes nothing. With `if_absent` it raises ObjectExists
  instead; correctness must not depend on that, as some S3 servers ignore it.
- `get` of `[start, stop)` or of the whole; ObjectNotFound when there is no such key.
- `list` gives keys under a prefix in text order, `after` excluded and what comes before it too.
- `delete` of a key that is not there is no error.

Only "not found" is an empty answer. Anything else raises a StoreError that names url, key and
operation: StoreFull, StoreForbidden, or plain StoreError (worth trying again).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Union, runtime_checkable

from smdist.errors import StoreError

__all__ = ["Buffer", "Store", "check_key"]

Buffer = Union[bytes, bytearray, memoryview]  # noqa: UP007 (3.10)


@runtime_checkable
class Store(Protocol):
    @property
    def url(self) -> str: ...

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None: ...

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes: ...

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]: ...

    async def delete(self, key: str) -> None: ...

    async def close(self) -> None: ...


def check_key(url: str, key: str) -> str:
    """`key` itself, or StoreError when it could leave the store."""
    if not key or key.startswith("/") or "\0" in key or ".." in key.split("/"):
        raise StoreError(url, key, "use", "not a key of a store")
    return key
