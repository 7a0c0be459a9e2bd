"""Encode and decode the JSON objects of a run, each with a checksum of its key and content.

    {"run_id":"...","created":1.0,"crc32c":"1a2b3c4d"}

The last member is the CRC32C of the object's key followed by all bytes before `,"crc32c"`. It detects
damage, and objects that were copied or renamed to another key. `decode` raises CorruptObject, which
names the object, for anything that is wrong with the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import google_crc32c
import msgspec

from smdist.checking import check
from smdist.errors import CorruptObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smdist.storage.store import Buffer, Store

__all__ = ["decode", "encode", "encode_parts", "parse", "read"]

T = TypeVar("T")

_TAIL = b',"crc32c":"%s"}'
_TAIL_BYTES = len(_TAIL % bytes(8))
_MOST_BYTES = 256 << 20  # far beyond what smdist writes


def encode(value: object, key: str) -> bytes:
    """Encode `value`, an object with at least one member, for the key `key`."""
    body = msgspec.json.encode(value)[:-1]
    return body + _TAIL % _checksum(key, body)


def encode_parts(parts: Sequence[Buffer], key: str) -> tuple[Buffer, ...]:
    """Add the checksum to an object in pieces, which lacks only its closing brace."""
    return (*parts, _TAIL % _checksum(key, *parts))


def decode(data: bytes, kind: type[T], key: str, url: str = "") -> T:
    """Decode what was stored under `key`; raise CorruptObject if the checksum or the type is wrong."""
    body = data[:-_TAIL_BYTES]
    if not body or data[-_TAIL_BYTES:] != _TAIL % _checksum(key, body):
        what = "wrong checksum: damaged, or copied from another key" if data else "it is empty"
        raise CorruptObject(url, key, "read", what)
    return parse(data, kind, key, url)


def parse(data: bytes | memoryview, kind: type[T], key: str, url: str = "") -> T:
    """Decode JSON whose integrity was checked elsewhere; raise CorruptObject if it is not valid.

    The types of its fields limit their values (`smdist.limits`). A `check()` method of the kind is
    called, too.
    """
    if len(data) > _MOST_BYTES:
        raise CorruptObject(url, key, "read", f"{len(data)} bytes exceed the limit")
    try:
        value = msgspec.json.decode(data, type=kind)
        check(kind, value)
        if (own := getattr(value, "check", None)) is not None:
            own()
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptObject(url, key, "read", f"invalid content: {error}") from error
    return value


async def read(store: Store, key: str, kind: type[T]) -> T:
    """Read and decode an object; raise ObjectNotFound or CorruptObject."""
    return decode(await store.get(key), kind, key, store.url)


def _checksum(key: str, *parts: Buffer) -> bytes:
    value = google_crc32c.value(key.encode(errors="surrogatepass"))
    for part in parts:
        value = google_crc32c.extend(value, bytes(part))
    return b"%08x" % value
