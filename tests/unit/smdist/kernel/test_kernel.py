"""One suite for every implementation of the kernel, against float64 references of numpy."""

from __future__ import annotations

import mmap
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import google_crc32c
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdist import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

_kernel: Any
try:
    from smdist.kernel import _native as _kernel
except ImportError:
    _kernel = None

Array = np.ndarray[Any, np.dtype[Any]]

VARIANTS = [*(_kernel.variants() if _kernel else ()), "numpy"]
NUMPY_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
if hasattr(ml_dtypes, "float8_e8m0fnu"):
    NUMPY_TYPES["F8_E8M0"] = ml_dtypes.float8_e8m0fnu
FLOATS = ["F64", "F32", "F16", "BF16", "F8_E5M2"]
# lanes are 2, 4 and 8 wide, chunks 2048 and 4096 elements (numpy: 16384)
SIZES = [
    1,
    2,
    3,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    2047,
    2048,
    2049,
    4095,
    4096,
    4097,
    8200,
    16385,
    40000,
]


@pytest.fixture(scope="module", params=VARIANTS)
def implementation(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "numpy":
        yield kernel.NumpyKernel
        return
    _kernel.use(request.param)
    yield _kernel
    _kernel.use(VARIANTS[0])


def row_of(implementation: Any, array: Array, code: str, shift: int = 0) -> dict[str, float]:
    """The row of the array's bytes, placed `shift` bytes after an aligned address."""
    flat = np.ascontiguousarray(array).ravel()
    room = np.zeros(flat.nbytes + 128, np.uint8)
    at = -room.ctypes.data % 64 + shift
    room[at : at + flat.nbytes] = flat.view(np.uint8)
    out = np.full(12, 7.0)
    implementation.statistics([room.ctypes.data + at], [flat.size], [code], out.ctypes.data + 8, 80)
    assert out[0] == out[11] == 7.0
    return dict(zip(kernel.COLUMNS, out[1:11].tolist(), strict=True))


def reference(array: Array) -> dict[str, float]:
    with np.errstate(all="ignore"):
        wide = array.ravel().astype(np.float64)
        # the extended type, so that the reference's own rounding stays below the tolerance
        extended = wide.astype(np.longdouble)
        return {
            "count": wide.size,
            "nans": int(np.isnan(wide).sum()),
            "infs": int(np.isinf(wide).sum()),
            "zeros": int((wide == 0).sum()),
            "sum": float(extended.sum()),
            "m2": float(((extended - extended.mean()) ** 2).sum()),
            "abs_sum": float(np.abs(extended).sum()),
            "min": float(wide.min()),
            "max": float(wide.max()),
            "abs_min": float(np.abs(wide).min()),
        }


def check(found: dict[str, float], array: Array) -> None:
    wanted = reference(array)
    for column in ("count", "nans", "infs", "zeros", "min", "max", "abs_min"):
        assert found[column] == pytest.approx(wanted[column], rel=0, abs=0, nan_ok=True), column
    rounding = 1e-13 * wanted["abs_sum"] if np.isfinite(wanted["abs_sum"]) else 0.0
    for column in ("sum", "abs_sum"):
        assert found[column] == pytest.approx(wanted[column], rel=0, abs=rounding, nan_ok=True)
    # a constant tensor has an m2 of 0 up to the square of the rounding of its mean
    noise = wanted["count"] * (1e-15 * abs(wanted["max"] - wanted["min"] + wanted["max"])) ** 2
    noise = noise if np.isfinite(noise) else 0.0
    assert found["m2"] == pytest.approx(wanted["m2"], rel=1e-9, abs=noise, nan_ok=True)


def random_array(code: str, size: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    dtype = np.dtype(NUMPY_TYPES[code])
    if code.startswith(("F", "BF")):
        return rng.standard_normal(size).astype(dtype)
    if code == "BOOL":
        return rng.integers(0, 2, size).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, size, dtype, endpoint=True)


def test_every_dtype_is_tried() -> None:
    assert set(NUMPY_TYPES) | {"F8_E8M0"} == kernel.DTYPES


@pytest.mark.parametrize("code", NUMPY_TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_row_equals_reference(implementation: Any, code: str, size: int) -> None:
    array = random_array(code, size, seed=size)
    check(row_of(implementation, array, code), array)


@pytest.mark.parametrize("code", [c for c in NUMPY_TYPES if np.dtype(NUMPY_TYPES[c]).itemsize <= 2])
def test_every_bit_pattern_of_small_types(implementation: Any, code: str) -> None:
    dtype = np.dtype(NUMPY_TYPES[code])
    if code == "BOOL":  # any byte but 0 is True
        array = np.arange(256, dtype=np.uint8)
        found = row_of(implementation, array, code)
        assert (found["sum"], found["max"], found["zeros"]) == (255, 1, 1)
        return
    patterns = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    check(row_of(implementation, patterns, code), patterns)
    with np.errstate(invalid="ignore"):  # signalling NaN
        finite = patterns[np.isfinite(patterns.astype(np.float64))]
    check(row_of(implementation, finite, code), finite)
    for pattern in patterns[:: 1 if dtype.itemsize == 1 else 97]:
        found = row_of(implementation, np.array([pattern]), code)
        np.testing.assert_equal(found["sum"], float(pattern) + 0.0)  # -0.0 sums to 0.0


@pytest.mark.parametrize("code", ["F64", "F32", "F16", "BF16", "I64", "I32", "I16"])
@pytest.mark.parametrize("shift", [1, 2, 3, 4, 8, 20, 31])
def test_unaligned(implementation: Any, code: str, shift: int) -> None:
    array = random_array(code, 5003, seed=shift)
    check(row_of(implementation, array, code, shift), array)


@pytest.mark.parametrize("code", sorted(kernel.DTYPES))
def test_empty_is_the_identity_of_merging(implementation: Any, code: str) -> None:
    out = np.ones(10)
    implementation.statistics([0], [0], [code], out.ctypes.data, 80)
    assert out.tolist() == [0, 0, 0, 0, 0, 0, 0, np.inf, -np.inf, np.inf]


@pytest.mark.parametrize("offset", [1e9, -1e12])
def test_deviation_survives_a_huge_mean(implementation: Any, offset: float) -> None:
    array = offset + np.random.default_rng(1).standard_normal(100_003)
    found = row_of(implementation, array, "F64")
    check(found, array)
    assert np.sqrt(found["m2"] / found["count"]) == pytest.approx(1.0, rel=0.01)


def test_mean_that_wanders_between_chunks(implementation: Any) -> None:
    array = np.repeat(np.arange(20.0) * 1e6, 3000) + np.random.default_rng(2).standard_normal(60000)
    check(row_of(implementation, array, "F64"), array)
    check(row_of(implementation, array.astype(np.float32), "F32"), array.astype(np.float32))


@pytest.mark.parametrize("code", ["F64", "F32"])
def test_constant_tensor_has_no_deviation(implementation: Any, code: str) -> None:
    array = np.full(100_000, 0.1, NUMPY_TYPES[code])
    found = row_of(implementation, array, code)
    assert found["m2"] <= array.size * (1e-16) ** 2 * 100
    assert found["sum"] == found["abs_sum"]


def test_float32_at_both_ends_of_its_range(implementation: Any) -> None:
    rng = np.random.default_rng(3)
    for scale in (3e38, 1e-38, 1e-44):
        array = (rng.uniform(-1, 1, 9000) * scale).astype(np.float32)
        check(row_of(implementation, array, "F32"), array)


def test_float64_sum_that_overflows_has_no_infinite_elements(implementation: Any) -> None:
    found = row_of(implementation, np.full(5000, 1.7e308), "F64")
    assert (found["nans"], found["infs"], found["max"]) == (0, 0, 1.7e308)
    assert found["sum"] == found["abs_sum"] == np.inf


def test_infinities_match_numpy(implementation: Any) -> None:
    for specials in ([np.inf], [-np.inf], [np.inf, -np.inf], [np.nan, np.inf]):
        array = np.arange(10_000, dtype=np.float32)
        array[[17 + 5000 * i for i in range(len(specials))]] = specials
        check(row_of(implementation, array, "F32"), array)


def test_negative_zero_counts(implementation: Any) -> None:
    for code in ("F64", "F32", "F16", "BF16", "F8_E4M3"):
        array = np.array([-0.0, 0.0, 1.0] * 11).astype(NUMPY_TYPES[code])
        assert row_of(implementation, array, code)["zeros"] == 22


@pytest.mark.torch
def test_flush_denormal_does_not_change_statistics() -> None:
    import torch

    array, out = np.full(100, 1e-42, np.float32), np.zeros(10)
    if _kernel is None or not torch.set_flush_denormal(True):
        pytest.skip("nothing to flush here")
    try:
        _kernel.statistics([array.ctypes.data], [100], ["F32"], out.ctypes.data, 80)
    finally:
        torch.set_flush_denormal(False)
    assert out[3] == 0
    assert out[7] == float(np.float32(1e-42))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_placement_of_specials(implementation: Any, data: st.DataObject) -> None:
    code = data.draw(st.sampled_from(FLOATS))
    size = data.draw(st.integers(1, 70) | st.sampled_from(SIZES))
    scale = data.draw(st.sampled_from([1e-30, 1e-6, 1.0, 1e4, 1e30]))
    mean = data.draw(st.sampled_from([0.0, 0.0, 1.0, -3e3, 1e9]))
    specials = data.draw(
        st.dictionaries(
            st.integers(0, size - 1),
            st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, 6e-8]),
            max_size=6,
        )
    )
    noise = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal(size)
    with np.errstate(over="ignore"):
        array = (mean + scale * noise).astype(NUMPY_TYPES[code])
        for at, special in specials.items():
            array[at] = special
    check(row_of(implementation, array, code, data.draw(st.integers(0, 9))), array)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e100, 1e100, allow_subnormal=True), min_size=1, max_size=40),
)
def test_any_float64(implementation: Any, values: list[float]) -> None:
    array = np.array(values)
    found, wanted = row_of(implementation, array, "F64"), reference(array)
    assert [found[c] for c in ("zeros", "min", "max", "abs_min")] == [
        wanted[c] for c in ("zeros", "min", "max", "abs_min")
    ]
    largest = float(np.abs(array).max())
    assert found["m2"] == pytest.approx(wanted["m2"], rel=1e-9, abs=1e-28 * largest**2 + 1e-300)


