"""Columns as a safetensors file.

`mode_steps` and `ranks`; then for every field of a cell, `cells.<field>` `[steps, ranks]`, and of a
further block, `more.<field>` `[blocks]`. Whole numbers are differences to `cells.<field>.base`
`[steps]` or `more.<field>.base` `[1]`, in the smallest type that holds them, and left out when all
are 0. Metadata: format, attempt, mode, `layouts` and `names` (JSON), CRC32C of the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from smdist.coordination.columnar.columns import FIELDS, PRESENT, Array, Columns
from smdist.format.block import crc32c
from smdist.format.dtypes import HeaderEntry, decode, dtype_code, header_bytes, parse_header
from smdist.format.manifest import FORMAT
from smdist.identity import ModeKeys
from smdist.limits import MAX_CELLS, MAX_NUMBER, MAX_RANKS, MAX_TIME, check_total

__all__ = ["content_digest", "decode_columns", "encode_columns"]

_TEXTS = {"layout": "layouts", "name": "names"}
_CELL = {"row": np.dtype(np.int64), "column": np.dtype(np.int64)}
_MODES = {mode.value for mode in ModeKeys}


def encode_columns(columns: Columns) -> bytes:
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


def content_digest(data: bytes) -> str:
    """Return the last part of the key of a chunk with this content."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def decode_columns(data: bytes) -> Columns:
    """Read columns; raise ValueError if `encode_columns` did not write `data`."""
    header = parse_header(data)
    about = header.metadata
    if int(about.get("format", FORMAT)) > FORMAT:
        raise ValueError(f"written in format {about['format']}, this smdist reads up to {FORMAT}")
    body = memoryview(data)[header.size :]
    if f"{crc32c(body):08x}" != about.get("crc32c"):
        raise ValueError("the checksum is not that of the data")
    arrays = {e.name: decode(body[e.start : e.stop], e.dtype, e.shape) for e in header.entries}
    try:
        columns = _columns(arrays, about)
    except (KeyError, TypeError, OverflowError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a range of steps: {error!r}") from error
    _check(columns)
    return columns


def _columns(arrays: Mapping[str, Array], about: Mapping[str, str]) -> Columns:
    mode_steps, ranks = (_whole(arrays[name]) for name in ("mode_steps", "ranks"))
    shape, count = (len(mode_steps), len(ranks)), (1, int(about["blocks"]))
    # What is not stored is 0, so numbers alone could ask for any amount of memory.
    check_total("cells", [len(mode_steps) * len(ranks)], MAX_CELLS)
    check_total("further blocks", [count[1]], MAX_CELLS)
    return Columns(
        int(about["attempt"]),
        int(about["mode"]),
        mode_steps,
        ranks,
        {name: _loaded(f"cells.{name}", arrays, shape, FIELDS[name]) for name in FIELDS},
        {
            name: _loaded(f"more.{name}", arrays, count, dtype)[0]
            if count[1]
            else np.zeros(0, dtype)
            for name, dtype in {**FIELDS, **_CELL}.items()
        },
        msgspec.json.decode(about["layouts"], type=tuple[str, ...]),
        msgspec.json.decode(about["names"], type=tuple[str, ...]),
    )


def _check(columns: Columns) -> None:
    """Raise ValueError if a number is out of range or refers to a missing row or text."""
    if columns.attempt < 0 or columns.mode not in _MODES:
        raise ValueError(f"attempt {columns.attempt}, mode {columns.mode}")
    steps, ranks = len(columns.mode_steps), len(columns.ranks)
    for array, largest in ((columns.mode_steps, MAX_NUMBER), (columns.ranks, MAX_RANKS - 1)):
        _check_range("steps or ranks", array, largest)
        if (np.diff(array) <= 0).any():
            raise ValueError("steps or ranks are not in order")
    most = {"flags": 63, "layout": len(columns.layouts) - 1, "name": len(columns.names) - 1}
    for arrays in (columns.cells, columns.more):
        for name, dtype in FIELDS.items():
            kind = MAX_TIME if dtype.kind == "f" else MAX_NUMBER
            _check_range(name, arrays[name], most.get(name, kind))
    _check_range("row", columns.more["row"], steps - 1)
    _check_range("column", columns.more["column"], ranks - 1)


def _check_range(name: str, array: Array, most: int) -> None:
    if array.size and not (array.min() >= 0 and array.max() <= most):  # nor if it is no number
        raise ValueError(f"{name} from {array.min()} to {array.max()}; 0 to {most} are read")


def _whole(array: Array) -> Array:
    if array.dtype != np.int64 or array.ndim != 1:
        raise TypeError(f"{array.dtype} {list(array.shape)} are no whole numbers")
    return array


def _stored(name: str, array: Array, present: Array) -> Iterator[tuple[str, Array]]:
    """Yield the arrays to store for a field; cells without a block are 0."""
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
        return arrays[name].astype(dtype).reshape(shape)
    base = _whole(arrays[f"{name}.base"]).reshape(-1, 1)
    apart = arrays.get(name)
    if apart is None:
        whole = np.broadcast_to(base, shape)
    elif apart.dtype.kind != "u":
        raise TypeError(f"{name} is {apart.dtype}")
    else:
        whole = (apart.astype(np.uint64).reshape(shape) + base.view(np.uint64)).view(np.int64)
    return whole.astype(dtype)


def _tidied(columns: Columns) -> Columns:
    """Return columns with used texts only, sorted: the bytes must not depend on their order."""
    cells, more, texts = dict(columns.cells), dict(columns.more), {}
    present = cells["flags"] & PRESENT != 0
    for field, table in _TEXTS.items():
        ids, old = np.where(present, cells[field], 0), getattr(columns, table)
        used = np.unique(np.concatenate([[0], ids.ravel(), more[field]])).tolist()
        used.sort(key=old.__getitem__)  # the empty text stays number 0
        number = np.zeros(len(old), FIELDS[field])
        number[used] = np.arange(len(used))
        cells[field], more[field] = number[ids], number[more[field]]
        texts[table] = tuple(old[i] for i in used)
    return Columns(
        columns.attempt,
        columns.mode,
        columns.mode_steps,
        columns.ranks,
        cells,
        more,
        **texts,
    )
