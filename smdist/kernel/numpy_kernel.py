"""The kernel's functions in numpy: the reference for the compiled ones, used where these are missing.

Only `smdist.kernel` imports this; its head explains the columns and the guard.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
from typing import TYPE_CHECKING, Any, Final

import google_crc32c
import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["COLUMNS", "DTYPES", "ELEMENT_NAMES", "NumpyKernel", "merge", "values"]

COLUMNS: Final = (
    "count",
    "nans",
    "infs",
    "zeros",
    "sum",
    "m2",
    "abs_sum",
    "min",
    "max",
    "abs_min",
)

# The numpy type of a tensor's bytes, and the true element type where numpy has none.
_STORED: Final = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "BF16": "u2",
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U64": "u8",
    "U32": "u4",
    "U16": "u2",
    "U8": "u1",
    "BOOL": "u1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E4M3FNUZ": "u1",
    "F8_E5M2FNUZ": "u1",
    "F8_E8M0": "u1",
}
_ELEMENT: Final = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "BOOL": "bool",
}

ELEMENT_NAMES: Final = {
    code: _ELEMENT.get(code) or np.dtype(stored).name for code, stored in _STORED.items()
}
"""Code -> the name of the element type in numpy or ml_dtypes."""

DTYPES: Final = frozenset(_STORED)
"""Codes of the element types that have statistics: all but the complex ones."""

_MAX_OPENING = 32
_REST, _HEAD = struct.Struct(">BdBIBIBQBI"), struct.Struct("<II")
_GUARD_WHOLE, _GUARD_STRIDE, _GUARD_KEY = 2048, 512, 0x9E3779B97F4A7C15
_WORD, _LOW, _HALF = 1 << 64, np.uint64(0xFFFFFFFF), np.uint64(32)
_CHUNK = 1 << 14  # elements; as float64, with temporaries, they stay in the second-level cache


def values(address: int, count: int, dtype: str) -> Array:
    """Return the elements at an address as a flat array of a type that numpy can compute with.

    Two- and one-byte floats are widened (a copy); all others are a view of the memory.
    """
    stored = _STORED.get(dtype)
    if stored is None:
        raise ValueError(f"no statistics for dtype {dtype!r}")
    if not count:
        return np.zeros(0, stored)
    if not address:
        raise ValueError("null address")
    size = count * np.dtype(stored).itemsize
    memory = memoryview((ctypes.c_char * size).from_address(address))
    raw: Array = np.frombuffer(memory, stored)
    if dtype == "BF16":
        return np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
    if dtype == "F16":
        return raw.astype(np.float32)
    if dtype == "BOOL":
        return raw.astype(np.bool_)
    if dtype in _ELEMENT:
        elements: Array = raw.view(getattr(ml_dtypes, _ELEMENT[dtype]))
        return elements.astype(np.float32)
    return raw


def _total(parts: Array) -> float:
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond float64
        return float(np.sum(parts))


def merge(rows: Array) -> Array:
    """Return the row of base columns of the union of all elements (Chan's formula)."""
    rows = np.asarray(rows[rows[:, 0] > 0])
    if not len(rows):
        return np.array([0, 0, 0, 0, 0, 0, 0, np.inf, -np.inf, np.inf], np.float64)
    if len(rows) == 1:
        return np.array(rows[0])
    counts, sums = rows[:, 0], rows[:, 4]
    with np.errstate(all="ignore"):
        total = _total(sums)
        offsets = sums / counts - total / counts.sum()
        m2 = _total(rows[:, 5]) + _total(counts * offsets * offsets)
        return np.array(
            [
                *rows[:, :4].sum(axis=0),
                total,
                m2,
                _total(rows[:, 6]),
                rows[:, 7].min(),
                rows[:, 8].max(),
                rows[:, 9].min(),
            ],
            np.float64,
        )


def _chunk_row(elements: Array) -> list[float]:
    wide = elements.astype(np.float64)
    magnitudes = np.abs(wide)
    total, n = float(wide.sum()), wide.size
    deviations = wide - total / n
    rest = float(deviations.sum())
    np.multiply(deviations, deviations, out=deviations)
    m2 = float(deviations.sum()) - rest * rest / n  # np.dot would wake BLAS threads
    zeros, nans = n - np.count_nonzero(wide), np.count_nonzero(np.isnan(wide))
    infs = np.count_nonzero(np.isinf(wide))
    return [
        n,
        nans,
        infs,
        zeros,
        total,
        math.nan if infs or nans else max(m2, 0.0),
        float(magnitudes.sum()),
        float(wide.min()),
        float(wide.max()),
        float(magnitudes.min()),
    ]


def _range_guard(address: int, size: int, position: int) -> int:
    """Compute the same as `guard_of` in the compiled kernel."""
    if not size:
        return 0
    data = values(address, size, "U8")
    stride = 8 if size <= _GUARD_WHOLE else _GUARD_STRIDE
    words = np.ndarray(((size + stride - 8) // stride,), np.uint64, data, strides=(stride,))
    mixed = np.arange(len(words), dtype=np.uint64)
    mixed *= np.uint64(stride * _GUARD_KEY % _WORD)
    mixed += np.uint64((position + 1) * _GUARD_KEY % _WORD)
    mixed ^= words
    total = int(words.sum()) + int(np.dot(mixed & _LOW, mixed >> _HALF))
    last = int.from_bytes(data[-8:].tobytes().ljust(8, b"\0"), sys.byteorder)
    mixed_last = last ^ (position + size + 1) * _GUARD_KEY % _WORD
    total = (total + last + (mixed_last & 0xFFFFFFFF) * (mixed_last >> 32)) % _WORD
    return (total ^ total >> 32) & 0xFFFFFFFF


def _weights(first: int, count: int) -> Array:
    """Return splitmix64 of each index, made odd, as the compiled kernel does."""
    z = np.arange(first, first + count, dtype=np.uint64) + np.uint64(_GUARD_KEY)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z ^ z >> np.uint64(31)) | np.uint64(1))


class NumpyKernel:
    """The functions of `smdist.kernel._native` in numpy."""

    @staticmethod
    def copy(
        targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], origin: int, /
    ) -> int:
        if not len(targets) == len(sources) == len(sizes):
            raise ValueError("copy(): sequences of different lengths")
        for target, source, size in zip(targets, sources, sizes, strict=True):
            if size < 0 or (size and not (target and source)):
                raise ValueError("copy(): null address or negative size")
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        return NumpyKernel.guard(targets, sizes, origin)

    @staticmethod
    def guard(addresses: Sequence[int], sizes: Sequence[int], origin: int, /) -> int:
        if len(addresses) != len(sizes):
            raise ValueError("guard(): sequences of different lengths")
        for address, size in zip(addresses, sizes, strict=True):
            if size < 0 or (size and not address):
                raise ValueError("guard(): null address or negative size")
        ranges = zip(addresses, sizes, strict=True)
        return sum(_range_guard(at, size, at - origin) for at, size in ranges) & 0xFFFFFFFF

    @staticmethod
    def record(
        target: int,
        source: int,
        size: int,
        cursor: int,
        opening: bytes,
        when: float,
        kind: int,
        arena: int,
        offset: int,
        /,
    ) -> None:
        place = (ctypes.c_uint64 * 2).from_address(cursor) if cursor > 0 else [0, 0]
        frame = place[0]
        if (
            min(target, source, size, kind, arena, offset) < 0
            or not frame
            or frame % _HEAD.size
            or (size and not (target and source))
            or len(opening) > _MAX_OPENING
            or max(kind, arena) >= 1 << 32
        ):
            raise ValueError(
                "record(): invalid argument (null or unaligned address, or value out of range)"
            )
        ctypes.memmove(target, source, size)
        guard = _range_guard(target, size, 0)
        numbers = (0xCB, when, 0xCE, kind, 0xCE, arena, 0xCF, offset, 0xCE, guard)
        payload = opening + _REST.pack(*numbers)
        head = _HEAD.pack(len(payload), google_crc32c.value(payload))
        ctypes.memmove(frame + _HEAD.size, payload, len(payload))
        ctypes.memmove(frame, head, _HEAD.size)
        place[0] = frame + _HEAD.size + len(payload) + (-len(payload) % 8)
        place[1] += 1

    @staticmethod
    def statistics(
        addresses: Sequence[int],
        counts: Sequence[int],
        dtypes: Sequence[str],
        out: int,
        stride: int,
        /,
    ) -> None:
        if not len(addresses) == len(counts) == len(dtypes):
            raise ValueError("statistics(): sequences of different lengths")
        if len(addresses) and (not out or stride < 8 * len(COLUMNS)):
            raise ValueError(f"statistics(): null `out`, or `stride` below {8 * len(COLUMNS)}")
        for index, (count, dtype) in enumerate(zip(counts, dtypes, strict=True)):
            if dtype not in _STORED:
                raise ValueError(f"tensor {index}: no statistics for dtype {dtype!r}")
            if count < 0 or (count and not addresses[index]):
                raise ValueError(f"tensor {index}: null address or negative size")
        for index, (address, count, dtype) in enumerate(
            zip(addresses, counts, dtypes, strict=True)
        ):
            row = NumpyKernel._row(address, count, dtype)
            ctypes.memmove(out + index * stride, row.ctypes.data, row.nbytes)

    @staticmethod
    def _row(address: int, count: int, dtype: str) -> Array:
        itemsize = np.dtype(_STORED[dtype]).itemsize
        rows = []
        with np.errstate(all="ignore"):
            for at in range(0, count, _CHUNK):
                elements = values(address + at * itemsize, min(_CHUNK, count - at), dtype)
                rows.append(_chunk_row(elements))
        return merge(np.array(rows, np.float64).reshape(-1, len(COLUMNS)))

    @staticmethod
    def fingerprint(
        addresses: Sequence[int],
        counts: Sequence[int],
        dtypes: Sequence[str],
        firsts: Sequence[int],
        /,
    ) -> list[int]:
        if not len(addresses) == len(counts) == len(dtypes) == len(firsts):
            raise ValueError("fingerprint(): sequences of different lengths")
        found = []
        for address, count, dtype, first in zip(addresses, counts, dtypes, firsts, strict=True):
            if dtype not in _STORED:
                raise ValueError(f"no statistics for dtype {dtype!r}")
            if count < 0 or first < 0:
                raise ValueError("fingerprint(): negative size or index")
            size, total = np.dtype(_STORED[dtype]).itemsize, 0
            for at in range(0, count, _CHUNK):
                n = min(_CHUNK, count - at)
                bits = values(address + at * size, n, f"U{8 * size}").astype(np.uint64)
                if (
                    size == 8
                ):  # mixed first, or two flips of the topmost bit would cancel each other
                    bits *= np.uint64(0x9E3779B97F4A7C15)
                    bits ^= bits >> np.uint64(32)
                total += int(np.sum(bits * _weights(first + at, n), dtype=np.uint64))
            found.append(total % _WORD)
        return found

    @staticmethod
    def populate(address: int, nbytes: int) -> None:
        """Write the first byte of each page over itself; no other thread may write it meanwhile."""
        if nbytes < 0 or (nbytes and not address):
            raise ValueError("populate(): null address or negative size")
        page = os.sysconf("SC_PAGESIZE")
        at, end = address, address + nbytes
        while at < end:
            ctypes.memmove(at, at, 1)
            at = (at // page + 1) * page
