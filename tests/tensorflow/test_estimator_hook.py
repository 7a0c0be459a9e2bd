"""What the hook for estimators captures, compared with numpy's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import close, data, read
from tests.tensorflow.session_jobs import RATE, by_hand, hooked, linear, v1

pytestmark = [
    # What an estimator itself calls.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TRAIN, EVAL, PREDICT = smd.modes.TRAIN, smd.modes.EVAL, smd.modes.PREDICT


def test_an_estimator(tmp_path: Path) -> None:
    x, y = data(8)

    def inputs() -> Any:
        return tf.data.Dataset.from_tensors(({"x": x}, y)).repeat(3)

    hook = hooked(
        smd.EstimatorHook, tmp_path / "run", include_collections=["weights", "gradients", "mine"]
    )
    hook.get_collection("mine").include("^out:0$")

    def model(features: Any, labels: Any, mode: Any) -> Any:
        loss, out = linear(features["x"], labels)
        spec = tf.estimator.EstimatorSpec
        if mode == tf.estimator.ModeKeys.PREDICT:
            return spec(mode, predictions={"out": out})
        if mode == tf.estimator.ModeKeys.EVAL:
            return spec(mode, loss=loss)
        optimizer = hook.wrap_optimizer(v1.train.GradientDescentOptimizer(RATE))
        step = v1.train.get_or_create_global_step()
        return spec(mode, loss=loss, train_op=optimizer.minimize(loss, global_step=step))

    estimator = tf.estimator.Estimator(model, model_dir=str(tmp_path / "model"))
    estimator.train(inputs, hooks=[hook])
    estimator.evaluate(inputs, hooks=[hook])
    list(estimator.predict(lambda: inputs().take(1), hooks=[hook]))
    hook.close()
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == trial.steps(mode=EVAL) == [0, 1, 2]
    assert trial.steps(mode=PREDICT) == [0]
    [loss_name] = trial.tensor_names(collection="losses")
    steps = by_hand(x, y, 4)
    for number in range(3):
        close(trial.tensor("dense/kernel:0").value(number, mode=TRAIN), steps[number]["kernel"])
        close(trial.tensor(loss_name).value(number, mode=TRAIN), steps[number]["loss"])
        close(trial.tensor("out:0").value(number, mode=EVAL), steps[3]["out"])
    close(trial.tensor("out:0").value(0, mode=PREDICT), steps[3]["out"])
    assert trial.tensor(trial.tensor_names(collection="gradients")[0]).steps(mode=EVAL) == []


def test_an_estimator_of_tensorflows_own(tmp_path: Path) -> None:
    """Its optimizer is one of Keras, which leaves no trace in the collections of the graph."""
    x, y = data(8)

    def inputs() -> Any:
        return tf.data.Dataset.from_tensors(({"x": x}, y[:, :1])).repeat(3)

    column = tf.feature_column.numeric_column("x", (3,))
    for name, optimizer in {
        "default": "Adagrad",
        "nadam": tf.keras.optimizers.legacy.Nadam,
    }.items():
        hook = hooked(smd.EstimatorHook, tmp_path / name, include_collections=["weights"])
        estimator = tf.estimator.DNNRegressor(
            [4], [column], model_dir=str(tmp_path / f"{name} model"), optimizer=optimizer
        )
        for _ in range(2):
            estimator.train(inputs, hooks=[hook])
            estimator.evaluate(inputs, hooks=[hook])
            list(estimator.predict(lambda: inputs().take(1), hooks=[hook]))
        hook.close()
        trial = read(tmp_path / name)
        assert trial.steps(mode=TRAIN) == trial.steps(mode=EVAL) == list(range(6))
        assert trial.steps(mode=PREDICT) == [0, 1]


def test_a_mode_that_the_script_has_set(tmp_path: Path) -> None:
    """It holds for a graph that does not tell what it is for."""
    x, _ = data(8)
    hook = hooked(smd.EstimatorHook, tmp_path / "run")

    def run() -> None:
        with tf.Graph().as_default():
            _, out = linear(tf.constant(x), None)
            with v1.train.MonitoredSession(hooks=[hook]) as session:
                session.run(out)
                hook.save_scalar("mine", 1.0)

    for mode in (EVAL, TRAIN, TRAIN):
        hook.set_mode(mode)
        run()
    run()
    hook.close()
    mine = read(tmp_path / "run").tensor("scalar/mine")
    assert [len(mine.steps(mode=mode)) for mode in (TRAIN, EVAL, PREDICT)] == [2, 1, 1]
