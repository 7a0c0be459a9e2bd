"""Read tensors and statistics out of a block: which bytes to fetch, and what they say.

A reader asks for spans, fetches them however it likes (coalesced, concurrently), adds the block's
offset (`StepEntry.offset`) itself, and hands the bytes back. Nothing is returned whose checksum
does not fit: CorruptObject names the object and the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import numpy as np

from smdist.codec import decode
from smdist.errors import CorruptObject

if TYPE_CHECKING:
    from smdist.layout import Layout, TensorEntry

__all__ = [
    "Place",
    "Span",
    "Spans",
    "crc32c",
    "entries_by_name",
    "read_statistics",
    "read_tensor",
    "statistics_row",
    "statistics_spans",
    "tensor_spans",
]

Array = np.ndarray[Any, np.dtype[Any]]


class Span(NamedTuple):
    """Bytes `[start, stop)`, from the start of the block."""

    start: int
    stop: int

    def within(self, offset: int) -> Span:
        """The same bytes counted from the start of the object, for a block at `offset`."""
        return Span(self.start + offset, self.stop + offset)


class Spans(NamedTuple):
    data: Span
    checksum: Span  # 4 bytes


class Place(NamedTuple):
    """What an error names."""

    url: str
    key: str


def crc32c(data: bytes | bytearray | memoryview) -> int:
    # The C function takes no memoryview, writable or not; an array over it is no copy.
    if len(data) == 0:
        return 0
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


def entries_by_name(layout: Layout) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in layout.tensors}


def tensor_spans(layout: Layout, entry: TensorEntry) -> Spans | None:
    """What `read_tensor` needs; None when the tensor has no raw bytes in this block."""
    if entry.offset < 0:
        return None
    data = Span(entry.offset, entry.offset + entry.nbytes)
    return Spans(data, _checksum_span(layout, entry.order))


def statistics_spans(layout: Layout) -> Spans | None:
    """What `read_statistics` needs: the rows of all tensors at once, they are few bytes."""
    if layout.rows == 0:
        return None
    start = layout.statistics_offset
    data = Span(start, start + layout.statistics_nbytes)
    return Spans(data, _checksum_span(layout, len(layout.tensors)))


def _checksum_span(layout: Layout, index: int) -> Span:
    start = layout.checksums_offset + 4 * index
    return Span(start, start + 4)


def read_tensor(entry: TensorEntry, data: bytes, checksum: bytes, place: Place) -> Array:
    """The tensor, over `data` (writable exactly when `data` is)."""
    _verify(data, entry.nbytes, checksum, f"tensor {entry.name!r}", place)
    try:
        return decode(data, entry.dtype, entry.shape)
    except ValueError as error:
        raise CorruptObject(*place, "read", f"tensor {entry.name!r}: {error}") from error


def read_statistics(layout: Layout, data: bytes, checksum: bytes, place: Place) -> Array:
    """The float64 matrix `[rows, columns]`."""
    _verify(data, layout.statistics_nbytes, checksum, "statistics", place)
    return np.frombuffer(data, "<f8").reshape(layout.rows, len(layout.columns))


def statistics_row(
    layout: Layout, entry: TensorEntry, matrix: Array
) -> tuple[tuple[str, ...], Array] | None:
    """What was measured of a tensor: columns and their values; None when nothing was."""
    if entry.row < 0:
        return None
    row = matrix[entry.row]
    if not entry.unmeasured:
        return layout.columns, row
    kept = [i for i, column in enumerate(layout.columns) if column not in entry.unmeasured]
    return tuple(layout.columns[i] for i in kept), row[kept]


def _verify(data: bytes, nbytes: int, checksum: bytes, what: str, place: Place) -> None:
    if len(data) != nbytes or len(checksum) != 4:
        detail = f"{what}: the object ends too early ({len(data)} of {nbytes} bytes)"
        raise CorruptObject(*place, "read", detail)
    stored, found = int.from_bytes(checksum, "little"), crc32c(data)
    if stored != found:
        detail = f"{what}: CRC32C is {found:08x}, was {stored:08x} when it was written"
        raise CorruptObject(*place, "read", detail)
