from __future__ import annotations

import json
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from smdist.errors import CorruptObject
from smdist.format.block import (
    DataRanges,
    ObjectLocation,
    checksum_seed,
    entries_by_name,
    read_statistics,
    read_tensor,
    statistics_ranges,
    statistics_row,
    tensor_ranges,
)
from smdist.format.dtypes import dtype_code, parse_header
from smdist.format.fold import Block, fold
from smdist.format.manifest import Session
from smdist.format.segment import Segment, compose, header_name
from smdist.identity import ModeKeys
from tests.support.journal_model import Array, Scribe

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HERE = ObjectLocation("/runs/one", "segments/s")
SESSION = Session("me", 3, 4, 1, "all", 0.0, "host", 1, "")


def write(scribe: Scribe, blocks: Sequence[Block] | None = None) -> Segment:
    blocks = fold(scribe.pieces).blocks if blocks is None else blocks
    return compose(blocks, scribe.read, key=HERE.key, run_id="run", session=SESSION, seq=4)


def of_block(segment: Segment, index: int = 0) -> int:
    return checksum_seed(SESSION.session, segment.entries[index])


def read_back(segment: Segment, name: str, index: int = 0, data: bytes = b"") -> Array:
    data = data or b"".join(segment.chunks)
    step = segment.entries[index]
    layout = segment.layouts[step.layout]
    entry = entries_by_name(layout)[name]
    spans = tensor_ranges(layout, entry)
    assert spans is not None
    raw, crc = (data[slice(*span.shifted(step.offset))] for span in spans)
    return read_tensor(entry, raw, crc, HERE, of_block(segment, index))


EVERY_DTYPE = [
    *(
        np.dtype(t)
        for t in [
            "f8",
            "f4",
            "f2",
            "i8",
            "i4",
            "i2",
            "i1",
            "u8",
            "u4",
            "u2",
            "u1",
            "?",
            "c8",
            "c16",
        ]
    ),
    *(np.dtype(getattr(ml_dtypes, t)) for t in ("bfloat16", "float8_e4m3fn", "float8_e5m2")),
    *(np.dtype(getattr(ml_dtypes, t)) for t in ("float8_e4m3fnuz", "float8_e5m2fnuz")),
]


@pytest.mark.torch
def test_every_dtype_is_readable_by_safetensors_and_by_us(tmp_path: Path) -> None:
    import torch

    values = {
        f"{d.name}{list(shape)}": np.arange(int(np.prod(shape))).reshape(shape).astype(d)
        for d in EVERY_DTYPE
        for shape in ((3,), (), (0,), (2, 0, 3), (1, 2, 2))
    }
    scribe = Scribe()
    scribe.part(values, 0)
    segment = write(scribe)
    path = tmp_path / "s.safetensors"
    path.write_bytes(b"".join(segment.chunks))
    with safe_open(path, framework="pt") as file:
        told = json.loads(file.metadata()["dtypes"])
        for name, value in values.items():
            outside = file.get_tensor(f"train/0/{name}")
            found = outside.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert found == value.tobytes(), name
            if value.dtype.name.startswith("complex"):
                assert outside.shape == (*value.shape, 2)
                assert told[f"train/0/{name}"] == dtype_code(value.dtype)
            else:
                assert outside.shape == value.shape
    for name, value in values.items():
        again = read_back(segment, name)
        assert (again.dtype, again.shape) == (value.dtype, value.shape)
        assert again.tobytes() == value.tobytes()


ODD_NAMES = [
    "a/b",
    "../../etc/passwd",
    "..",
    ".",
    "",
    "/abs",
    "größe/重み/🔥",
    "quote\"s'\\",
    "new\nline\0",
    "n" * 300,
    "Case",
    "case",
    ".statistics",
    "..statistics",
    ".crc32c",
    ".padding",
    "__metadata__",
]