def test_many_tensors_in_rows_with_a_stride(implementation: Any) -> None:
    arrays = [random_array(code, 50 + i, i) for i, code in enumerate(list(NUMPY_TYPES) * 5)]
    codes = list(NUMPY_TYPES) * 5
    out = np.full((len(arrays), 13), 7.0)
    implementation.statistics(
        tuple(kernel.address_of(a) for a in arrays),
        [a.size for a in arrays],
        codes,
        out.ctypes.data,
        out.strides[0],
    )
    assert (out[:, 10:] == 7.0).all()
    for row, array in zip(out, arrays, strict=True):
        check(dict(zip(kernel.COLUMNS, row[:10].tolist(), strict=True)), array)


def test_unknown_dtypes_are_rejected(implementation: Any) -> None:
    array, out = np.zeros(8), np.zeros(10)
    a, o = array.ctypes.data, out.ctypes.data
    with pytest.raises(ValueError, match="C64"):
        implementation.statistics([a, a], [1, 1], ["F32", "C64"], o, 80)
    assert not out.any()
    with pytest.raises(ValueError, match="lengths"):
        implementation.statistics([a], [1, 1], ["F32"], o, 80)
    with pytest.raises(ValueError, match="stride"):
        implementation.statistics([a], [1], ["F32"], o, 72)
    with pytest.raises(ValueError, match="null"):
        implementation.statistics([0], [1], ["F32"], o, 80)
    with pytest.raises(ValueError, match="negative"):
        implementation.statistics([a], [-1], ["F32"], o, 80)
    with pytest.raises(ValueError, match="lengths"):
        implementation.copy([a], [a], [], a)
    with pytest.raises(ValueError, match="null"):
        implementation.copy([a], [0], [1], a)
    with pytest.raises(ValueError, match="lengths"):
        implementation.guard([a], [], a)
    with pytest.raises(ValueError, match="null"):
        implementation.guard([0], [1], a)
    with pytest.raises(ValueError, match="negative"):
        implementation.guard([a], [-1], a)
    with pytest.raises(TypeError):
        implementation.statistics([1.5], [1], ["F32"], o, 80)


