"""Read tensors and statistics from a block: which bytes to fetch, and how to check and decode them.

A reader asks for the byte ranges, fetches them in any way (coalesced, concurrently), adds the block's
offset (`StepEntry.offset`), and passes the bytes back. Data whose checksum does not match is never
returned: CorruptObject names the object and the tensor.

A checksum covers the identity of the data (`checksum_seed`, then the tensor's label) and the bytes. So
bytes of another step, block, tensor, rank or run do not match, wherever they come from.
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
    """The bytes `[start, stop)`, counted from the start of the block."""

    start: int
    stop: int

    def shifted(self, offset: int) -> ByteRange:
        """Return the range counted from the start of the object, for a block at `offset`."""
        return ByteRange(self.start + offset, self.stop + offset)


class DataRanges(NamedTuple):
    """Where the data is, and where its checksum is."""

    data: ByteRange
    checksum: ByteRange  # 4 bytes


class ObjectLocation(NamedTuple):
    """The object that an error names."""

    url: str
    key: str


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the CRC32C of `data`, continued from `before`, the CRC32C of the preceding bytes."""
    # The C function accepts no memoryview; an array over one makes no copy.
    if len(data) == 0:
        return before
    return int(google_crc32c.extend(before, np.frombuffer(data, np.uint8)))


def checksum_seed(session: str, entry: StepEntry) -> int:
    """Return the CRC32C of a block's identity. A session is unique, and so is a block in it."""
    what = f"{session}/{entry.mode}/{entry.mode_step}/{entry.block}/{entry.layout}/"
    return crc32c(what.encode())


def header_label(name: str) -> str:
    """Return a tensor's name in the header. Reserved names begin with one dot, so its own get two."""
    return f".{name}" if name.startswith(".") else name


def data_checksum(seed: int, label: str, data: bytes | memoryview) -> int:
    """Return the checksum of a tensor (`label` by `header_label`) or of the statistics (STATISTICS)."""
    return crc32c(data, crc32c(label.encode(errors="surrogatepass"), seed))


def entries_by_name(layout: Layout) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in layout.tensors}


def tensor_ranges(layout: Layout, entry: TensorEntry) -> DataRanges | None:
    """Return what `read_tensor` needs; None if the tensor has no raw bytes in this block."""
    if entry.offset < 0:
        return None
    data = ByteRange(entry.offset, entry.offset + entry.nbytes)
    return DataRanges(data, _checksum_range(layout, entry.order))


def statistics_ranges(layout: Layout) -> DataRanges | None:
    """Return what `read_statistics` needs: the rows of all tensors, as they are few bytes."""
    if layout.rows == 0:
        return None
    start = layout.statistics_offset
    data = ByteRange(start, start + layout.statistics_nbytes)
    return DataRanges(data, _checksum_range(layout, len(layout.tensors)))


def _checksum_range(layout: Layout, index: int) -> ByteRange:
    start = layout.checksums_offset + 4 * index
    return ByteRange(start, start + 4)


def read_tensor(
    entry: TensorEntry, data: bytes | memoryview, stored: bytes, location: ObjectLocation, seed: int
) -> Array:
    """Return the tensor as a view of `data`; raise CorruptObject if the checksum differs."""
    found = data_checksum(seed, header_label(entry.name), data)
    _verify(data, entry.nbytes, stored, found, f"tensor {entry.name!r}", location)
    try:
        return decode(data, entry.dtype, entry.shape)
    except ValueError as error:
        raise CorruptObject(*location, "read", f"tensor {entry.name!r}: {error}") from error


def read_statistics(
    layout: Layout, data: bytes, stored: bytes, location: ObjectLocation, seed: int
) -> Array:
    """Return the float64 matrix `[rows, columns]`; raise CorruptObject if the checksum differs."""
    found = data_checksum(seed, STATISTICS, data)
    _verify(data, layout.statistics_nbytes, stored, found, "statistics", location)
    return np.frombuffer(data, "<f8").reshape(layout.rows, len(layout.columns))


def statistics_row(
    layout: Layout, entry: TensorEntry, matrix: Array
) -> tuple[tuple[str, ...], Array] | None:
    """Return the measured columns of a tensor and their values; None if nothing was measured."""
    if entry.row < 0:
        return None
    row = matrix[entry.row]
    if not entry.unmeasured:
        return layout.columns, row
    kept = [i for i, column in enumerate(layout.columns) if column not in entry.unmeasured]
    return tuple(layout.columns[i] for i in kept), row[kept]


def _verify(
    data: bytes | memoryview,
    nbytes: int,
    stored: bytes,
    found: int,
    what: str,
    location: ObjectLocation,
) -> None:
    if len(data) != nbytes or len(stored) != 4:
        detail = f"{what}: the object is too short ({len(data)} of {nbytes} bytes)"
        raise CorruptObject(*location, "read", detail)
    written = int.from_bytes(stored, "little")
    if written != found:
        detail = (
            f"{what}: CRC32C is {found:08x}, but {written:08x} was stored; the bytes are damaged or "
            "belong to other data"
        )
        raise CorruptObject(*location, "read", detail)
