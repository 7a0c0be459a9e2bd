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