def test_copy(implementation: Any) -> None:
    sizes = [0, 1, 3, 64, 4096, 100_001, 700_000] * 8
    sources = [random_array("U8", size, i) for i, size in enumerate(sizes)]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    places = [kernel.address_of(target) for target in targets]
    guard = implementation.copy(
        places, tuple(kernel.address_of(s) for s in sources), sizes, places[1]
    )
    assert guard == implementation.guard(places, sizes, places[1])
    assert all((t == s).all() for t, s in zip(targets, sources, strict=True))


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 65_599, 131_072, 1_000_003])
def test_large_copies_touch_nothing_around_them(implementation: Any, size: int) -> None:
    source = random_array("U8", size + 64, size)
    for start, skew in ((0, 0), (1, 5), (15, 16), (16, 1), (31, 63)):
        target = np.full(size + 96, 7, np.uint8)
        place = kernel.address_of(target) + start
        guard = implementation.copy([place], [kernel.address_of(source) + skew], [size], place - 8)
        assert guard == kernel.NumpyKernel.guard([place], [size], place - 8)
        assert (target[start : start + size] == source[skew : skew + size]).all()
        assert (target[:start] == 7).all()
        assert (target[start + size :] == 7).all()


def test_arguments_may_be_any_sequence(implementation: Any) -> None:
    source, target = np.arange(5.0), np.zeros(5)
    implementation.copy(
        np.array([target.ctypes.data]).tolist(),
        range(source.ctypes.data, source.ctypes.data + 1),
        (40,),
        0,
    )
    assert (source == target).all()


