"""What a trial answers about tensors: values, shapes, reductions, ranks, and its errors."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from smdist import errors
from smdist.config.collection import Collection
from smdist.format.manifest import CollectionInfo
from smdist.identity import ModeKeys
from smdist.storage import LocalStore
from smdist.trials import Trial, create_trial
from tests.support.run_builder import RunBuilder, Saved

TRAIN, EVAL, GLOBAL = ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.GLOBAL


def array(*shape: int, add: float = 0.0) -> np.ndarray[Any, np.dtype[Any]]:
    return np.arange(add, add + math.prod(shape), dtype=np.float32).reshape(shape)


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    return RunBuilder(LocalStore(tmp_path))


def test_modes_are_numbered_each_by_itself_and_all_together(
    run: RunBuilder, tmp_path: Path
) -> None:
    rank = run.rank(0)
    order = [(TRAIN, 0), (TRAIN, 1), (EVAL, 0), (EVAL, 1), (TRAIN, 2), (TRAIN, 3)]
    for step, (mode, mode_step) in enumerate(order):
        rank.step(mode, mode_step, {"x": array(2, add=step)}, step=step)
    rank.end()
    trial = create_trial(tmp_path)
    assert trial.steps() == [0, 1, 2, 3, 4, 5]
    assert trial.steps(TRAIN) == [0, 1, 2, 3]
    assert trial.steps(EVAL) == [0, 1]
    assert trial.steps(ModeKeys.PREDICT) == []
    assert trial.modes() == [TRAIN, EVAL]
    assert trial.global_step(EVAL, 1) == 3
    assert trial.global_step(GLOBAL, 9) == 9
    assert trial.global_step(EVAL, 9) is None
    assert (trial.mode(4), trial.mode_step(4)) == (TRAIN, 2)
    assert (trial.mode(9), trial.mode_step(9)) == (None, None)
    tensor = trial.tensor("x")
    assert tensor.value(1, EVAL)[0] == 3
    assert tensor.value(4)[0] == 4
    assert tensor.steps(EVAL) == [0, 1]
    assert list(tensor.values(EVAL)) == [0, 1]
    assert tensor.prev_steps(4, 2) == [3, 4]
    assert tensor.prev_steps(4) == [0, 1, 2, 3, 4]
    assert tensor.prev_steps(4, 0) == []


def test_steps_saved_without_a_mode_are_global_ones(run: RunBuilder, tmp_path: Path) -> None:
    run.rank(0).step(GLOBAL, 0, {"x": array(1)}).step(GLOBAL, 1, {"x": array(1)}).end()
    trial = create_trial(tmp_path)
    assert trial.steps() == [0, 1]
    assert trial.modes() == []
    assert (trial.mode(1), trial.mode_step(1)) == (GLOBAL, 1)


VALUES = {
    "float32": array(3, 2),
    "float64": np.linspace(0, 1, 5),
    "int64": np.arange(4),
    "uint8": np.arange(7, dtype=np.uint8),
    "bool": np.array([True, False, True]),
    "float16": np.ones((2, 2), np.float16),
    "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
    "float8": np.arange(3).astype(ml_dtypes.float8_e4m3fn),
    "complex": np.array([1 + 2j, 3 - 1j]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "ünï/../näme" + "x" * 300: array(2),
}


def test_values_come_back_bit_for_bit_and_writable(run: RunBuilder, tmp_path: Path) -> None:
    run.rank(0).step(TRAIN, 0, VALUES).end()
    trial = create_trial(tmp_path)
    assert trial.tensor_names() == sorted(VALUES)
    for name, expected in VALUES.items():
        value = trial.tensor(name).value(0)
        assert value.dtype == expected.dtype
        assert value.shape == expected.shape == trial.tensor(name).shape(0)
        assert value.tobytes() == expected.tobytes()
        assert value.flags.writeable
    bulk = trial.values()
    assert set(bulk) == set(VALUES)
    assert bulk["int64"][0]["worker_0"].tolist() == [0, 1, 2, 3]


def test_workers_are_in_order_of_rank_and_each_has_its_own_value(
    run: RunBuilder, tmp_path: Path
) -> None:
    for rank in range(11):
        run.rank(rank, 11).step(TRAIN, 0, {"x": array(2, add=rank)}).end()
    trial = create_trial(tmp_path)
    names = [f"worker_{rank}" for rank in range(11)]
    assert trial.workers() == names
    assert trial.num_workers == 11
    tensor = trial.tensor("x")
    assert tensor.workers(0) == names
    assert tensor.value(0, worker="worker_10")[0] == 10
    assert tensor.value(0, worker=7)[0] == 7
    assert tensor.value(0)[0] == 0
    stacked = tensor.stack(0)
    assert stacked.shape == (11, 2)
    assert stacked[:, 0].tolist() == list(range(11))
    across = tensor.across_ranks(0, "max")
    assert list(across.items()) == [(n, r + 1.0) for r, n in enumerate(names)]
    assert tensor.reduction_of_all_ranks(0, "mean") == stacked.astype(float).mean()
    assert tensor.reduction_of_all_ranks(0, "median") == np.median(stacked)


def test_reductions_are_the_same_saved_or_computed(run: RunBuilder, tmp_path: Path) -> None:
    value = np.random.default_rng(0).normal(size=(17, 3)).astype(np.float32)
    full = Saved(value, raw=False, reductions=("median", "prod", "q0.9"))
    rank = run.rank(0)
    rank.step(TRAIN, 0, {"raw": value, "reduced": full}, close=False)
    rank.step(
        TRAIN,
        0,
        {
            "base": Saved(value, raw=False, reductions=()),
            "shape": Saved(value, raw=False),
        },
    ).end()
    trial = create_trial(tmp_path)
    raw, reduced = trial.tensor("raw"), trial.tensor("reduced")
    for name in ("min", "max", "mean", "std", "variance", "sum", "l1", "l2", "median", "prod"):
        for absolute in (False, True):
            if (name, absolute) == ("median", True):
                continue
            saved = reduced.reduction_value(0, name, abs=absolute)
            assert saved == raw.reduction_value(0, name, abs=absolute), name
    exact = value.astype(np.float64)
    assert reduced.reduction_value(0, "l2") == pytest.approx(np.linalg.norm(exact))
    assert reduced.reduction_value(0, "std") == pytest.approx(exact.std())
    assert reduced.reduction_value(0, "mean", abs=True) == pytest.approx(np.abs(exact).mean())
    assert reduced.reduction_value(0, "q0.90") == pytest.approx(np.quantile(value, 0.9))
    assert reduced.reduction_value(0, "mean").item() == reduced.reduction_value(0, "mean")
    assert reduced.reduction_values(0)["min", False] == value.min()
    assert ("median", False) in reduced.reduction_values(0)
    assert ("median", False) not in trial.tensor("base").reduction_values(0)
    assert raw.reduction_values(0) == {}
    with pytest.raises(errors.TensorUnavailableForStep) as caught:
        reduced.value(0)
    assert caught.value.has_reductions
    with pytest.raises(errors.TensorUnavailableForStep, match="median"):
        trial.tensor("base").reduction_value(0, "median")
    with pytest.raises(errors.TensorUnavailableForStep) as caught:
        reduced.values()
    assert caught.value.has_reductions
    with pytest.raises(errors.ConfigurationError):
        raw.reduction_value(0, "meen")
    shape = trial.tensor("shape")
    assert shape.shape(0) == (17, 3)
    assert shape.shapes() == {0: (17, 3)}
    with pytest.raises(errors.TensorUnavailableForStep) as caught:
        shape.value(0)
    assert not caught.value.has_reductions
    with pytest.raises(errors.TensorUnavailableForStep):
        shape.reduction_value(0, "mean")


def test_errors_say_what_is_wrong_and_survive_pickling(run: RunBuilder, tmp_path: Path) -> None:
    run.rank(0).step(TRAIN, 0, {"weight": array(2)}).step(TRAIN, 10, {"other": array(1)}).end()
    trial = create_trial(tmp_path)
    tensor = trial.tensor("weight")
    with pytest.raises(errors.TensorUnavailable, match="did you mean 'weight'") as caught:
        trial.tensor("weigth")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not trial.has_tensor("weigth")
    with pytest.raises(errors.StepUnavailable):
        tensor.value(5)
    with pytest.raises(errors.StepUnavailable):  # past the end of a job that ended
        tensor.value(11)
    with pytest.raises(errors.TensorUnavailableForStep):
        tensor.value(10)
    with pytest.raises(errors.TensorUnavailableForStep):
        tensor.workers(10)
    with pytest.raises(errors.ShapeUnavailableForStep):
        tensor.shape(10)
    for worker in ("worker_7", "rank0", 3):
        with pytest.raises(errors.InvalidWorker, match="worker_0"):
            tensor.value(0, worker=worker)
    assert trial.tensor_names(step=5) == []
    assert trial.tensor_names(step=0, mode=EVAL) == []
    assert all(
        issubclass(e, errors.TrialError) for e in (errors.StepUnavailable, errors.NoMoreData)
    )


def test_names_by_step_mode_regex_and_collection(run: RunBuilder, tmp_path: Path) -> None:
    rank = run.rank(0)
    rank.describe(
        CollectionInfo("weights", ("^(?!gradient).*weight",), (), {"TRAIN": {"save_interval": 7}}),
        CollectionInfo("custom", (), ("fc.bias",)),
    )
    rank.step(
        TRAIN,
        0,
        {
            "fc.weight": Saved(array(1), collections=("weights",)),
            "gradient/fc.weight": Saved(array(1), collections=("gradients",)),
            "fc.bias": Saved(array(1), collections=("custom",)),
            "optimizer/fc.weight/step": array(1),
        },
    )
    rank.step(EVAL, 0, {"loss": Saved(array(1), collections=("losses",))}, step=1).end()
    trial = create_trial(tmp_path)
    assert trial.tensor_names() == trial.tensors()
    assert trial.tensor_names(step=1) == ["loss"]
    assert trial.tensor_names(step=0, mode=EVAL) == trial.tensor_names(mode=EVAL) == ["loss"]
    assert trial.tensor_names(regex="weight$") == ["fc.weight", "gradient/fc.weight"]
    assert trial.tensor_names(regex=["^grad", "loss"]) == ["gradient/fc.weight", "loss"]
    assert trial.tensor_names(collection="weights") == ["fc.weight"]
    assert trial.tensor_names(collection="gradients") == ["gradient/fc.weight"]
    assert trial.tensor_names(collection="custom") == ["fc.bias"]
    assert trial.tensor_names(collection="nowhere") == []
    assert trial.tensor_names(collection=Collection("mine", ["bias"])) == ["fc.bias"]
    assert trial.tensor_names(collection="all") == trial.tensor_names()
    weights = trial.collection("weights")
    assert weights is not None
    assert trial.tensor_names(collection=weights) == ["fc.weight"]
    assert weights.tensor_names == {"fc.weight"}
    assert weights.save_config is not None
    assert weights.save_config.get_save_config(TRAIN).save_interval == 7
    assert {"weights", "custom", "losses", "gradients"} <= set(trial.collections())
    with pytest.raises(errors.ConfigurationError):
        trial.tensor_names(regex="a", collection="b")


def test_the_newest_block_of_a_step_wins(run: RunBuilder, tmp_path: Path) -> None:
    rank = run.rank(0)
    rank.step(TRAIN, 0, {"x": array(2), "early": array(1)}, close=False).flush()
    rank.step(TRAIN, 0, {"x": array(2, add=5), "late": array(1)}).flush()
    rank.step(TRAIN, 0, {"scalar/after": array(1, add=9)}, close=False).end()
    trial = create_trial(tmp_path)
    assert trial.steps() == [0]
    assert trial.tensor_names(step=0) == ["early", "late", "scalar/after", "x"]
    assert trial.tensor("x").value(0)[0] == 5
    assert trial.tensor("early").value(0)[0] == 0
    assert trial.tensor("scalar/after").value(0)[0] == 9


def test_values_of_a_worker_are_of_the_steps_it_has(run: RunBuilder, tmp_path: Path) -> None:
    first, second = run.rank(0, 2), run.rank(1, 2)
    for step in range(3):
        first.step(TRAIN, step, {"x": array(1, add=step)})
    first.end()
    second.step(TRAIN, 0, {"x": array(1)}).end()
    tensor = create_trial(tmp_path).tensor("x")
    assert tensor.steps() == [0]
    assert tensor.steps(show_incomplete_steps=True) == [0, 1, 2]
    assert list(tensor.values()) == [0]
    assert list(tensor.values(show_incomplete_steps=True)) == [0, 1, 2]
    assert list(tensor.values(worker="worker_0")) == [0, 1, 2]
    assert list(tensor.values(worker="worker_1")) == [0]
    with pytest.raises(errors.TensorUnavailableForStep, match="worker_1: ended"):
        tensor.value(2, worker="worker_1")
    with pytest.raises(errors.TensorUnavailableForStep, match="worker_1: ended"):
        tensor.stack(2)
    assert tensor.stack(2, partial=True).shape == (1, 1)
    assert list(tensor.across_ranks(2, "mean")) == ["worker_0"]


def test_stacking_shapes_that_differ_says_so(run: RunBuilder, tmp_path: Path) -> None:
    for rank in range(2):
        run.rank(rank, 2).step(TRAIN, 0, {"x": array(rank + 1)}).end()
    with pytest.raises(errors.TensorUnavailableForStep, match="shapes differ"):
        create_trial(tmp_path).tensor("x").stack(0)


def bulk_run(run: RunBuilder, tmp_path: Path) -> Trial:
    for rank in range(2):
        writer = run.rank(rank, 2)
        for step in range(3):
            loss = Saved(array(add=rank + step), collections=("losses",))
            writer.step(TRAIN, step, {"loss": loss, "w": Saved(array(2), reductions=())})
        writer.end()
    return create_trial(tmp_path)


def test_bulk_values_pick_names_steps_and_workers(run: RunBuilder, tmp_path: Path) -> None:
    trial = bulk_run(run, tmp_path)
    picked = trial.values(["loss"], steps=[0, 2, 99], workers=["worker_1"])
    assert {n: {s: list(w) for s, w in of.items()} for n, of in picked.items()} == {
        "loss": {0: ["worker_1"], 2: ["worker_1"]}
    }
    assert picked["loss"][2]["worker_1"] == 3.0
    with pytest.raises(errors.TensorUnavailable):
        trial.values(["los"])


def test_a_table_for_pandas(run: RunBuilder, tmp_path: Path) -> None:
    trial = bulk_run(run, tmp_path)
    frame = trial.to_dataframe(reductions=["max", "mean"])
    assert len(frame) == 12
    losses = frame[frame.tensor == "loss"]
    assert losses[losses.worker == "worker_1"]["value"].tolist() == [1.0, 2.0, 3.0]
    assert frame[frame.tensor == "w"]["max"].tolist() == [1.0] * 6
    assert set(frame["mode"]) == {"TRAIN"}


def test_without_pandas_the_error_names_the_extra(
    run: RunBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = bulk_run(run, tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(errors.ConfigurationError, match=r"pip install smdist\[dataframe\]"):
        trial.to_dataframe()


def test_a_trial_describes_itself(run: RunBuilder, tmp_path: Path) -> None:
    trial = bulk_run(run, tmp_path)
    assert "2 workers, 3 steps 0..2, 2 tensors, finished" in repr(trial)
    assert "3 complete, 0 partial" in trial.describe()
    assert "3 steps 0..2" in repr(trial.tensor("w"))
    assert trial.name == tmp_path.name


def test_what_has_no_order_says_where_its_values_are(run: RunBuilder, tmp_path: Path) -> None:
    run.rank(0).step(GLOBAL, 0, {"c": np.array([1 + 2j])}).end()
    tensor = create_trial(tmp_path).tensor("c")
    with pytest.raises(errors.TensorUnavailableForStep, match=r"complex.*value\(\)"):
        tensor.reduction_value(0, "mean")
    assert tensor.value(0)[0] == 1 + 2j


@pytest.mark.parametrize("wrong", ["(", ["x", "["], [3]])
def test_a_wrong_pattern_is_an_error_of_ours(run: RunBuilder, tmp_path: Path, wrong: Any) -> None:
    run.rank(0).step(GLOBAL, 0, {"x": array(2)}).end()
    with pytest.raises(errors.ConfigurationError, match=r"regex=.*re\.escape"):
        create_trial(tmp_path).tensor_names(regex=wrong)
