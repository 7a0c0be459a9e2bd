"""Element types and the safetensors header. Pure.

Layouts and the journal use a short code per element type, mostly those of safetensors. A segment's
header uses only codes that safetensors reads since 0.4, because one unknown code makes a whole file
unreadable. Tensors of other types have a portable form in the header, with the same bytes:

    C64, C128                           float pairs: F32 or F64 with one more dimension, of size 2
    F8_E4M3FNUZ, F8_E5M2FNUZ, F8_E8M0   U8

The segment's metadata has the true type. `dtype_code` rejects types that none of these can hold
without loss.
"""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from smdist.checking import check
from smdist.errors import CaptureError
from smdist.limits import Bytes, Number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "Header",
    "HeaderEntry",
    "decode",
    "dtype_code",
    "header_bytes",
    "header_length",
    "is_known",
    "itemsize",
    "numpy_dtype",
    "parse_header",
    "portable_form",
]

_NATIVE: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_PAIRS: dict[str, np.dtype[Any]] = {"C64": np.dtype("<c8"), "C128": np.dtype("<c16")}
_PAIR_OF = {"C64": "F32", "C128": "F64"}
# Older versions of ml_dtypes lack some of these. Reading such tensors then needs a newer one.
_BYTES: dict[str, np.dtype[Any]] = {
    code: np.dtype(getattr(ml_dtypes, name))
    for code, name in (
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("F8_E8M0", "float8_e8m0fnu"),
    )
    if hasattr(ml_dtypes, name)
}
_DTYPES = {**_NATIVE, **_PAIRS, **_BYTES}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_LENGTH = struct.Struct("<Q")


def dtype_code(dtype: np.dtype[Any] | type) -> str:
    """Return the code of a numpy or ml_dtypes type; raise CaptureError if it has none."""
    code = _CODES.get(np.dtype(dtype))
    if code is None:
        raise CaptureError(
            f"elements of type {np.dtype(dtype)!s} cannot be stored without loss; "
            f"convert them to one of {', '.join(sorted(d.name for d in _CODES))}"
        )
    return code


def numpy_dtype(code: str) -> np.dtype[Any]:
    """Return the type of a code; raise ValueError if the code is unknown."""
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise ValueError(f"unknown element type {code!r}; a newer smdist or ml_dtypes may know it")
    return dtype


def is_known(code: str) -> bool:
    return code in _DTYPES


def itemsize(code: str) -> int:
    return numpy_dtype(code).itemsize


def decode(
    data: bytes | bytearray | memoryview, code: str, shape: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array over `data` without copying; it is writable if `data` is.

    Raises ValueError when the size of `data` does not fit `code` and `shape`.
    """
    dtype = numpy_dtype(code)
    expected = prod(shape) * dtype.itemsize
    size = memoryview(data).nbytes
    if size != expected:
        raise ValueError(f"{size} bytes instead of {expected} for {code} {list(shape)}")
    return np.frombuffer(data, dtype=dtype).reshape(shape) if size else np.zeros(shape, dtype)


def portable_form(code: str, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...]]:
    """Return type and shape of a tensor in the header. Never fails: unknown types become bytes.

    A wrong size in the header would make every tensor of the file unreadable. So a tensor whose
    size disagrees with its type and shape becomes bytes, too.
    """
    if code in _DTYPES and prod(shape) * _DTYPES[code].itemsize == nbytes:
        if code in _NATIVE:
            return code, shape
        if code in _PAIRS:
            return _PAIR_OF[code], (*shape, 2)
        return "U8", shape
    return "U8", (nbytes,)


class HeaderEntry(NamedTuple):
    """A tensor in a safetensors header; `start` and `stop` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """A parsed safetensors header."""

    entries: tuple[HeaderEntry, ...]
    metadata: dict[str, str]
    size: int  # bytes of header and length field, which is where the data begins


class _HeaderItem(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[Number, ...]
    data_offsets: tuple[Bytes, Bytes]


def header_bytes(entries: Iterable[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return length field and header, padded with spaces to a multiple of 8."""
    items: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        if entry.name in items or entry.name == "__metadata__":
            raise ValueError(f"the name {entry.name!r} is reserved or used twice in this header")
        items[entry.name] = _HeaderItem(entry.dtype, entry.shape, (entry.start, entry.stop))
    text = msgspec.json.encode(items)
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def header_length(data: bytes | memoryview) -> int:
    """Return the size of header and length field, from the first 8 bytes of the file."""
    return int(_LENGTH.unpack_from(data)[0]) + _LENGTH.size


def parse_header(data: bytes | memoryview) -> Header:
    """Parse the header at the start of `data`; raise ValueError if it is damaged or not whole."""
    if len(data) < _LENGTH.size or len(data) < (size := header_length(data)):
        raise ValueError("incomplete safetensors header")
    try:
        return _parse(bytes(data[_LENGTH.size : size]), size)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a safetensors header: {error}") from error


def _parse(text: bytes, size: int) -> Header:
    items = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    raw_metadata = items.pop("__metadata__", None)
    entries = []
    for name, raw in items.items():
        item = msgspec.json.decode(raw, type=_HeaderItem)
        check(_HeaderItem, item)
        entries.append(HeaderEntry(name, item.dtype, item.shape, *item.data_offsets))
    metadata = msgspec.json.decode(raw_metadata, type=dict[str, str]) if raw_metadata else {}
    return Header(tuple(entries), metadata, size)