def test_populate_keeps_contents(implementation: Any) -> None:
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 8 * page) as memory:
        memory[3 * page + 5] = 77
        memory[5 * page - 1] = 78
        address = kernel.address_of(memory)
        implementation.populate(address + 3 * page + 5, 2 * page - 5)
        implementation.populate(address, 0)
        implementation.populate(address, 8 * page)
        assert memory[3 * page + 5] == 77
        assert memory[5 * page - 1] == 78
        assert sum(memory[:]) == 77 + 78


@pytest.mark.skipif(_kernel is None, reason="not compiled")
def test_populate_makes_pages_resident() -> None:
    def resident() -> int:
        try:
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1])
        except OSError:
            pytest.skip("no /proc")

    with mmap.mmap(-1, 64 << 20) as memory:
        before = resident()
        _kernel.populate(kernel.address_of(memory), 64 << 20)
        assert resident() - before >= (60 << 20) // mmap.PAGESIZE


@pytest.mark.skipif(_kernel is None, reason="not compiled")
def test_large_work_releases_the_gil() -> None:
    array, rows = np.ones(8_000_000, np.float32), np.zeros((40, 10))
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            done.wait(0.0005)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    try:
        sys.setswitchinterval(1000)  # nobody gets the GIL unless it is given up
        thread.start()
        before, during, deadline = ticks[0], 0, time.monotonic() + 30
        while during < 5 and time.monotonic() < deadline:  # on a busy machine one may be too few
            _kernel.statistics(
                [array.ctypes.data] * 40, [array.size] * 40, ["F32"] * 40, rows.ctypes.data, 80
            )
            during = ticks[0] - before
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    assert during >= 5


