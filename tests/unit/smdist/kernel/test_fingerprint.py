"""The fingerprint of elements: the same from every kernel, and different for different values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smdist import kernel

_kernel: Any
try:
    from smdist.kernel import _native as _kernel
except ImportError:
    _kernel = None

Array = np.ndarray[Any, np.dtype[Any]]
KERNELS = [*([_kernel] if _kernel else []), kernel.NumpyKernel]
CODES = {"u1": "U8", "u2": "BF16", "u4": "F32", "u8": "I64"}
WORD = 1 << 64

arrays = st.builds(
    lambda code, seed, size: np.random.default_rng(seed).integers(
        0, 1 << 8 * np.dtype(code).itemsize, size, code, endpoint=False
    ),
    st.sampled_from(["u1", "u2", "u4"]),
    st.integers(0, 1 << 30),
    st.integers(0, 300),
) | st.lists(st.integers(0, WORD - 1), max_size=40).map(lambda some: np.array(some, "u8"))


def fingerprint(array: Array, first: int = 0, of: Any = kernel) -> int:
    code = CODES[f"u{array.dtype.itemsize}"]
    (found,) = of.fingerprint([kernel.address_of(array)], [array.size], [code], [first])
    return int(found)


def weight(i: int) -> int:
    z = (i + 0x9E3779B97F4A7C15) % WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return (z ^ z >> 31) | 1


def value(element: Any) -> int:
    bits = int(element)
    if element.itemsize < 8:
        return bits
    bits = bits * 0x9E3779B97F4A7C15 % WORD
    return bits ^ bits >> 32


@given(arrays, st.integers(0, 1 << 62))
def test_it_is_the_weighted_sum_in_every_kernel(array: Array, first: int) -> None:
    expected = sum(weight(first + i) * value(bits) for i, bits in enumerate(array)) % WORD
    assert [fingerprint(array, first, each) for each in KERNELS] == [expected] * len(KERNELS)


@given(arrays, st.integers(0, 300), st.integers(0, 1 << 40))
def test_shards_add_up(array: Array, cut: int, first: int) -> None:
    cut = min(cut, array.size)
    head, tail = array[:cut].copy(), array[cut:].copy()
    parts = fingerprint(head, first) + fingerprint(tail, first + cut)
    assert parts % WORD == fingerprint(array, first)


@given(arrays, st.data())
def test_flipped_bits_and_swapped_elements_change_it(array: Array, data: st.DataObject) -> None:
    assume(array.size > 1)
    before = fingerprint(array)
    places = st.integers(0, array.size - 1)
    one, other = data.draw(places), data.draw(places)
    assume(one != other)
    bit = array.dtype.type(1 << data.draw(st.integers(0, 8 * array.dtype.itemsize - 1)))
    flipped = array.copy()
    flipped[one] ^= bit
    assert fingerprint(flipped) != before
    flipped[other] ^= bit
    assert fingerprint(flipped) != before
    if array[one] != array[other]:
        swapped = array.copy()
        swapped[[one, other]] = swapped[[other, one]]
        assert fingerprint(swapped) != before


def test_a_negative_zero_differs_and_large_inputs_agree() -> None:
    assert fingerprint(np.array([0.0, 1.0], "f4")) != fingerprint(np.array([-0.0, 1.0], "f4"))
    large = np.random.default_rng(0).normal(size=100_001).astype("f4")
    assert len({fingerprint(large, 5, each) for each in KERNELS}) == 1


@pytest.mark.parametrize("each", KERNELS)
def test_wrong_arguments_are_refused(each: Any) -> None:
    assert each.fingerprint([], [], [], []) == []
    assert each.fingerprint([0], [0], ["F32"], [0]) == [0]
    for wrong in (([0], [1], ["F32"], [0]), ([8], [1], ["C64"], [0]), ([8], [1], ["F32"], [])):
        with pytest.raises(ValueError, match=r"null|dtype|lengths"):
            each.fingerprint(*wrong)
