"""Compose blocks into a segment, which is a valid safetensors file. Pure; called by the uploader.

Names in its header (layouts have the true names):

    <mode>/<mode_step>/<tensor>            train/12/gradient/Net_fc1.weight
    <mode>/<mode_step>.<block>/<tensor>    a later block of a step in the same segment
    <prefix>/.statistics .crc32c .padding

A tensor whose name begins with a dot gets a second dot, so that it cannot take a reserved name.
Metadata: format, run_id, session, worker, attempt, seq; and, as JSON: `layouts` (prefix -> digest),
`blocks` (prefix -> block), `columns` and `rows` of the statistics (digest -> names), `dtypes` (name ->
true type, where the header has another).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from smdist.format.block import STATISTICS, checksum_seed, data_checksum, header_label
from smdist.format.dtypes import HeaderEntry, header_bytes, itemsize, portable_form
from smdist.format.layout import Layout, PlacementRequest, arrange
from smdist.format.manifest import FORMAT, Session, StepEntry
from smdist.identity import worker_name

if TYPE_CHECKING:
    from smdist.format.fold import Block, Source
    from smdist.format.journal_records import TensorSpec
    from smdist.storage.store import Buffer

__all__ = ["ArenaReader", "Segment", "compose", "header_name", "mark_continued"]

ArenaReader = Callable[[int, int, int], memoryview]
"""`(arena, offset, nbytes)` -> a view of these bytes, valid until the batch is acknowledged."""


class Segment(NamedTuple):
    """An object to store, and its entries for the manifest.

    `chunks` are its bytes in order; raw tensors are views into the arenas. If no block has bytes to
    store, there are no chunks and `key` is empty. `layouts` must be stored before the manifest.
    """

    key: str
    chunks: tuple[Buffer, ...]
    nbytes: int
    entries: tuple[StepEntry, ...]
    layouts: dict[str, Layout]


class _Placed(NamedTuple):
    """A block that is not empty, and where it begins after the header."""

    block: Block
    layout: Layout
    digest: str
    prefix: str
    start: int


def compose(
    blocks: Sequence[Block], read: ArenaReader, *, key: str, run_id: str, session: Session, seq: int
) -> Segment:
    """Compose `blocks` into the object `key`. Equal blocks and bytes give an equal object."""
    placed = _place(blocks)
    chunks: list[Buffer] = []
    items: list[HeaderEntry] = []
    for index, one in placed.items():
        entry = _entry(blocks[index], one, key, 0)
        chunks += _chunks(one.block, one.layout, read, checksum_seed(session.session, entry))
        items += _items(one)
    header = b""
    if chunks:
        about = {
            "format": str(FORMAT),
            "run_id": run_id,
            "session": session.session,
            "worker": worker_name(session.rank),
            "attempt": str(session.attempt),
            "seq": str(seq),
        }
        header = header_bytes(items, {**about, **_explain(placed.values())})
        chunks.insert(0, header)
    else:
        key = ""
    return Segment(
        key=key,
        chunks=tuple(chunks),
        nbytes=len(header) + sum(one.layout.nbytes for one in placed.values()),
        entries=tuple(_entry(b, placed.get(i), key, len(header)) for i, b in enumerate(blocks)),
        layouts={one.digest: one.layout for one in placed.values()},
    )


def mark_continued(segment: Segment, begun: set[tuple[int, int]]) -> Segment:
    """Mark the entries that continue a step of `begun`, the steps that were left open before.

    Updates `begun` to the steps that are open after this segment.
    """
    entries = []
    for entry in segment.entries:
        key = (entry.mode, entry.mode_step)
        entries.append(msgspec.structs.replace(entry, continues=key in begun))
        (begun.discard if entry.closed else begun.add)(key)
    return segment._replace(entries=tuple(entries))


def header_name(prefix: str, name: str) -> str:
    """Return the name of a tensor in a segment's header."""
    return f"{prefix}/{header_label(name)}"


def _place(blocks: Sequence[Block]) -> dict[int, _Placed]:
    placed: dict[int, _Placed] = {}
    prefixes: set[str] = set()
    start = 0
    for index, block in enumerate(blocks):
        if not block.sources:
            continue
        prefix = f"{block.ref.mode.name.lower()}/{block.ref.mode_step}"
        if prefix in prefixes:
            prefix = f"{prefix}.{block.block}"
        prefixes.add(prefix)
        layout = _layout(block)
        placed[index] = _Placed(block, layout, layout.digest(), prefix, start)
        start += layout.nbytes
    return placed


def _layout(block: Block) -> Layout:
    # In order of first use. Every part begins with the base columns, so these come first.
    columns = tuple(dict.fromkeys(c for source in block.sources for c in source.kind.columns))
    requests = []
    for source in block.sources:
        unmeasured = tuple(c for c in columns if c not in source.kind.columns)
        requests += [_request(spec, unmeasured) for spec in source.tensors]
    return arrange(requests, columns)


def _request(spec: TensorSpec, unmeasured: tuple[str, ...]) -> PlacementRequest:
    # Sorted by the element size of the portable form, because readers align by that.
    shown, _ = portable_form(spec.dtype, spec.shape, spec.nbytes)
    return PlacementRequest(
        name=spec.name,
        dtype=spec.dtype,
        itemsize=itemsize(shown),
        shape=spec.shape,
        nbytes=spec.nbytes,
        raw=spec.offset >= 0,
        reduced=spec.row >= 0,
        collections=spec.collections,
        unmeasured=unmeasured,
    )


