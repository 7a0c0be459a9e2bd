"""The contract of a store: a flat map from key to immutable bytes.

The owner of a store (the uploader process, the reader thread of a trial) calls it from one event loop:
`check` once, optionally; then `put`, `get`, `list` and `delete` in any order; `close` once, last. A key
is relative, uses '/', and never leaves the store: `check_key` rejects everything else.

Only "not found" is an empty answer. Every other failure raises a StoreError that names URL, key and
operation: StoreFull, StoreForbidden, CorruptObject (this cannot be an object of a run), or plain
StoreError, after which a retry may succeed.

A store may offer more: `HasFolders`, `HasBlockingRead`, `HasUploads`, `HasParts`. It may also declare
`MayIgnoreConditions`. Callers check with `isinstance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Union, runtime_checkable

from smdist.errors import CorruptObject, StoreError
from smdist.limits import max_object_bytes

__all__ = [
    "Buffer",
    "HasBlockingRead",
    "HasFolders",
    "HasParts",
    "HasUploads",
    "MayIgnoreConditions",
    "Store",
    "check_key",
    "check_range",
    "check_size",
]

Buffer = Union[bytes, bytearray, memoryview]  # noqa: UP007 (3.10)


@runtime_checkable
class Store(Protocol):
    @property
    def url(self) -> str:
        """Return a URL or path that opens the same store again; it holds no secret."""

    async def check(self) -> None:
        """Raise now what the first `put` would raise. Leaves nothing behind."""

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        """Store the bytes of `data` under `key`, atomically: readers see all of them or none.

        An object that is there is replaced, so repeating a put changes nothing. With `if_absent` it
        raises ObjectExists instead; some S3 servers ignore that, so correctness must not depend on it.
        The buffers belong to the caller again when the call returns or raises, even if cancelled.
        """

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes `[start, stop)`, or all of them. Raise ObjectNotFound without the key.

        A range past the end gives what there is, maybe nothing. A whole object that is larger than
        its kind may be (`smdist.limits`) raises CorruptObject before anything is read.
        """
        ...

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        """Return the keys that begin with `prefix` and come after `after`, in text order."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the object, if there is one."""

    async def close(self) -> None:
        """Release connections and files."""


@runtime_checkable
class HasFolders(Protocol):
    """A store that lists folders without listing every key."""

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names directly under `prefix` that have keys below them, in text order."""
        ...


@runtime_checkable
class HasBlockingRead(Protocol):
    """A store as near as a file: a caller that waits anyway is faster without an event loop."""

    def read(self, key: str, ranges: Sequence[tuple[int, int | None]]) -> list[bytes]:
        """Return the bytes of each range like `get`, on the thread of the caller."""
        ...


@runtime_checkable
class MayIgnoreConditions(Protocol):
    """A store whose server may ignore `if_absent`: two writers may both succeed there."""

    @property
    def ignores_conditions(self) -> bool: ...


@runtime_checkable
class HasUploads(Protocol):
    """A store in which a killed writer may leave unfinished uploads that no listing shows."""

    @property
    def dangling_uploads(self) -> bool:
        """Return whether the store is not sure that each upload of this process has ended."""

    async def sweep_uploads(self, prefix: str) -> int:
        """Abort unfinished uploads of keys that begin with `prefix`; return how many."""


@runtime_checkable
class HasParts(Protocol):
    """A store that puts large objects in parts, so that a long put shows its progress."""

    @property
    def parts_stored(self) -> int: ...


def check_key(url: str, key: str) -> str:
    """Return `key`, or raise StoreError when it could leave the store or equal another key.

    No part of a key is empty or begins with a dot: `.`, `..` and hidden files belong to the store.
    """
    parts = key.split("/")
    if "\0" in key or any(not part or part.startswith(".") for part in parts):
        raise StoreError(url, key, "use", "not a key: each part needs a name without leading dot")
    # Limits of file systems (per part) and of S3 (in total), the same for every store.
    if len(key.encode(errors="surrogatepass")) > 1024 or any(
        len(part.encode(errors="surrogatepass")) > 255 for part in parts
    ):
        raise StoreError(url, key, "use", "not a key: longer than 1024 bytes, or a part than 255")
    return key


def check_range(start: int, stop: int | None) -> None:
    if start < 0 or (stop is not None and stop < 0):
        raise ValueError(f"a range counts from the start of an object: [{start}, {stop})")


def check_size(url: str, key: str, size: int) -> None:
    """Raise CorruptObject when an object of `size` bytes is too large to be read whole."""
    most = max_object_bytes(key)
    if size > most:
        detail = f"it has {size} bytes, such an object may have {most}; smdist did not write it"
        raise CorruptObject(url, key, "get", detail)
