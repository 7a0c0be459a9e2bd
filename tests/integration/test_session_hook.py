"""What the hooks for sessions and estimators capture, compared with numpy's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

import smdist.tensorflow as smd
from tests.integration.keras_jobs import close, data, read

pytestmark = [
    pytest.mark.tensorflow,
    # What an estimator itself calls.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

v1 = tf.compat.v1
GLOBAL, TRAIN, EVAL, PREDICT = (
    smd.modes.GLOBAL,
    smd.modes.TRAIN,
    smd.modes.EVAL,
    smd.modes.PREDICT,
)
RATE = 0.1


def linear(x: Any, y: Any) -> tuple[Any, Any]:
    """A regression in the current graph: its loss and its prediction."""
    kernel = v1.get_variable("dense/kernel", initializer=np.ones((3, 2), np.float32))
    bias = v1.get_variable("dense/bias", initializer=np.zeros(2, np.float32))
    out = tf.identity(tf.matmul(x, kernel) + bias, name="out")
    loss = None if y is None else v1.losses.mean_squared_error(y, out)
    return loss, out


def by_hand(x: Any, y: Any, steps: int) -> list[dict[str, Any]]:
    kernel, bias, found = np.ones((3, 2), np.float32), np.zeros(2, np.float32), []
    for _ in range(steps):
        error = x @ kernel + bias - y
        step = {"kernel": kernel, "bias": bias, "out": x @ kernel + bias}
        step["loss"] = np.mean(error**2)
        step["gradient"] = x.T @ (2 * error / error.size)
        found.append(step)
        kernel = kernel - RATE * step["gradient"]
        bias = bias - RATE * (2 * error / error.size).sum(0)
    return found


def hooked(kind: Any, folder: Path, interval: int = 1, **options: Any) -> Any:
    config = smd.SaveConfig(save_interval=interval)
    return kind(folder, save_config=config, on_error="raise", **options)


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_a_monitored_session(tmp_path: Path, resource: bool) -> None:
    x, y = data(8)
    wanted = ["weights", "biases", "gradients", "losses", "mine"]
    hook = hooked(smd.SessionHook, tmp_path / "run", interval=2, include_collections=wanted)
    with tf.Graph().as_default(), v1.variable_scope("", use_resource=resource):
        given = v1.placeholder(tf.float32, (None, 3), name="x")
        unused = v1.placeholder(tf.float32, (), name="unused") * 2
        loss, out = linear(given, y)
        optimizer = hook.wrap_optimizer(v1.train.GradientDescentOptimizer(RATE))
        hook.add_to_collection("mine", [out, unused])
        train = optimizer.minimize(loss)
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(5):
                session.run(train, feed_dict={given: x})
        assert "compute_gradients" in vars(optimizer)
        hook.close()
        assert "compute_gradients" not in vars(optimizer)
    trial = read(tmp_path / "run")
    assert trial.steps(mode=GLOBAL) == [0, 2, 4]
    [loss_name] = trial.tensor_names(collection="losses")
    gradients = trial.tensor_names(collection="gradients")
    assert trial.tensor_names(collection="weights") == ["dense/kernel:0"]
    assert trial.tensor_names(collection="biases") == ["dense/bias:0"]
    assert trial.tensor_names(collection="mine") == ["out:0"]
    steps = by_hand(x, y, 5)
    for number in (0, 2, 4):
        step = steps[number]
        close(trial.tensor("dense/kernel:0").value(number), step["kernel"])
        close(trial.tensor("dense/bias:0").value(number), step["bias"])
        close(trial.tensor("out:0").value(number), step["out"])
        close(trial.tensor(loss_name).value(number), step["loss"])
        found = [trial.tensor(name).value(number) for name in gradients]
        assert sorted(value.shape for value in found) == [(2,), (3, 2)]
        [kernel] = [value for value in found if value.shape == (3, 2)]
        close(kernel, step["gradient"])


def test_everything_that_a_run_computes(tmp_path: Path) -> None:
    """And nothing else: neither what would need other inputs, nor the inside of a loop."""
    x, y = data(8)
    hook = hooked(smd.SessionHook, tmp_path / "run", save_all=True)
    with tf.Graph().as_default():
        loss, _ = linear(tf.constant(x), tf.constant(y))
        v1.placeholder(tf.float32, (), name="unused")
        looped = tf.while_loop(lambda i: i < 3.0, lambda i: (i + 1.0,), (loss * 0,))[0]
        train = v1.train.AdamOptimizer(0.1).minimize(loss)
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            session.run([train, looped])
            hook.save_scalar("mine", 3.0)
            session.run("out:0")
    hook.close()
    trial = read(tmp_path / "run")
    names = trial.tensor_names(step=0)
    assert {"dense/kernel:0", "out:0", "scalar/mine"} <= set(names)
    assert {"dense/kernel/Adam:0", "dense/bias/Adam_1:0"} <= set(
        trial.tensor_names(collection="optimizer_variables")
    )
    assert not any("unused" in name for name in names)
    assert "out:0" in trial.tensor_names(step=1)
    assert len(trial.tensor_names(step=1)) < len(names)


@pytest.mark.skipif(not hasattr(tf, "estimator"), reason="this TensorFlow has no estimators")
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
