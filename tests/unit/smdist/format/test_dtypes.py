from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save

from smdist.errors import CaptureError
from smdist.format.dtypes import (
    HeaderEntry,
    decode,
    dtype_code,
    header_bytes,
    header_length,
    itemsize,
    numpy_dtype,
    parse_header,
    portable_form,
)

if TYPE_CHECKING:
    from pathlib import Path

NATIVE = [
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "I64",
    "I32",
    "I16",
    "I8",
    "U64",
    "U32",
    "U16",
    "U8",
    "BOOL",
]
EXTRA = ["C64", "C128", "F8_E4M3FNUZ", "F8_E5M2FNUZ"]
if hasattr(ml_dtypes, "float8_e8m0fnu"):
    EXTRA.append("F8_E8M0")


@pytest.mark.parametrize("code", NATIVE + EXTRA)
def test_codes_round_trip(code: str) -> None:
    assert dtype_code(numpy_dtype(code)) == code
    assert itemsize(code) == numpy_dtype(code).itemsize


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (np.float32, "F32"),
        (np.longlong, "I64"),
        (np.int_, "I64"),
        (np.bool_, "BOOL"),
        (np.complex64, "C64"),
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_code_of_a_type(dtype: type, code: str) -> None:
    assert dtype_code(dtype) == code


@pytest.mark.parametrize(
    "dtype", [">f4", "O", "U3", "M8[s]", "g", ml_dtypes.float8_e4m3b11fnuz, [("a", "f4")]]
)
def test_lossy_types_are_rejected(dtype: Any) -> None:
    with pytest.raises(CaptureError, match="without loss"):
        dtype_code(np.dtype(dtype))


def test_unknown_code_names_a_remedy() -> None:
    with pytest.raises(ValueError, match="newer smdist"):
        numpy_dtype("F3")


def test_decode_is_a_view_and_writable_like_its_buffer() -> None:
    buffer = bytearray(np.arange(6, dtype=np.int16).tobytes())
    array = decode(buffer, "I16", (2, 3))
    array[1, 2] = 77
    assert bytes(buffer[-2:]) == (77).to_bytes(2, "little")
    assert not decode(bytes(buffer), "I16", (6,)).flags.writeable


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_decode_of_odd_shapes(shape: tuple[int, ...]) -> None:
    array = decode(np.ones(shape, "f4").tobytes(), "F32", shape)
    assert array.shape == shape
    assert array.dtype == np.float32


def test_decode_rejects_a_wrong_size() -> None:
    with pytest.raises(ValueError, match="8 bytes instead of 12 for F32 \\[3\\]"):
        decode(bytes(8), "F32", (3,))


@pytest.mark.torch
@pytest.mark.parametrize("code", NATIVE)
def test_native_codes_are_what_torch_reads(code: str, tmp_path: Path) -> None:
    import torch

    value = np.array([1, 0, 1]).astype(numpy_dtype(code))
    path = tmp_path / "one.safetensors"
    head = header_bytes([HeaderEntry("x", code, (3,), 0, value.nbytes)], {})
    path.write_bytes(head + value.tobytes())
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("x").to(torch.float64).tolist() == [1, 0, 1]


def test_portable_forms() -> None:
    assert portable_form("F32", (2, 3), 24) == ("F32", (2, 3))
    assert portable_form("C64", (5,), 40) == ("F32", (5, 2))
    assert portable_form("C128", (), 16) == ("F64", (2,))
    assert portable_form("F8_E5M2FNUZ", (7,), 7) == ("U8", (7,))
    assert portable_form("F32", (2, 3), 23) == ("U8", (23,))
    assert portable_form("SOMETHING", (2, 3), 9) == ("U8", (9,))


names = st.text(st.characters(codec="utf-8"), max_size=40).filter(lambda n: n != "__metadata__")


@given(st.lists(names, unique=True, max_size=8), st.dictionaries(names, names, max_size=3))
def test_headers_round_trip(tensors: list[str], metadata: dict[str, str]) -> None:
    entries = tuple(
        HeaderEntry(name, "U16", (i, 2), 8 * i, 8 * i + 4 * i) for i, name in enumerate(tensors)
    )
    head = header_bytes(entries, metadata)
    assert len(head) % 8 == 0
    assert header_length(head[:8]) == len(head)
    assert parse_header(head + b"data") == (entries, metadata, len(head))


def test_reads_what_safetensors_writes() -> None:
    data = save({"a": np.arange(3.0), "b": np.ones((2, 2), "f4")}, {"k": "v"})
    header = parse_header(data)
    assert header.metadata == {"k": "v"}
    found = {e.name: (e.dtype, e.shape) for e in header.entries}
    assert found == {"a": ("F64", (3,)), "b": ("F32", (2, 2))}
    a = next(e for e in header.entries if e.name == "a")
    assert decode(data[header.size + a.start : header.size + a.stop], "F64", (3,))[2] == 2.0


@pytest.mark.parametrize("name", ["x", "__metadata__"])
def test_duplicate_names_are_rejected(name: str) -> None:
    entries = [HeaderEntry("x", "U8", (0,), 0, 0), HeaderEntry(name, "U8", (0,), 0, 0)]
    with pytest.raises(ValueError, match="used twice"):
        header_bytes(entries, {})


@pytest.mark.parametrize("data", [b"", b"\x10\0\0\0\0\0\0\0{}"])
def test_incomplete_headers_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match="incomplete"):
        parse_header(data)
