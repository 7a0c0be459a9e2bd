"""How one block (one step of one rank, or a piece of it) lies in a segment.

A block is contiguous and 8-byte aligned, its tensors ordered by element size, largest first:

    statistics   float64 [rows, columns]   when any tensor was reduced
    raw tensors of 8 bytes
    checksums    uint32 [tensors]          CRC32C of each raw tensor's bytes (0 where none)
    raw tensors of 4, 2, 1 bytes
    padding      uint8, to the next multiple of 8

Layouts repeat from step to step and from rank to rank, so a manifest names them by `digest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

__all__ = ["Layout", "TensorEntry"]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a block; `offset` -1: no raw bytes, `row` -1: no statistics.

    `order` is its place in the order of capture within the block. `placement` is kept for shards.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    row: int
    collections: tuple[str, ...]
    order: int
    placement: str | None = None


class Layout(msgspec.Struct, frozen=True):
    columns: tuple[str, ...]
    rows: int
    statistics_offset: int
    checksums_offset: int
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    version: int = 1

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> Layout:
        return msgspec.json.decode(data, type=Layout)

    def digest(self) -> str:
        return hashlib.blake2b(self.to_json(), digest_size=12).hexdigest()


class Wish(msgspec.Struct, frozen=True):
    """A tensor that wants a place in a block: what `arrange` needs to know."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    nbytes: int
    raw: bool
    reduced: bool
    collections: tuple[str, ...]


def arrange(wishes: Sequence[Wish], columns: tuple[str, ...]) -> Layout:
    """Give every wish its place. Pure: equal wishes in equal order give an equal layout."""
    rows = sum(wish.reduced for wish in wishes)
    statistics = rows * len(columns) * 8
    offsets = dict.fromkeys(range(len(wishes)), -1)
    at, checksums = statistics, -1
    order = sorted((i for i, w in enumerate(wishes) if w.raw), key=lambda i: -wishes[i].itemsize)
    for index in order:
        if checksums < 0 and wishes[index].itemsize <= 4:
            checksums, at = at, at + 4 * len(wishes)
        offsets[index] = at
        at += wishes[index].nbytes
    if checksums < 0:
        checksums, at = at, at + 4 * len(wishes)
    row = iter(range(rows))
    tensors = tuple(
        TensorEntry(
            name=wish.name,
            dtype=wish.dtype,
            shape=wish.shape,
            offset=offsets[index],
            nbytes=wish.nbytes if wish.raw else 0,
            row=next(row) if wish.reduced else -1,
            collections=wish.collections,
            order=index,
        )
        for index, wish in enumerate(wishes)
    )
    return Layout(columns, rows, 0 if rows else -1, checksums, at + (-at % 8), tensors)