def test_any_name_is_readable_by_safetensors(tmp_path: Path) -> None:
    values = {name: np.array([i], "f4") for i, name in enumerate(ODD_NAMES)}
    scribe = Scribe()
    scribe.part(values, 5, statistics={ODD_NAMES[0]: {"sum": 1.0}})
    scribe.part({"small": np.ones(3, "u1")}, 5)
    segment = write(scribe)
    for name, value in values.items():
        assert read_back(segment, name) == value
    path = tmp_path / "s.safetensors"
    path.write_bytes(b"".join(segment.chunks))
    with safe_open(path, framework="np") as file:
        keys = set(file.keys())
        own = {f"train/5/.{n}" for n in ("statistics", "crc32c", "padding")}
        assert keys == own | {header_name("train/5", n) for n in [*ODD_NAMES, "small"]}
        for name, value in values.items():
            assert file.get_tensor(header_name("train/5", name)) == value
        assert file.get_tensor("train/5/..statistics") == ODD_NAMES.index(".statistics")
        assert file.get_tensor("train/5/...statistics") == ODD_NAMES.index("..statistics")
        assert file.get_tensor("train/5/.statistics").tolist() == [[1.0]]


def test_several_blocks_of_a_step_in_one_segment(tmp_path: Path) -> None:
    scribe = Scribe()
    scribe.part({"w": np.arange(3.0)}, 2)
    scribe.part({"e": np.ones(5, "u1")}, 2, mode=ModeKeys.EVAL)
    scribe.part({"w": np.arange(4.0)}, 2)
    blocks = [*fold(scribe.pieces[:2]).blocks, *fold(scribe.pieces[2:]).blocks]
    segment = write(scribe, blocks)
    assert [read_back(segment, n, i).size for i, n in enumerate("wew")] == [3, 5, 4]
    path = tmp_path / "s.safetensors"
    path.write_bytes(b"".join(segment.chunks))
    with safe_open(path, framework="np") as file:
        assert file.get_tensor("train/2/w").size == 3
        assert file.get_tensor("train/2.2/w").size == 4
        assert file.get_tensor("eval/2/e").size == 5
        assert file.metadata()["worker"] == "worker_3"
        assert file.metadata()["attempt"] == "1"
        assert file.metadata()["seq"] == "4"


def test_statistics_of_parts_with_different_columns() -> None:
    scribe = Scribe()
    a, b = np.ones(2, "f4"), np.ones(3, "f4")
    scribe.part(
        {"a": a, "skipped": a, "c": a},
        0,
        raw=False,
        statistics={"c": {"sum": 5.0, "max": 6.0}, "a": {"sum": 1.0, "max": 2.0}},
    )
    scribe.part({"b": b}, 0, statistics={"b": {"sum": 3.0, "max": 4.0, "median": np.nan}})
    segment = write(scribe)
    (layout,) = segment.layouts.values()
    spans = statistics_ranges(layout)
    assert spans is not None
    data = b"".join(segment.chunks)
    raw, crc = (data[slice(*span.shifted(segment.entries[0].offset))] for span in spans)
    matrix = read_statistics(layout, raw, crc, HERE, of_block(segment))
    rows = {n: statistics_row(layout, e, matrix) for n, e in entries_by_name(layout).items()}
    assert rows["skipped"] is None
    assert rows["a"] is not None
    assert rows["b"] is not None
    assert rows["c"] is not None
    assert (rows["a"][0], rows["a"][1].tolist()) == (("sum", "max"), [1.0, 2.0])
    assert (rows["c"][0], rows["c"][1].tolist()) == (("sum", "max"), [5.0, 6.0])
    assert rows["b"][0] == ("sum", "max", "median")
    assert np.isnan(rows["b"][1][2])
    assert tensor_ranges(layout, entries_by_name(layout)["a"]) is None
    header = parse_header(data)
    assert json.loads(header.metadata["rows"]) == {layout.digest(): ["a", "c", "b"]}


def test_raw_tensors_are_views_into_the_buffer() -> None:
    scribe = Scribe()
    scribe.part({"w": np.arange(1000.0)}, 0)
    segment = write(scribe)
    (view,) = (chunk for chunk in segment.chunks if isinstance(chunk, memoryview))
    scribe.arena[-8:] = b"\xff" * 8
    assert bytes(view[-8:]) == b"\xff" * 8