def test_address_of() -> None:
    array = np.arange(6.0)
    assert kernel.address_of(array) == array.ctypes.data
    assert kernel.address_of(array.data[2:]) == array.ctypes.data + 16
    assert kernel.address_of(b"") == 0
    assert kernel.address_of(np.zeros(3, ml_dtypes.bfloat16)) != 0
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    assert kernel.address_of(memory) % mmap.PAGESIZE == 0
    memory.close()  # nothing was held
    with pytest.raises(ValueError, match="contiguous"):
        kernel.address_of(array[::2])
    with pytest.raises(ValueError, match="contiguous"):
        kernel.address_of(array.data[::2])


def frame_of(
    implementation: Any, nbytes: int, opening: bytes = b"\x99\xa4part\x01\x02\x03"
) -> bytes:
    """The bytes at `frame` after a call, those behind it included."""
    source = np.arange(nbytes, dtype=np.uint8)
    target, frame = np.zeros(nbytes + 1, np.uint8), np.zeros(16, np.uint64)
    cursor = np.array([frame.ctypes.data, 41], np.uint64)
    implementation.record(
        target.ctypes.data,
        source.ctypes.data if nbytes else 0,
        nbytes,
        cursor.ctypes.data,
        opening,
        1.7e9,
        4,
        1,
        1 << 40,
    )
    np.testing.assert_array_equal(target[:nbytes], source)
    assert target[nbytes] == 0
    length = int(cursor[0]) - frame.ctypes.data
    assert length % 8 == 0
    assert cursor[1] == 42
    assert not frame.view(np.uint8)[length:].any()
    return frame.tobytes()


@pytest.mark.parametrize("nbytes", [0, 1, 1024, 70_001, 300_000])
def test_a_recorded_copy_is_followed_by_its_frame(implementation: Any, nbytes: int) -> None:
    frame = frame_of(implementation, nbytes)
    length, checksum = struct.unpack_from("<II", frame)
    payload = frame[8 : 8 + length]
    assert google_crc32c.value(payload) == checksum
    source = np.arange(nbytes, dtype=np.uint8)
    guard = kernel.NumpyKernel.guard([source.ctypes.data], [nbytes], source.ctypes.data)
    assert msgspec.msgpack.decode(payload) == ["part", 1, 2, 3, 1.7e9, 4, 1, 1 << 40, guard]


def test_compiled_and_python_frames_are_equal(implementation: Any) -> None:
    for opening in (b"\x94", b"\x99\xa4part\x01\xcf" + b"\xff" * 17):
        expected = frame_of(kernel.NumpyKernel, 9, opening)
        assert frame_of(implementation, 9, opening) == expected


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 0), (1, 0), (2, -1), (3, 0), (4, b"x" * 33), (6, 1 << 32), (7, 1 << 32), (8, -1)],
)
def test_invalid_record_arguments_write_nothing(
    implementation: Any, place: int, value: object
) -> None:
    memory = np.zeros(32, np.uint64)
    at = memory.ctypes.data
    cursor = np.array([at + 128, 0], np.uint64)
    arguments: list[object] = [at, at + 64, 8, cursor.ctypes.data, b"\x94", 0.0, 0, 0, 0]
    implementation.record(*arguments)
    assert memory.any()
    memory[:] = 0
    arguments[place] = value
    with pytest.raises(ValueError, match=r"record|negative"):
        implementation.record(*arguments)
    assert not memory.any()


def test_record_at_an_invalid_frame_address_writes_nothing(implementation: Any) -> None:
    memory, cursor = np.zeros(32, np.uint64), np.zeros(2, np.uint64)
    at = memory.ctypes.data
    for nowhere in (0, at + 12):
        cursor[0] = nowhere
        with pytest.raises(ValueError, match="record"):
            implementation.record(at, at + 64, 8, cursor.ctypes.data, b"", 0.0, 0, 0, 0)
        assert cursor.tolist() == [nowhere, 0]
    assert not memory.any()


