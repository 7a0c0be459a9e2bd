"""Measuring, merging and deriving, with each implementation of the kernel."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from smdist import kernel
from smdist.errors import UnknownKey
from smdist.kernel import tensor_stats as statistics
from smdist.kernel.tensor_stats import COLUMNS, columns_for, derive, measure, merge_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = np.ndarray[Any, np.dtype[Any]]

EVERYTHING = columns_for(["median", "abs_median", "prod", "q0.1", "q0.99"])
COMPILED = kernel._compiled.statistics if kernel._compiled else None

REFERENCE: dict[str, Callable[[Array], Any]] = {
    "min": np.min,
    "max": np.max,
    "median": np.median,
    "mean": np.mean,
    "std": np.std,
    "variance": np.var,
    "sum": np.sum,
    "prod": np.prod,
    "l1": lambda x: np.linalg.norm(x.ravel(), 1),
    "l2": lambda x: np.linalg.norm(x.ravel(), 2),
}


@pytest.fixture(scope="module", params=["compiled", "numpy"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    chosen = COMPILED if request.param == "compiled" else kernel.NumpyKernel.statistics
    if chosen is None:
        pytest.skip("not compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "statistics", chosen)
        yield


def everything(array: Array) -> Array:
    return measure(array, EVERYTHING)


# -- names -----------------------------------------------------------------------------------


def test_columns_are_the_base_then_sorted_extras() -> None:
    assert columns_for([]) == COLUMNS
    assert columns_for(["mean", "abs_std", "l2", "nans", "q0", "q1"]) == COLUMNS
    assert columns_for(["q0.990", "prod", "abs_prod", "median"]) == (
        *COLUMNS,
        "median",
        "prod",
        "q0.99",
    )


def test_derivable_names_need_no_extra() -> None:
    for name in statistics.DERIVABLE:
        assert columns_for([name]) == COLUMNS
        derive(measure(np.ones(3)), COLUMNS, name)
    for name in set(statistics.REDUCTIONS) - statistics.DERIVABLE:
        assert len(columns_for([name])) == len(COLUMNS) + 1


@pytest.mark.parametrize("name", ["q", "q1.5", "q-0.1", "qnan", "q0.5x", "average", "abs_nans", ""])
def test_unknown_names_are_rejected(name: str) -> None:
    assert not statistics.is_reduction(name)
    with pytest.raises(UnknownKey):
        columns_for([name])
    with pytest.raises(UnknownKey):
        derive(measure(np.ones(3)), COLUMNS, name)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownKey, match="did you mean 'variance'"):
        columns_for(["varience"])


def test_missing_extra_column_is_named() -> None:
    with pytest.raises(ValueError, match="'median' was not measured"):
        derive(measure(np.ones(3)), COLUMNS, "median")
    assert not statistics.derivable("q0.9", COLUMNS)
    assert statistics.derivable("q0.5", (*COLUMNS, "median"))


# -- measure and derive ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int32, np.uint8])
@pytest.mark.parametrize("shape", [(1,), (), (7,), (3, 5, 2), (100, 333)])
def test_every_reduction_equals_numpy(dtype: Any, shape: tuple[int, ...]) -> None:
    drawn = np.random.default_rng(4).standard_normal(shape) * 3 + 1
    array = np.asarray(np.abs(drawn) if dtype is np.uint8 else drawn).astype(dtype)
    wide = np.asarray(array, np.float64)
    row = everything(array)
    for name, function in REFERENCE.items():
        for label, operand in ((name, wide), (f"abs_{name}", np.abs(wide))):
            with np.errstate(over="ignore", under="ignore"):  # the product of many
                wanted = float(function(operand))
            found = derive(row, EVERYTHING, label)
            assert found == pytest.approx(wanted, rel=1e-10, abs=1e-12), label
    for p in (0.1, 0.99):
        found = derive(row, EVERYTHING, f"q{p}")
        assert found == pytest.approx(float(np.quantile(wide, p)), rel=1e-12)
    assert derive(row, EVERYTHING, "q0.50") == derive(row, EVERYTHING, "median")
    assert derive(row, EVERYTHING, "q0") == wide.min()
    assert derive(row, EVERYTHING, "count") == array.size
    assert derive(row, EVERYTHING, "zeros") == (wide == 0).sum()


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_small_floats(dtype: Any) -> None:
    array = np.random.default_rng(5).standard_normal((40, 50)).astype(dtype)
    wide = array.astype(np.float64)
    row = everything(array)
    for name in ("mean", "std", "median", "l2", "min"):
        assert derive(row, EVERYTHING, name) == pytest.approx(float(REFERENCE[name](wide)))


def test_memory_order_and_byte_order_do_not_matter() -> None:
    array = np.random.default_rng(6).standard_normal((30, 41)).astype(np.float32)
    row = everything(array).tolist()
    assert everything(np.asfortranarray(array)).tolist() == row
    assert everything(np.repeat(array, 2, axis=1)[:, ::2]).tolist() == row
    assert everything(array.astype(">f4")).tolist() == row
    array.flags.writeable = False
    assert everything(array).tolist() == row


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, "M8[s]", "U3", object])
def test_types_without_statistics_are_named(dtype: Any) -> None:
    array = np.zeros(3, dtype)
    with pytest.raises(ValueError, match=str(array.dtype)[:6].replace("<", ".")):
        measure(array)


def test_least_integer_has_a_magnitude() -> None:
    array = np.array([np.iinfo(np.int64).min] * 3)
    row = everything(array)
    for name in ("abs_max", "abs_min", "abs_median", "abs_mean"):
        assert derive(row, EVERYTHING, name) == 2.0**63, name


def test_deviation_of_magnitudes_with_a_huge_mean() -> None:
    for sign in (1.0, -1.0):
        array = sign * (1e9 + np.random.default_rng(7).standard_normal(50_000))
        row = measure(array)
        assert derive(row, COLUMNS, "std") == pytest.approx(float(array.std()), rel=1e-9)
        assert derive(row, COLUMNS, "abs_std") == derive(row, COLUMNS, "std")


def test_a_tensor_without_elements() -> None:
    row = everything(np.zeros((0, 3), np.float32))
    zero = {"sum", "l1", "l2", "abs_sum", "abs_l1", "abs_l2", *statistics.COUNTS}
    for name in statistics.REDUCTIONS:
        found = derive(row, EVERYTHING, name)
        if name in ("prod", "abs_prod"):
            assert found == 1.0
        elif name in zero:
            assert found == 0.0
        else:
            assert math.isnan(found), name
    assert math.isnan(derive(row, EVERYTHING, "q0.99"))


def test_nan_reaches_everything_but_the_counts() -> None:
    row = everything(np.array([1.0, np.nan, np.inf, 0.0]))
    for name in (*statistics.REDUCTIONS, "q0.1"):
        found = derive(row, EVERYTHING, name)
        counts = {"count": 4, "nans": 1, "infs": 1, "zeros": 1}
        assert found == counts[name] if name in counts else math.isnan(found), name


def test_infinities_without_nan() -> None:
    row = everything(np.array([1.0, np.inf, 2.0, 3.0, -4.0]))
    for name in ("max", "sum", "mean", "l1", "l2", "abs_max", "abs_l2", "abs_mean"):
        assert derive(row, EVERYTHING, name) == math.inf, name
    assert derive(row, EVERYTHING, "min") == -4.0
    assert derive(row, EVERYTHING, "median") == 2.0
    assert derive(row, EVERYTHING, "prod") == -math.inf
    assert math.isnan(derive(row, EVERYTHING, "std"))
    both = everything(np.array([np.inf, -np.inf]))
    assert math.isnan(derive(both, EVERYTHING, "sum"))
    assert derive(both, EVERYTHING, "l2") == math.inf
    assert derive(everything(np.array([np.inf, np.inf])), EVERYTHING, "median") == math.inf


def test_measure_into_writes_rows_at_the_given_addresses() -> None:
    arrays = [np.arange(n, dtype=np.float32) for n in (0, 1, 5, 900)]
    room = np.full((4, len(EVERYTHING) + 3), 7.0)
    arguments = ([kernel.address_of(a) for a in arrays], [a.size for a in arrays], ["F32"] * 4)
    statistics.measure_into(*arguments, EVERYTHING, room.ctypes.data, room.strides[0])
    assert (room[:, len(EVERYTHING) :] == 7.0).all()
    np.testing.assert_array_equal(
        room[:, : len(EVERYTHING)], np.array([everything(a) for a in arrays])
    )
    np.testing.assert_array_equal(
        statistics.measure_many(*arguments, EVERYTHING), room[:, : len(EVERYTHING)]
    )


def test_derive_many_is_derive_of_each() -> None:
    rows = np.array([[everything(np.arange(n) - 3.0) for n in (0, 4, 9)]] * 2)
    for name in (*statistics.REDUCTIONS, "q0.1"):
        found = statistics.derive_many(rows, EVERYTHING, name)
        assert found.shape == (2, 3)
        np.testing.assert_array_equal(found[1], [derive(r, EVERYTHING, name) for r in rows[1]])


# -- merge -----------------------------------------------------------------------------------

elements = hnp.arrays(
    np.float64,
    st.integers(0, 30),
    elements=st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1e9]),
)


def same(left: Array, right: Array, scale: float = 1.0) -> None:
    """Equal up to rounding; `scale` is the greatest magnitude that went into them."""
    for at, column in enumerate(EVERYTHING):
        rounding = {"sum": scale, "abs_sum": scale, "m2": scale * scale}.get(column, 0.0) * 1e-12
        relative = 1e-9 if column in ("sum", "m2", "abs_sum", "prod") else 0.0
        assert left[at] == pytest.approx(right[at], rel=relative, abs=rounding, nan_ok=True), column


def scale_of(*arrays: Array) -> float:
    finite = [float(np.abs(a[np.isfinite(a)]).max(initial=1.0)) for a in arrays]
    return max(finite)


@settings(max_examples=80, deadline=None)
@given(a=elements, b=elements)
def test_merging_describes_the_union_in_any_order(a: Array, b: Array) -> None:
    merged = merge_rows([everything(a), everything(b)], EVERYTHING)
    union = everything(np.concatenate([a, b]))
    if len(a) and len(b):  # quantiles of a union are unknown
        for name in ("median", "abs_median", "q0.1", "q0.99"):
            assert math.isnan(merged[EVERYTHING.index(name)])
            union[EVERYTHING.index(name)] = math.nan
    at = EVERYTHING.index("prod")  # order matters once a partial product leaves float64
    if not (1e-250 < abs(union[at]) < 1e250 and 1e-250 < abs(merged[at]) < 1e250):
        union[at] = merged[at]
    same(merged, union, scale_of(a, b))
    same(merge_rows([everything(b), everything(a)], EVERYTHING), merged, scale_of(a, b))


@settings(max_examples=80, deadline=None)
@given(a=elements, b=elements, c=elements)
def test_merging_in_any_grouping(a: Array, b: Array, c: Array) -> None:
    x, y, z = everything(a), everything(b), everything(c)
    left = merge_rows([merge_rows([x, y], EVERYTHING), z], EVERYTHING)
    right = merge_rows([x, merge_rows([y, z], EVERYTHING)], EVERYTHING)
    at = EVERYTHING.index("prod")
    if not 1e-250 < abs(left[at]) < 1e250:
        left[at] = right[at]
    same(left, right, scale_of(a, b, c))
    flat = merge_rows(np.array([x, y, z]), EVERYTHING)
    flat[at] = left[at]
    same(left, flat, scale_of(a, b, c))


@settings(max_examples=40, deadline=None)
@given(a=elements)
def test_the_empty_row_changes_nothing(a: Array) -> None:
    row, empty = everything(a), everything(np.zeros(0))
    np.testing.assert_array_equal(merge_rows([row, empty], EVERYTHING), row)
    np.testing.assert_array_equal(merge_rows([empty, row], EVERYTHING), row)
    np.testing.assert_array_equal(merge_rows([row], EVERYTHING), row)


def test_no_rows_are_the_empty_row() -> None:
    np.testing.assert_array_equal(merge_rows([], EVERYTHING), everything(np.zeros(0)))


def test_merging_shards_with_a_huge_mean() -> None:
    array = 1e9 + np.random.default_rng(8).standard_normal(40_000)
    merged = merge_rows([measure(part) for part in np.array_split(array, 37)])
    assert derive(merged, COLUMNS, "std") == pytest.approx(float(array.std()), rel=1e-7)


# -- choice of the implementation ------------------------------------------------------------


def test_environment_forces_numpy() -> None:
    program = "from smdist import kernel; print(kernel.compiled, kernel._chosen.__name__)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SMDIST_KERNEL": "numpy"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["False", "NumpyKernel"]
