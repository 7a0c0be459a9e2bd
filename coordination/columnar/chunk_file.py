"""Columns as a safetensors file.

`mode_steps` and `ranks`; then for every field of a cell, `cells.<field>` `[steps, ranks]`, and of a
further block, `more.<field>` `[blocks]`. Whole numbers are differences to `cells.<field>.base`
`[steps]` or `more.<field>.base` `[1]`, in the smallest type that holds them, and left out when all
are 0. Metadata: format, attempt, mode, `layouts` and `names` (JSON), CRC32C of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from smdist.codec import HeaderEntry, decode, dtype_code, header_bytes, parse_header
from smdist.coordination.columns import FIELDS, PRESENT, Array, Columns
from smdist.manifest import FORMAT
from smdist.pipeline.block import crc32c

__all__ = ["from_bytes", "to_bytes"]

_TEXTS = {"layout": "layouts", "name": "names"}


def to_bytes(columns: Columns) -> bytes:
    columns = _tidied(columns)
    arrays = {"mode_steps": columns.mode_steps, "ranks": columns.ranks}
    present = columns.cells["flags"] & PRESENT != 0
    for name in FIELDS:
        arrays.update(_stored(f"cells.{name}", columns.cells[name], present))
    if len(columns.more["row"]):
        for name, array in columns.more.items():
            stored = _stored(f"more.{name}", array[None, :], np.ones((1, len(array)), bool))
            arrays.update({key: value[0] if value.ndim == 2 else value for key, value in stored})
    # Largest elements first: no gaps, and every array aligned.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    entries, at = [], 0
    for name, array in ordered:
        entries.append(
            HeaderEntry(name, dtype_code(array.dtype), array.shape, at, at + array.nbytes)
        )
        at += array.nbytes
    data = b"".join(array.tobytes() for _, array in ordered)
    metadata = {
        "format": str(FORMAT),
        "attempt": str(columns.attempt),
        "mode": str(columns.mode),
        "blocks": str(len(columns.more["row"])),
        "layouts": msgspec.json.encode(columns.layouts).decode(),
        "names": msgspec.json.encode(columns.names).decode(),
        "crc32c": f"{crc32c(data):08x}",
    }
    return header_bytes(entries, metadata) + data


def from_bytes(data: bytes) -> Columns:
    """ValueError when `data` is not what `to_bytes` made."""
    header = parse_header(data)
    about = header.metadata
    if int(about.get("format", FORMAT)) > FORMAT:
        raise ValueError(f"written in format {about['format']}, this smdist reads up to {FORMAT}")
    body = memoryview(data)[header.size :]
    if f"{crc32c(body):08x}" != about.get("crc32c"):
        raise ValueError("the checksum is not that of the data")
    arrays = {e.name: decode(body[e.start : e.stop], e.dtype, e.shape) for e in header.entries}
    try:
        mode_steps, ranks = arrays["mode_steps"], arrays["ranks"]
        shape = (len(mode_steps), len(ranks))
        cells = {name: _loaded(f"cells.{name}", arrays, shape, FIELDS[name]) for name in FIELDS}
        kinds = {**FIELDS, "row": np.dtype(np.int64), "column": np.dtype(np.int64)}
        count = (1, int(about["blocks"]))
        more = {
            name: _loaded(f"more.{name}", arrays, count, dtype)[0]
            if count[1]
            else np.zeros(0, dtype)
            for name, dtype in kinds.items()
        }
        return Columns(
            int(about["attempt"]),
            int(about["mode"]),
            mode_steps,
            ranks,
            cells,
            more,
            msgspec.json.decode(about["layouts"], type=tuple[str, ...]),
            msgspec.json.decode(about["names"], type=tuple[str, ...]),
        )
    except (KeyError, msgspec.DecodeError) as error:
        raise ValueError(f"not a range of steps: {error!r}") from error


def _stored(name: str, array: Array, present: Array) -> Iterator[tuple[str, Array]]:
    """What is kept of a field; cells without a block do not count."""
    if array.dtype.kind == "f":
        yield name, np.where(present, array, 0.0)
        return
    wide = array.astype(np.int64)
    base = np.min(wide, axis=1, where=present, initial=np.iinfo(np.int64).max)
    base = np.where(present.any(axis=1), base, 0)
    # Modulo 2**64, so that no difference is too large.
    apart = np.where(present, wide.view(np.uint64) - base.view(np.uint64)[:, None], np.uint64(0))
    if name == "cells.flags":
        apart, base = np.where(present, array, 0), np.zeros_like(base)
    yield f"{name}.base", base
    most = int(apart.max(initial=0))
    if most:
        yield name, apart.astype(np.min_scalar_type(most))


def _loaded(
    name: str, arrays: Mapping[str, Array], shape: tuple[int, int], dtype: np.dtype[Any]
) -> Array:
    if dtype.kind == "f":
        return arrays[name].reshape(shape)
    base = arrays[f"{name}.base"].reshape(-1, 1)
    apart = arrays.get(name)
    if apart is None:
        whole = np.broadcast_to(base, shape)
    else:
        whole = (apart.astype(np.uint64).reshape(shape) + base.view(np.uint64)).view(np.int64)
    return whole.astype(dtype)


def _tidied(columns: Columns) -> Columns:
    """With the texts that are used alone."""
    cells, more, texts = dict(columns.cells), dict(columns.more), {}
    present = cells["flags"] & PRESENT != 0
    for field, table in _TEXTS.items():
        ids = np.where(present, cells[field], 0)
        used = np.unique(np.concatenate([[0], ids.ravel(), more[field]]))
        cells[field] = np.searchsorted(used, ids).astype(FIELDS[field])
        more[field] = np.searchsorted(used, more[field]).astype(FIELDS[field])
        old = getattr(columns, table)
        texts[table] = tuple(old[i] for i in used.tolist())
    return Columns(
        columns.attempt,
        columns.mode,
        columns.mode_steps,
        columns.ranks,
        cells,
        more,
        **texts,
    )