def guard_of(implementation: Any, data: Array, origin: int = 0) -> int:
    address = kernel.address_of(data)
    return int(implementation.guard([address], [data.nbytes], address - origin))


GUARDED = st.one_of(
    st.integers(1, 40),
    st.integers(2000, 2100),  # covered entirely up to 2048
    st.integers(2049, 20_000),
    st.integers(65_000, 67_000),  # copied past the caches from 65536 on
)


@settings(deadline=None)
@given(
    size=GUARDED, skew=st.integers(0, 63), origin=st.integers(0, 1 << 40), seed=st.integers(0, 9)
)
def test_compiled_and_numpy_guards_are_equal(
    implementation: Any, size: int, skew: int, origin: int, seed: int
) -> None:
    source, target = random_array("U8", size + skew, seed)[skew:], np.zeros(size + 64, np.uint8)
    place = target.ctypes.data + skew
    expected = guard_of(kernel.NumpyKernel, source, origin)
    assert 0 <= expected < 1 << 32
    assert guard_of(implementation, source, origin) == expected
    assert implementation.copy([place], [source.ctypes.data], [size], place - origin) == expected


@settings(deadline=None)
@given(size=st.integers(1, 2048), data=st.data())
def test_any_change_of_a_small_range_changes_its_guard(
    implementation: Any, size: int, data: st.DataObject
) -> None:
    fill = data.draw(st.sampled_from(["zeros", "random"]))
    before = np.zeros(size, np.uint8) if fill == "zeros" else random_array("U8", size, size)
    after, start = before.copy(), data.draw(st.integers(0, size - 1))
    change = data.draw(st.binary(min_size=1, max_size=size - start))
    after[start : start + len(change)] ^= np.frombuffer(change, np.uint8)
    same = guard_of(implementation, before) == guard_of(implementation, after)
    assert same == (before == after).all()


@pytest.mark.parametrize("dtype", ["F32", "F64", "F16"])
def test_guard_depends_on_signs_and_positions(implementation: Any, dtype: str) -> None:
    """Changes that sums of words do not see: they cancel, bit by bit or word by word."""
    values = random_array(dtype, 128, 1)
    found = {guard_of(implementation, values)}
    flipped = values.copy()
    for at in range(
        0, 128, 8
    ):  # always two more, so that every bit changes an even number of times
        flipped[at : at + 2] *= -1
        found.add(guard_of(implementation, flipped))
    for shift in range(1, 128):
        found.add(guard_of(implementation, np.roll(values, shift)))
    assert len(found) == 1 + 16 + 127


@pytest.mark.parametrize("nbytes", [2049, 4096, 10_000, 65_536, 300_001])
def test_guard_detects_an_overwriting_part(implementation: Any, nbytes: int) -> None:
    """Parts in an arena begin at multiples of 64 and have more than 512 bytes."""
    before = random_array("U8", nbytes, 1)
    other = random_array("U8", nbytes, 2)
    expected = guard_of(implementation, before)
    for start in range(-512, nbytes - 7, max(64, nbytes // 100 // 64 * 64)):
        after, over = before.copy(), slice(max(start, 0), start + 520)
        after[over] = other[over]
        assert guard_of(implementation, after) != expected, start


def test_guard_of_ranges_depends_on_their_positions(implementation: Any) -> None:
    data = random_array("U8", 2048, 3)
    at = data.ctypes.data
    both = implementation.guard([at, at + 1024], [1024, 1024], at)
    assert both == implementation.guard([at + 1024, at], [1024, 1024], at)
    data[:] = np.roll(data, 1024)
    assert both != implementation.guard([at, at + 1024], [1024, 1024], at)
    assert implementation.guard([], [], at) == implementation.guard([0], [0], at) == 0
