"""What the hook for sessions captures, compared with numpy's results."""

from __future__ import annotations

import gc
import logging
import weakref
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


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
def test_an_optimizer_of_several_hooks(tmp_path: Path, order: tuple[int, int]) -> None:
    """Each takes off its own, whichever is closed first."""
    x, y = data(8)
    folders = [tmp_path / "one", tmp_path / "other"]
    hooks = [hooked(smd.SessionHook, f, include_collections=["gradients"]) for f in folders]
    optimizer = v1.train.GradientDescentOptimizer(RATE)
    for hook in hooks:
        assert hook.wrap_optimizer(hook.wrap_optimizer(optimizer)) is optimizer
    hooks[order[0]].close()
    with tf.Graph().as_default():
        train = optimizer.minimize(linear(tf.constant(x), tf.constant(y))[0])
        with v1.train.MonitoredSession(hooks=hooks) as session:
            session.run(train)
    hooks[order[1]].close()
    assert not {"compute_gradients", "apply_gradients"} & set(vars(optimizer))
    assert not list(folders[order[0]].iterdir())
    assert len(read(folders[order[1]]).tensor_names(collection="gradients")) == 2


def test_gradients_as_they_were_computed(tmp_path: Path) -> None:
    """Whatever the script makes of them before it applies them."""
    x, y = data(8)
    hook = hooked(smd.SessionHook, tmp_path / "run", include_collections=["gradients"])
    with tf.Graph().as_default():
        loss, _ = linear(tf.constant(x), tf.constant(y))
        optimizer = hook.wrap_optimizer(v1.train.GradientDescentOptimizer(RATE))
        pairs = [(2 * gradient, v) for gradient, v in optimizer.compute_gradients(loss)]
        train = optimizer.apply_gradients(pairs)
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            session.run(train)
    hook.close()
    trial = read(tmp_path / "run")
    found = [trial.tensor(n).value(0) for n in trial.tensor_names(collection="gradients")]
    assert len(found) == 2
    [kernel] = [value for value in found if value.shape == (3, 2)]
    close(kernel, by_hand(x, y, 1)[0]["gradient"])


def test_graphs_that_nobody_needs_any_more_are_gone(tmp_path: Path) -> None:
    x, y = data(8)
    hook = hooked(smd.SessionHook, tmp_path / "run", include_collections=["weights", "gradients"])
    graphs = []
    for _ in range(3):
        with tf.Graph().as_default() as graph:
            loss, _ = linear(tf.constant(x), tf.constant(y))
            train = hook.wrap_optimizer(v1.train.AdamOptimizer()).minimize(loss)
            with v1.train.MonitoredSession(hooks=[hook]) as session:
                session.run(train)
        graphs.append(weakref.ref(graph))
        del graph, loss, train, session
    gc.collect()
    assert [graph() is not None for graph in graphs] == [False, False, True]
    hook.close()
    assert read(tmp_path / "run").steps() == [0, 1, 2]


def test_an_optimizer_that_runs_eagerly_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its gradients have no names to be known by."""
    hook = smd.SessionHook(tmp_path / "run")
    optimizer = hook.wrap_optimizer(v1.train.GradientDescentOptimizer(RATE))
    weight = tf.Variable(2.0)
    with caplog.at_level(logging.WARNING, logger="smdist"):
        optimizer.minimize(lambda: weight * weight)
    hook.close()
    close(weight, 2 - RATE * 4)
    assert "looking at gradients" in caplog.text