def _chunks(block: Block, layout: Layout, read: ArenaReader, seed: int) -> list[Buffer]:
    """Return the bytes of a block in order: one buffer per tensor, statistics, checksums, padding."""
    checksums = np.zeros(len(layout.tensors) + 1, "<u4")
    at: list[tuple[int, Buffer]] = []
    entries = iter(layout.tensors)
    for source in block.sources:
        for spec in source.tensors:
            entry = next(entries)
            if entry.offset >= 0:
                view = _bytes(source, spec.offset, spec.nbytes, read)
                checksums[entry.order] = data_checksum(seed, header_label(entry.name), view)
                at.append((entry.offset, view))
    if layout.rows:
        matrix = _statistics(block, layout, read).tobytes()
        checksums[-1] = data_checksum(seed, STATISTICS, matrix)
        at.append((layout.statistics_offset, matrix))
    if layout.checksums_offset >= 0:
        at.append((layout.checksums_offset, checksums.tobytes()))
    at.sort(key=lambda item: item[0])
    filled = sum(len(chunk) for _, chunk in at)
    padding: list[Buffer] = [bytes(layout.nbytes - filled)] if layout.nbytes > filled else []
    return [chunk for _, chunk in at] + padding


def _statistics(block: Block, layout: Layout, read: ArenaReader) -> np.ndarray[Any, np.dtype[Any]]:
    matrix = np.full((layout.rows, len(layout.columns)), np.nan, "<f8")
    row = 0
    for source in block.sources:
        rows = [spec.row for spec in source.tensors if spec.row >= 0]
        if rows:
            width = len(source.kind.columns)
            height = 1 + max(spec.row for spec in source.kind.tensors)
            part = np.frombuffer(_bytes(source, 0, height * width * 8, read), "<f8")
            where = [layout.columns.index(column) for column in source.kind.columns]
            matrix[row : row + len(rows), where] = part.reshape(height, width)[rows]
            row += len(rows)
    return matrix


def _bytes(source: Source, offset: int, nbytes: int, read: ArenaReader) -> memoryview:
    if source.arena < 0:
        return memoryview(source.data)[offset : offset + nbytes]
    return read(source.arena, source.offset + offset, nbytes)


def _items(one: _Placed) -> list[HeaderEntry]:
    layout, start, prefix = one.layout, one.start, one.prefix
    items = []
    used = layout.statistics_nbytes + layout.checksums_nbytes
    for entry in layout.tensors:
        if entry.offset >= 0:
            shown = portable_form(entry.dtype, entry.shape, entry.nbytes)
            at, used = start + entry.offset, used + entry.nbytes
            name = header_name(prefix, entry.name)
            items.append(HeaderEntry(name, *shown, at, at + entry.nbytes))
    if layout.rows:
        at, shape = start + layout.statistics_offset, (layout.rows, len(layout.columns))
        end = at + layout.statistics_nbytes
        items.append(HeaderEntry(f"{prefix}/{STATISTICS}", "F64", shape, at, end))
    if layout.checksums_offset >= 0:
        at, size = start + layout.checksums_offset, layout.checksums_nbytes
        items.append(HeaderEntry(f"{prefix}/.crc32c", "U32", (size // 4,), at, at + size))
    if used < layout.nbytes:
        end, size = start + layout.nbytes, layout.nbytes - used
        items.append(HeaderEntry(f"{prefix}/.padding", "U8", (size,), end - size, end))
    return items


def _explain(placed: Iterable[_Placed]) -> dict[str, str]:
    """Return the metadata for readers without layouts: rows, columns and true types."""
    layouts: dict[str, str] = {}
    blocks: dict[str, int] = {}
    columns: dict[str, tuple[str, ...]] = {}
    rows: dict[str, list[str]] = {}
    dtypes: dict[str, str] = {}
    for one in placed:
        layouts[one.prefix], blocks[one.prefix] = one.digest, one.block.block
        if one.layout.rows and one.digest not in columns:
            columns[one.digest] = one.layout.columns
            rows[one.digest] = [entry.name for entry in one.layout.tensors if entry.row >= 0]
        for entry in one.layout.tensors:
            shown, _ = portable_form(entry.dtype, entry.shape, entry.nbytes)
            if entry.offset >= 0 and shown != entry.dtype:
                dtypes[header_name(one.prefix, entry.name)] = entry.dtype
    metadata = {
        "layouts": layouts,
        "blocks": blocks,
        "columns": columns,
        "rows": rows,
        "dtypes": dtypes,
    }
    return {name: msgspec.json.encode(value).decode() for name, value in metadata.items() if value}


def _entry(block: Block, placed: _Placed | None, key: str, header: int) -> StepEntry:
    mode, mode_step, step = block.ref
    return StepEntry(
        mode=mode.value,
        mode_step=mode_step,
        step=step,
        block=block.block,
        closed=block.closed,
        layout=placed.digest if placed else "",
        segment=key if placed else "",
        offset=placed.start + header if placed else 0,
        began=block.began,
        time=block.time,
        planned=block.planned,
    )
