"""The layout of one block (one step of one rank, or a piece of it) in a segment.

A block is contiguous and 8-byte aligned, its tensors ordered by element size, largest first:

    statistics   float64 [rows, columns]   when any tensor was reduced
    raw tensors of 8 bytes
    checksums    uint32 [tensors + 1]      of each raw tensor (0 if there is none), in the order
                                           of `Layout.tensors`, then of the statistics
    raw tensors of 4, 2, 1 bytes
    padding      uint8, to the next multiple of 8

A block with neither statistics nor raw tensors (only shapes were saved) has no bytes. Layouts repeat
from step to step and from rank to rank, so a manifest refers to them by digest.
"""

from __future__ import annotations

import hashlib
from math import prod
from typing import TYPE_CHECKING, Union

import msgspec

from smdist.errors import CorruptObject
from smdist.format.dtypes import is_known, itemsize
from smdist.format.stored_json import parse
from smdist.limits import (
    MAX_COLUMNS,
    MAX_STATISTICS_BYTES,
    MAX_TENSOR_BYTES,
    Bytes,
    Number,
    OptionalNumber,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Layout", "PlacementRequest", "TensorEntry", "arrange"]

_DIGEST_BYTES = 12

Buffer = Union[bytes, memoryview]  # noqa: UP007 (3.10)


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a block; `offset` -1: no raw bytes, `row` -1: no statistics.

    `order` is its index in the order of capture, which is also the order of `Layout.tensors`.
    `placement` is reserved for shards. `unmeasured`: the columns without a value in its row.
    """

    name: str
    dtype: str
    shape: tuple[Number, ...]
    offset: OptionalNumber
    nbytes: Bytes
    row: OptionalNumber
    collections: tuple[str, ...]
    order: Number
    placement: str | None = None
    unmeasured: tuple[str, ...] = ()


class Layout(msgspec.Struct, frozen=True):
    """Where everything in a block is. Offsets are relative to the block; -1 means that it has none."""

    columns: tuple[str, ...]
    rows: Number
    statistics_offset: OptionalNumber
    checksums_offset: OptionalNumber
    nbytes: Bytes
    tensors: tuple[TensorEntry, ...]
    version: Number = 1

    def check(self) -> None:
        """Raise ValueError if something lies outside the block or is too large to be read at once."""
        if self.rows:
            if len(self.columns) > MAX_COLUMNS or self.statistics_nbytes > MAX_STATISTICS_BYTES:
                size = f"[{self.rows}, {len(self.columns)}]"
                raise ValueError(
                    f"statistics of {size} float64 exceed {MAX_STATISTICS_BYTES} bytes"
                )
            self._check_inside("statistics", self.statistics_offset, self.statistics_nbytes)
        if self.nbytes:
            self._check_inside("checksums", self.checksums_offset, self.checksums_nbytes)
        for order, entry in enumerate(self.tensors):
            if entry.order != order or entry.row >= self.rows:
                raise ValueError(
                    f"tensor {entry.name!r} is not at index {order}, or its row does not exist"
                )
            if entry.offset >= 0:
                self._check_inside(f"tensor {entry.name!r}", entry.offset, entry.nbytes)
                _check_tensor(entry)

    def _check_inside(self, what: str, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{what} at {offset} with {nbytes} bytes, in a block of {self.nbytes}")

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: Buffer, digest: str, key: str, url: str = "") -> Layout:
        """Parse the layout in the object `key`; raise CorruptObject if it does not match its digest.

        Compares the bytes: another version may have encoded the same layout in another way.
        """
        if _digest(data) != digest:
            raise CorruptObject(url, key, "read", f"the content does not match the digest {digest}")
        return parse(data, Layout, key, url)

    def digest(self) -> str:
        return _digest(self.to_json())

    @property
    def statistics_nbytes(self) -> int:
        return self.rows * len(self.columns) * 8

    @property
    def checksums_nbytes(self) -> int:
        return 4 * (len(self.tensors) + 1) if self.checksums_offset >= 0 else 0


def _check_tensor(entry: TensorEntry) -> None:
    # An unknown type is an error only when the tensor is read; other tensors remain readable.
    size = itemsize(entry.dtype) if is_known(entry.dtype) else 0
    if entry.nbytes > MAX_TENSOR_BYTES:
        raise ValueError(f"tensor {entry.name!r}: {entry.nbytes} bytes, over {MAX_TENSOR_BYTES}")
    if size and prod(entry.shape) * size != entry.nbytes:
        shape = list(entry.shape)
        raise ValueError(f"tensor {entry.name!r}: {entry.nbytes} bytes for {entry.dtype} {shape}")


def _digest(data: Buffer) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


class PlacementRequest(msgspec.Struct, frozen=True):
    """A tensor that needs space in a block, as input of `arrange`."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    nbytes: int
    raw: bool
    reduced: bool
    collections: tuple[str, ...]
    unmeasured: tuple[str, ...] = ()


def arrange(requests: Sequence[PlacementRequest], columns: tuple[str, ...]) -> Layout:
    """Place every tensor. Pure: equal requests in equal order give an equal layout."""
    rows = sum(request.reduced for request in requests)
    columns = columns if rows else ()
    raw = sorted((i for i, w in enumerate(requests) if w.raw), key=lambda i: -requests[i].itemsize)
    offsets, checksums, nbytes = _assign_offsets(requests, raw, rows * len(columns) * 8)
    row = iter(range(rows))
    tensors = tuple(
        TensorEntry(
            name=request.name,
            dtype=request.dtype,
            shape=request.shape,
            offset=offsets.get(index, -1),
            nbytes=request.nbytes if request.raw else 0,
            row=next(row) if request.reduced else -1,
            collections=request.collections,
            order=index,
            unmeasured=request.unmeasured if request.reduced else (),
        )
        for index, request in enumerate(requests)
    )
    return Layout(columns, rows, 0 if rows else -1, checksums, nbytes, tensors)


def _assign_offsets(
    requests: Sequence[PlacementRequest], raw: Sequence[int], statistics: int
) -> tuple[dict[int, int], int, int]:
    """Return offsets of the raw tensors by index, offset of the checksums, size of the block."""
    if not raw and not statistics:
        return {}, -1, 0
    offsets: dict[int, int] = {}
    at, checksums, room = statistics, -1, 4 * (len(requests) + 1)
    for index in raw:
        if checksums < 0 and requests[index].itemsize <= 4:
            checksums, at = at, at + room
        offsets[index] = at
        at += requests[index].nbytes
    if checksums < 0:
        checksums, at = at, at + room
    return offsets, checksums, at + (-at % 8)
