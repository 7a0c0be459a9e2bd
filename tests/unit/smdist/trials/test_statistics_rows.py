"""Rows of statistics of a run: the same as numpy computes from the values that were saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from smdist.errors import InvalidWorker
from smdist.identity import ModeKeys
from smdist.kernel.tensor_stats import COLUMNS, measure
from smdist.storage import LocalStore, MemoryStore
from smdist.tables.rows import Rows
from smdist.trials import Trial
from tests.support.run_builder import Array, RunBuilder, Saved
from tests.unit.smdist.trials.test_trial_snapshot import open_trial

TRAIN, EVAL = ModeKeys.TRAIN, ModeKeys.EVAL
COUNTS = ("count", "nans", "infs", "zeros")
DTYPES = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u4", "u1", "?", ml_dtypes.bfloat16)


def expected(array: Array) -> dict[str, float]:
    """Return what numpy says of the values, in float64."""
    wide = array.astype(np.float64).ravel()
    with np.errstate(all="ignore"):
        nan = bool(np.isnan(wide).any())
        infinite = bool(np.isinf(wide).any())
        return {
            "count": wide.size,
            "nans": int(np.isnan(wide).sum()),
            "infs": int(np.isinf(wide).sum()),
            "zeros": int((wide == 0).sum()),
            "sum": float(wide.sum()),
            "m2": np.nan if nan or infinite else float(((wide - wide.mean()) ** 2).sum()),
            "abs_sum": float(np.abs(wide).sum()),
            "min": float(wide.min()),
            "max": float(wide.max()),
            "abs_min": float(np.abs(wide).min()),
        }


def keys(rows: Rows) -> list[tuple[str, int, int, int, int]]:
    found = zip(*(rows[k] for k in ("tensor", "attempt", "mode", "mode_step", "rank")), strict=True)
    return [(rows.names[t], *map(int, rest)) for t, *rest in found]


def two_ranks(store: Any, attach_bytes: int = 0) -> dict[tuple[str, int, int, int, int], Array]:
    """Write two modes, several element types, saved rows and raw values; return what was saved."""
    rng = np.random.default_rng(0)
    saved: dict[tuple[str, int, int, int, int], Array] = {}
    for rank in (1, 0):
        writer = RunBuilder(store).rank(rank, 2)
        writer.attach_bytes = attach_bytes
        for number in range(4):
            mode, mode_step = (EVAL, 0) if number == 3 else (TRAIN, number)
            values = {
                "weights": rng.normal(size=(3, 5)).astype("f4"),
                "counts": rng.integers(0, 3, 7),
                "reduced": rng.normal(size=9),
                "both": rng.normal(size=4).astype(ml_dtypes.bfloat16),
                "empty": np.zeros((0, 2), "f4"),
            }
            tensors: dict[str, Array | Saved] = dict(values)
            tensors["reduced"] = Saved(values["reduced"], raw=False, reductions=("median",))
            tensors["both"] = Saved(values["both"], reductions=(), collections=("losses", "a"))
            tensors["complex"] = np.ones(2, "c8")
            writer.step(mode, mode_step, tensors, step=number).flush()
            saved |= {
                (name, 0, mode.value, mode_step, rank): array for name, array in values.items()
            }
        writer.end()
    return saved


@pytest.mark.parametrize("attach_bytes", [0, 1 << 16])
def test_every_tensor_has_the_row_of_its_values(tmp_path: Path, attach_bytes: int) -> None:
    store = LocalStore(tmp_path)
    saved = two_ranks(store, attach_bytes)
    rows = open_trial(store).rows()
    assert keys(rows) == sorted(saved)
    assert rows.names == ("both", "counts", "empty", "reduced", "weights")
    assert rows.collections["both"] == {"losses", "a"}
    for at, key in enumerate(keys(rows)):
        found = np.array([rows[column][at] for column in COLUMNS])
        np.testing.assert_array_equal(found, measure(saved[key]), str(key))
        assert rows.dtypes[rows["dtype"][at]] == saved[key].dtype.name
    order = dict(zip([rows.names[t] for t in rows["tensor"]], rows["order"], strict=True))
    assert order == {"weights": 0, "counts": 1, "reduced": 2, "both": 3, "empty": 4}
    assert set(rows["step"][rows["mode"] == EVAL.value]) == {3}


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
def test_rows_are_those_of_numpy(data: st.DataObject) -> None:
    store = MemoryStore()
    saved: dict[tuple[str, int, int, int, int], Array] = {}
    writer = RunBuilder(store).rank(0)
    for number in range(data.draw(st.integers(1, 3))):
        step: dict[str, Array | Saved] = {}
        for name in data.draw(st.sets(st.sampled_from(["a", "b/c", ".d"]), min_size=1)):
            dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
            shape = data.draw(hnp.array_shapes(max_dims=2, max_side=6))
            drawn = hnp.arrays("f4", shape, elements=st.floats(-100, 100, width=16))
            array = data.draw(drawn).astype(dtype)
            if dtype.kind == "f" and data.draw(st.booleans()):
                array.flat[0] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, -0.0]))
            reduced = data.draw(st.booleans())
            raw = data.draw(st.booleans()) or not reduced
            step[name] = Saved(array, raw=raw, reductions=() if reduced else None)
            saved[name, 0, TRAIN.value, number, 0] = array
        writer.step(TRAIN, number, step)
    writer.end()
    rows = open_trial(store).rows()
    assert keys(rows) == sorted(saved)
    for at, key in enumerate(keys(rows)):
        for column, value in expected(saved[key]).items():
            found = rows[column][at]
            if column in COUNTS:
                assert found == value, (key, column)
            else:
                np.testing.assert_allclose(found, value, 1e-9, 1e-9, err_msg=f"{key} {column}")


@pytest.fixture(scope="module")
def trial() -> Trial:
    store = MemoryStore()
    two_ranks(store)
    return open_trial(store)


def test_filters(trial: Trial) -> None:
    every = trial.rows()
    assert trial.rows(tensors="^weigh|counts$").names == ("counts", "weights")
    assert trial.rows(re.compile("WEIGHTS", re.IGNORECASE)).names == ("weights",)
    assert trial.rows(collection="losses").names == ("both",)
    assert trial.rows(tensors="weights", collection="losses").names == ()
    assert len(trial.rows(mode=EVAL)) * 4 == len(every)
    assert set(trial.rows(mode=EVAL, steps=[0])["step"]) == {3}
    assert set(trial.rows(steps=[0, 3])["mode"]) == {TRAIN.value, EVAL.value}
    assert set(trial.rows(ranks=[1])["rank"]) == set(trial.rows(ranks=["worker_1"])["rank"]) == {1}
    assert len(trial.rows(attempt=0)) == len(every)
    assert len(trial.rows(attempt=1)) == 0
    with pytest.raises(InvalidWorker):
        trial.rows(ranks=[7])


def test_steps_that_are_not_complete_can_be_left_out() -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    for rank, steps in ((0, 2), (1, 1)):
        writer = run.rank(rank, 2)
        for step in range(steps):
            writer.step(TRAIN, step, {"x": np.ones(2)})
        writer.flush()
    trial = open_trial(store)
    assert keys(trial.rows()) == [("x", 0, 1, 0, 0), ("x", 0, 1, 0, 1), ("x", 0, 1, 1, 0)]
    assert set(trial.rows(show_incomplete_steps=False)["step"]) == {0}


def test_a_step_in_pieces_keeps_its_order_and_the_newest_value() -> None:
    store = MemoryStore()
    writer = RunBuilder(store).rank(0)
    writer.step(TRAIN, 0, {"x": np.ones(2), "y": np.ones(2)}, close=False).flush()
    writer.step(TRAIN, 0, {"z": np.ones(2), "x": np.full(2, 5.0)}).end()
    rows = open_trial(store).rows()
    assert rows.names == ("x", "y", "z")
    assert list(rows["order"]) == [3, 1, 2]
    assert list(rows["sum"]) == [10.0, 2.0, 2.0]


def test_the_newest_attempt_of_each_step() -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    for attempt, steps in ((0, range(3)), (1, range(2, 4))):
        writer = run.rank(0, attempt=attempt)
        for step in steps:
            writer.step(TRAIN, step, {"x": np.full(2, float(attempt))})
        writer.end()
    rows = open_trial(store).rows()
    assert list(zip(rows["step"], rows["attempt"], strict=True)) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert set(open_trial(store, attempt=0).rows()["step"]) == {0, 1, 2}


def damaged_run() -> tuple[MemoryStore, list[str]]:
    store = MemoryStore()
    run = RunBuilder(store)
    for rank in range(3):
        writer = run.rank(rank, 3)
        for step in range(3):
            writer.step(TRAIN, step, {"x": np.full(3, 7.0), "y": np.full(3, 8.0)}).flush()
        writer.end()
    return store, sorted(key for key in store.objects if key.startswith("segments/"))


def test_a_damaged_tensor_leaves_its_row_out_and_is_named() -> None:
    store, segments = damaged_run()
    data = bytearray(store.objects[segments[4]])
    data[data.index(np.full(3, 7.0).tobytes()) + 6] ^= 1
    store.objects[segments[4]] = bytes(data)
    trial = open_trial(store)
    rows = trial.rows()
    assert len(rows) == 17
    assert ("x", 0, 1, 1, 1) not in keys(rows)
    assert ("y", 0, 1, 1, 1) in keys(rows)
    assert any(segments[4] in line for line in trial.troubles()[""])


def test_missing_objects_leave_only_their_rows_out() -> None:
    store, segments = damaged_run()
    for key in segments[2:4]:
        del store.objects[key]
    store.objects[segments[8]] = store.objects[segments[8]][:-60]
    trial = open_trial(store)
    gone = {(0, 2), (1, 0), (2, 2)}
    rows = trial.rows()
    assert {(rank, step) for _, _, _, step, rank in keys(rows)} == {
        (rank, step) for rank in range(3) for step in range(3)
    } - gone
    told = "\n".join(trial.troubles()[""])
    assert all(segments[at] in told for at in (2, 3, 8))


def test_damaged_statistics_leave_their_rows_out() -> None:
    store = MemoryStore()
    writer = RunBuilder(store).rank(0)
    saved = Saved(np.full(3, 7.0), raw=False, reductions=())
    writer.step(TRAIN, 0, {"x": saved}).flush().step(TRAIN, 1, {"x": saved}).end()
    key = min(key for key in store.objects if key.startswith("segments/"))
    data = bytearray(store.objects[key])
    data[data.index(np.float64(21.0).tobytes())] ^= 1
    store.objects[key] = bytes(data)
    trial = open_trial(store)
    assert list(trial.rows()["step"]) == [1]
    assert any(key in line for line in trial.troubles()[""])


def test_nothing_stored_gives_no_rows() -> None:
    store = MemoryStore()
    RunBuilder(store).rank(0).end()
    rows = open_trial(store).rows()
    assert len(rows) == 0
    assert rows.names == ()


def test_a_block_is_read_with_one_request() -> None:
    class CountingStore(MemoryStore):
        reads = 0

        async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            self.reads += key.startswith("segments/")
            return await super().get(key, start, stop)

    store = CountingStore()
    writer = RunBuilder(store).rank(0)
    for step in range(5):
        writer.step(TRAIN, step, {f"w{i}": np.ones(50) for i in range(30)}).flush()
    writer.end()
    trial = open_trial(store)
    assert len(trial.rows()) == 150
    assert store.reads == 5
