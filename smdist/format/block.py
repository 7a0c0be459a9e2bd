"""Read tensors and statistics out of a block: which bytes to fetch, and what they say.

A reader asks for spans, fetches them however it likes (coalesced, concurrently), adds the block's
offset (`StepEntry.offset`) itself, and hands the bytes back. Nothing is returned whose checksum
does not fit: CorruptObject names the object and the tensor.

A checksum is that of the tensor's bytes and of what they are (`identity`, then `label`), so bytes of another
step, block, tensor, rank or run do not pass for them, wherever they come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import numpy as np

from smdist.errors import CorruptObject
from smdist.format.dtypes import decode

if TYPE_CHECKING:
    from smdist.format.layout import Layout, TensorEntry
    from smdist.format.manifest import StepEntry

__all__ = [
    "STATISTICS",
    "ByteRange",
    "DataRanges",
    "ObjectLocation",
    "checksum_seed",
    "crc32c",
    "data_checksum",
    "entries_by_name",
    "header_label",
    "read_statistics",
    "read_tensor",
    "statistics_ranges",
    "statistics_row",
    "tensor_ranges",
]

Array = np.ndarray[Any, np.dtype[Any]]
STATISTICS = ".statistics"


class ByteRange(NamedTuple):
    """Bytes `[start, stop)`, from the start of the block."""

    start: int
    stop: int

    def shifted(self, offset: int) -> ByteRange:
        """The same bytes counted from the start of the object, for a block at `offset`."""
        return ByteRange(self.start + offset, self.stop + offset)


class DataRanges(NamedTuple):
    data: ByteRange
    checksum: ByteRange  # 4 bytes


class ObjectLocation(NamedTuple):
    """What an error names."""

    url: str
    key: str


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """`before`: of what comes before `data`."""
    # The C function takes no memoryview, writable or not; an array over it is no copy.
    if len(data) == 0:
        return before
    return int(google_crc32c.extend(before, np.frombuffer(data, np.uint8)))


def checksum_seed(session: str, entry: StepEntry) -> int:
    """What the checksums of a block begin with. A session is unique, and so is a block in it."""
    what = f"{session}/{entry.mode}/{entry.mode_step}/{entry.block}/{entry.layout}/"
    return crc32c(what.encode())


def header_label(name: str) -> str:
    """A tensor's name among our own, which begin with a dot: it cannot take one of these."""
    return f".{name}" if name.startswith(".") else name


def data_checksum(of_block: int, name: str, data: bytes | memoryview) -> int:
    """`of_block` by `identity`, `name` a label, or STATISTICS."""
    return crc32c(data, crc32c(name.encode(errors="surrogatepass"), of_block))


def entries_by_name(layout: Layout) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in layout.tensors}


def tensor_ranges(layout: Layout, entry: TensorEntry) -> DataRanges | None:
    """What `read_tensor` needs; None when the tensor has no raw bytes in this block."""
    if entry.offset < 0:
        return None
    data = ByteRange(entry.offset, entry.offset + entry.nbytes)
    return DataRanges(data, _checksum_span(layout, entry.order))


def statistics_ranges(layout: Layout) -> DataRanges | None:
    """What `read_statistics` needs: the rows of all tensors at once, they are few bytes."""
    if layout.rows == 0:
        return None
    start = layout.statistics_offset
    data = ByteRange(start, start + layout.statistics_nbytes)
    return DataRanges(data, _checksum_span(layout, len(layout.tensors)))


def _checksum_span(layout: Layout, index: int) -> ByteRange:
    start = layout.checksums_offset + 4 * index
    return ByteRange(start, start + 4)


def read_tensor(
    entry: TensorEntry, data: bytes, stored: bytes, place: ObjectLocation, of_block: int
) -> Array:
    """The tensor, over `data` (writable exactly when `data` is); `of_block` by `identity`."""
    found = data_checksum(of_block, header_label(entry.name), data)
    _verify(data, entry.nbytes, stored, found, f"tensor {entry.name!r}", place)
    try:
        return decode(data, entry.dtype, entry.shape)
    except ValueError as error:
        raise CorruptObject(*place, "read", f"tensor {entry.name!r}: {error}") from error


def read_statistics(
    layout: Layout, data: bytes, stored: bytes, place: ObjectLocation, of_block: int
) -> Array:
    """The float64 matrix `[rows, columns]`."""
    found = data_checksum(of_block, STATISTICS, data)
    _verify(data, layout.statistics_nbytes, stored, found, "statistics", place)
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


def _verify(
    data: bytes, nbytes: int, stored: bytes, found: int, what: str, place: ObjectLocation
) -> None:
    if len(data) != nbytes or len(stored) != 4:
        detail = f"{what}: the object ends too early ({len(data)} of {nbytes} bytes)"
        raise CorruptObject(*place, "read", detail)
    written = int.from_bytes(stored, "little")
    if written != found:
        detail = (
            f"{what}: CRC32C is {found:08x}, was {written:08x} when it was written: the bytes are "
            "damaged, or of something else"
        )
        raise CorruptObject(*place, "read", detail)