def test_layouts_are_shared_between_steps_and_blocks_are_aligned() -> None:
    scribe = Scribe()
    for step in range(4):
        scribe.part({"w": np.full(5, step, "i2")}, step, time=float(step))
        scribe.close(step, time=step + 0.5)
    segment = write(scribe)
    assert len(segment.layouts) == 1
    assert all(entry.offset % 8 == 0 and entry.closed for entry in segment.entries)
    assert [read_back(segment, "w", i)[0] for i in range(4)] == [0, 1, 2, 3]
    assert [(e.began, e.time) for e in segment.entries] == [(i, i + 0.5) for i in range(4)]
    assert segment.nbytes == sum(memoryview(chunk).nbytes for chunk in segment.chunks)


def test_empty_blocks_make_no_object() -> None:
    scribe = Scribe()
    scribe.close(3)
    segment = write(scribe)
    assert (segment.key, segment.chunks, segment.nbytes, segment.layouts) == ("", (), 0, {})
    assert (segment.entries[0].segment, segment.entries[0].layout) == ("", "")
    assert segment.entries[0].closed


def test_shape_only_blocks_make_a_layout_but_no_object() -> None:
    scribe = Scribe()
    scribe.part({"w": np.ones((2, 3))}, 0, raw=False)
    segment = write(scribe)
    assert (segment.key, segment.chunks) == ("", ())
    assert segment.layouts[segment.entries[0].layout].tensors[0].shape == (2, 3)


def test_wrong_tensor_size_does_not_affect_other_tensors(tmp_path: Path) -> None:
    scribe = Scribe()
    piece = scribe.part({"odd": np.ones(3, "f4"), "good": np.ones(2, "f4")}, 0)
    assert piece.kind is not None
    specs = list(piece.kind.tensors)
    specs[0] = type(specs[0])("odd", "F4_NEW", (99,), 12, specs[0].offset, -1, ())
    kind = type(piece.kind)(0, (), tuple(specs), piece.kind.nbytes)
    segment = write(scribe, fold([piece._replace(kind=kind)]).blocks)
    assert read_back(segment, "good").tolist() == [1.0, 1.0]
    with pytest.raises(CorruptObject, match="'odd'"):
        read_back(segment, "odd")
    path = tmp_path / "s.safetensors"
    path.write_bytes(b"".join(segment.chunks))
    with safe_open(path, framework="np") as file:
        assert file.get_tensor("train/0/odd").tobytes() == np.ones(3, "f4").tobytes()


def spans_of(segment: Segment, name: str) -> DataRanges:
    layout = segment.layouts[segment.entries[0].layout]
    found = tensor_ranges(layout, entries_by_name(layout)[name])
    assert found is not None
    return DataRanges(*(span.shifted(segment.entries[0].offset) for span in found))


def test_flipped_bit_is_detected_and_named() -> None:
    scribe = Scribe()
    scribe.part({"w": np.arange(9.0), "v": np.arange(3.0)}, 0)
    segment = write(scribe)
    spoiled = bytearray(b"".join(segment.chunks))
    spoiled[spans_of(segment, "w").data.start + 5] ^= 1
    with pytest.raises(CorruptObject, match=r"'w'.*CRC32C") as caught:
        read_back(segment, "w", data=bytes(spoiled))
    assert (caught.value.url, caught.value.key) == HERE
    assert read_back(segment, "v", data=bytes(spoiled)).tolist() == [0, 1, 2]


def test_truncated_object_is_detected() -> None:
    scribe = Scribe()
    scribe.part({"w": np.arange(9.0)}, 0)
    segment = write(scribe)
    data = b"".join(segment.chunks)
    with pytest.raises(CorruptObject, match="is too short"):
        read_back(segment, "w", data=data[: spans_of(segment, "w").data.stop - 1])


def test_damaged_statistics_are_detected() -> None:
    scribe = Scribe()
    scribe.part({"a": np.ones(2)}, 0, statistics={"a": {"sum": 2.0}})
    segment = write(scribe)
    (layout,) = segment.layouts.values()
    spans = statistics_ranges(layout)
    assert spans is not None
    data = b"".join(segment.chunks)
    raw, crc = (data[slice(*span.shifted(segment.entries[0].offset))] for span in spans)
    with pytest.raises(CorruptObject, match="statistics"):
        read_statistics(layout, bytes([raw[0] ^ 1]) + raw[1:], crc, HERE, of_block(segment))
