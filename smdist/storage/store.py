"""The contract of a store: a flat map from key to immutable bytes.

Called from one event loop, by whoever owns the store (the uploader process, a trial's reader
thread). A key is relative, uses '/', and never leaves the store: `check_key` refuses the rest.

- `check`, once before the first put, by who wants to know early: raises what a put would raise,
  and leaves nothing behind.
- `put` is atomic: a reader sees all of it or none, whatever process dies. It replaces what was there,
  so repeating a put with the same bytes changes nothing. With `if_absent` it raises ObjectExists
  instead; correctness must not depend on that, as some S3 servers ignore it. The buffers are the
  caller's again when the call returns or raises, cancellation included.
- `get` of `[start, stop)` or of the whole; ObjectNotFound when there is no such key. A range that
  reaches past the end gives what there is, maybe nothing. CorruptObject, before anything is read,
  when the whole is asked for and larger than such an object may be (`smdist.limits`).
- `list` gives keys that begin with a prefix, in text order, `after` excluded and what comes before
  it too.
- `delete` of a key that is not there is no error.
- `close`, once, last.

Only "not found" is an empty answer. Anything else raises a StoreError that names url, key and
operation: StoreFull, StoreForbidden, CorruptObject (what is there cannot be an object of a run), or
plain StoreError (worth trying again).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Union, runtime_checkable

from smdist.errors import CorruptObject, StoreError
from smdist.limits import max_object_bytes

__all__ = [
    "Buffer",
    "HasBlockingRead",
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
    def url(self) -> str: ...

    async def check(self) -> None: ...

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None: ...

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes: ...

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]: ...

    async def delete(self, key: str) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class HasBlockingRead(Protocol):
    """A store as near as a file: for who waits anyway, going through a loop only takes longer."""

    def read(self, key: str, ranges: Sequence[tuple[int, int | None]]) -> list[bytes]:
        """As `get` of each range, in the thread of the caller, which may be any."""


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
    """`key` itself, or StoreError when it could leave the store or be another key's twin.

    No part of a key is empty or begins with a dot: `.`, `..` and hidden files are a store's own.
    """
    parts = key.split("/")
    if "\0" in key or any(not part or part.startswith(".") for part in parts):
        raise StoreError(url, key, "use", "not a key: each part needs a name without leading dot")
    # Limits of file systems (per part) and of S3 (in all), held by every store alike.
    if len(key.encode(errors="surrogatepass")) > 1024 or any(
        len(part.encode(errors="surrogatepass")) > 255 for part in parts
    ):
        raise StoreError(url, key, "use", "not a key: longer than 1024 bytes, or a part than 255")
    return key


def check_range(start: int, stop: int | None) -> None:
    if start < 0 or (stop is not None and stop < 0):
        raise ValueError(f"a range counts from the start of an object: [{start}, {stop})")


def check_size(url: str, key: str, size: int) -> None:
    """CorruptObject when an object of `size` bytes is too large to be read whole."""
    most = max_object_bytes(key)
    if size > most:
        detail = f"it has {size} bytes, such an object may have {most}; smdist did not write it"
        raise CorruptObject(url, key, "get", detail)
