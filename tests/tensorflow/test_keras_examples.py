"""The TensorFlow examples as people run them: real processes, then what their runs hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from smdist import create_trial, modes
from smdist.trials import Trial
from tests.support.example_runs import EXAMPLES, run_example

TRAIN, EVAL = modes.TRAIN, modes.EVAL


def value(trial: Trial, name: str, step: int, worker: int = 0) -> Any:
    return trial.tensor(name).value(step, mode=TRAIN, worker=worker)


def test_fit(tmp_path: Path) -> None:
    said = run_example(tmp_path, EXAMPLES / "keras_fit.py", "--out-dir", "run")
    assert "Loss values were {0: " in said
    with create_trial(tmp_path / "run") as trial:
        assert trial.steps(TRAIN) == [0, 10, 20]
        assert trial.steps(EVAL) == [0]
        assert set(trial.tensor_names(collection="metrics")) == {"accuracy"}
        assert set(trial.tensor_names(collection="losses")) == {"loss"}
        outputs = value(trial, "classes/outputs", 20)
        np.testing.assert_allclose(outputs.sum(axis=1), 1, rtol=1e-5)
        logits = value(trial, "classes/inputs", 20) @ value(
            trial, "classes/weights/classes/kernel:0", 20
        )
        assert logits.shape == outputs.shape


@pytest.mark.parametrize("options", [[], ["--compiled"]], ids=["eager", "compiled"])
def test_tape(tmp_path: Path, options: list[str]) -> None:
    run_example(tmp_path, EXAMPLES / "keras_tape.py", "--out-dir", "run", *options)
    with create_trial(tmp_path / "run") as trial:
        assert trial.tensor("loss").steps(TRAIN) == [0, 10, 20, 30]
        assert trial.tensor("accuracy").steps(TRAIN) == list(range(32))
        assert value(trial, "loss", 30) < value(trial, "loss", 0)
        assert value(trial, "gradients/hidden/kernelGrad", 10).shape == (16, 32)


def check_replicas(trial: Trial) -> None:
    """Each update follows from the gradients that the replicas computed, as the trial has them."""
    assert trial.loaded_all_steps
    assert trial.workers() == ["worker_0", "worker_1"]
    assert trial.steps(TRAIN) == list(range(8))
    assert trial.troubles() == {}
    kernel, gradient = trial.tensor("top/weights/top/kernel:0"), "gradients/top/kernelGrad"
    for step in range(7):
        assert trial.missing(step, mode=TRAIN) == {}
        before = [value(trial, kernel.name, step, worker) for worker in (0, 1)]
        np.testing.assert_array_equal(before[0], before[1])
        local = [value(trial, gradient, step, worker) for worker in (0, 1)]
        assert not np.array_equal(local[0], local[1]), "not those before the reduction"
        expected = before[0] - 0.01 * (local[0] + local[1])
        np.testing.assert_allclose(value(trial, kernel.name, step + 1), expected, rtol=1e-4)
        for worker in (0, 1):  # of the mean over both: each counts for half
            x = value(trial, "inputs", step, worker)
            error = x @ before[worker] - x.sum(axis=1, keepdims=True)
            if step == 0:  # the bias is zero
                by_hand = x.T @ (2 * error / len(x)) / 2
                np.testing.assert_allclose(local[worker], by_hand, rtol=1e-3, atol=1e-4)


def test_mirrored(tmp_path: Path) -> None:
    run_example(tmp_path, EXAMPLES / "keras_mirrored.py", "--out-dir", "run", "--interval", "1")
    with create_trial(tmp_path / "run") as trial:
        check_replicas(trial)


@pytest.mark.parametrize("closes", [False, True], ids=["", "closed"])
def test_the_example_that_scripts_grew_from(tmp_path: Path, closes: bool) -> None:
    """One callback, the trial opened while the hook still is; the import is all that is ours."""
    x_train, y_train = np.eye(64, 4, dtype=np.float32), np.arange(64) % 3
    x_test, y_test = x_train[:32], y_train[:32]
    hook = smd.KerasHook(out_dir=tmp_path / "run")

    model = tf.keras.models.Sequential([tf.keras.layers.Dense(3, activation="softmax")])
    model.compile(
        optimizer="adam",
        loss="sparse_categorical_crossentropy",
    )
    reported = model.fit(x_train, y_train, epochs=2, callbacks=[hook], verbose=0)
    evaluated = model.evaluate(x_test, y_test, callbacks=[hook], verbose=0)
    if closes:
        hook.close()

    trial = smd.create_trial(out_dir=tmp_path / "run")
    assert trial.tensors() == ["loss"]
    losses = trial.tensor("loss")
    assert losses.values(mode=EVAL) == {0: np.float32(evaluated)}
    assert list(losses.values(mode=TRAIN)) == [0], "the interval is 500"
    assert 0 < losses.value(0, mode=TRAIN) < 2 * reported.history["loss"][0]
    hook.close()
