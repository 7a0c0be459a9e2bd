"""What the hook for sessions captures, compared with numpy's results."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import close, data, read
from tests.tensorflow.session_jobs import RATE, by_hand, hooked, linear, v1

pytestmark = [
    # What TensorFlow 1's own functions calls.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

GLOBAL = smd.modes.GLOBAL


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
