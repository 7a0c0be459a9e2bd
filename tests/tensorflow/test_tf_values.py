"""Values that a script saves itself: from eager code and from functions that TensorFlow traces."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow import session_jobs
from tests.tensorflow.keras_jobs import BATCH, data, hooked, make_model, read

GLOBAL, TRAIN, EVAL = smd.modes.GLOBAL, smd.modes.TRAIN, smd.modes.EVAL
KINDS = pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])


@KINDS
def test_values_of_a_step(tmp_path: Path, traced: bool) -> None:
    """In a function they are those of each run, whether its step is due or not."""
    weight = tf.Variable([1.0, 2.0], name="weight")
    with hooked(tmp_path / "run", interval=2, include_collections=["gradients"]) as hook:

        def step(x: Any) -> None:
            with hook.wrap_tape(tf.GradientTape()) as tape:
                product = weight * x
                hook.save_tensor("product", product, ["mine", "losses"])
                loss = tf.reduce_sum(product)
            gradient = tape.gradient(loss, weight)
            hook.save_tensor("before", weight, "mine")
            weight.assign_add(gradient)
            hook.save_tensor("after", weight, "mine")
            hook.save_scalar("sum", loss, sm_metric=True)
            hook.save_scalar("fixed", 3.5)

        run = tf.function(step) if traced else step
        for number in range(4):
            run(tf.constant(float(number)))
    trial = read(tmp_path / "run")
    assert trial.tensor("gradients/weightGrad").steps(mode=TRAIN) == [0, 2]
    assert set(trial.tensor_names(collection="mine")) == {"product", "before", "after"}
    assert trial.tensor_names(collection="sm_metrics") == ["scalar/sum"]
    value = np.array([1.0, 2.0])
    for number in range(4):
        for name, expected in {
            "product": value * number,
            "before": value,
            "after": value + number,
            "scalar/sum": (value * number).sum(),
            "scalar/fixed": 3.5,
        }.items():
            np.testing.assert_array_equal(trial.tensor(name).value(number, mode=TRAIN), expected)
        value = value + number


def test_a_function_for_xla_goes_on_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="smdist"), hooked(tmp_path / "run") as hook:

        def step(x: Any) -> Any:
            hook.save_tensor("mine", x)
            hook.record_tensor_value("mine", x)
            return x + 1

        run = tf.function(step, jit_compile=True)
        assert run(tf.constant(1.0)) == 2.0
        assert run(tf.constant(2.0)) == 3.0
        hook.save_scalar("last", 1.0)
    messages = [record.getMessage() for record in caplog.records]
    assert (
        sum(
            "mine is not saved: nothing gets out of a function compiled by XLA" in text
            for text in messages
        )
        == 1
    )
    assert read(tmp_path / "run").tensor_names() == ["scalar/last"]


@pytest.mark.parametrize("eager", [False, True], ids=["traced", "eager"])
def test_within_fit(tmp_path: Path, eager: bool, caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        hooked(tmp_path / "run", interval=2) as hook,
    ):

        class Telling(tf.keras.layers.Layer):  # type: ignore[misc]
            def call(self, inputs: Any) -> Any:
                hook.save_tensor("seen", inputs)
                return inputs

        given = tf.keras.Input(shape=(3,))
        outputs = tf.keras.layers.Dense(2)(Telling()(given))
        model = tf.keras.Model(given, outputs)
        model.compile("sgd", "mse", run_eagerly=eager, jit_compile=False)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        assert hook.mode_steps[TRAIN] == 4
    messages = [record.getMessage() for record in caplog.records]
    assert sum("seen is not saved: a function that fit runs" in m for m in messages) == (not eager)
    trial = read(tmp_path / "run")
    assert trial.tensor("loss").steps(mode=TRAIN) == [0, 2, 4]
    if eager:
        for number in range(5):
            batch = x[BATCH * number : BATCH * (number + 1)]
            np.testing.assert_array_equal(trial.tensor("seen").value(number, mode=TRAIN), batch)
    else:
        assert "seen" not in trial.tensor_names()


@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
def test_callbacks_beside_a_validation(tmp_path: Path, first: bool) -> None:
    """At the end of an epoch it is over, wherever in the list a callback stands."""
    x, y = data()
    with hooked(tmp_path / "run", interval=1000) as hook:

        class Saving(tf.keras.callbacks.Callback):  # type: ignore[misc]
            def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
                hook.save_scalar("batch", batch)

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                hook.save_scalar("epoch", epoch)

        callbacks = [Saving(), hook] if first else [hook, Saving()]
        make_model().fit(
            x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks,
            validation_data=(x[:8], y[:8]), validation_batch_size=BATCH,
        )  # fmt: skip
    trial = read(tmp_path / "run")
    assert trial.tensor("scalar/epoch").values(mode=TRAIN) == {4: 0.0, 9: 1.0}
    assert trial.tensor("scalar/epoch").steps(mode=EVAL) == []
    assert trial.tensor("scalar/batch").values(mode=EVAL) == {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}


def test_values_of_an_evaluation_that_has_no_steps(tmp_path: Path) -> None:
    """In a loop with a tape nobody but the script knows that it evaluates."""
    weight = tf.Variable(2.0, name="weight")
    with hooked(tmp_path / "run", interval=2, include_collections=["gradients"]) as hook:
        for epoch in range(4):
            for _ in range(3):
                with hook.wrap_tape(tf.GradientTape()) as tape:
                    loss = weight * weight
                tape.gradient(loss, weight)
            hook.set_mode(EVAL)
            if epoch % 2:
                hook.save_scalar("odd", epoch)
            hook.save_scalar("val", epoch)
            hook.save_tensor("vector", [epoch, epoch])
            hook.save_scalar("even", epoch)
        assert hook.mode_steps[TRAIN] == 11
        assert hook.mode_steps[EVAL] == 3
    trial = read(tmp_path / "run")
    every = {epoch: float(epoch) for epoch in range(4)}
    assert trial.tensor("scalar/val").values(mode=EVAL) == every
    assert trial.tensor("scalar/even").values(mode=EVAL) == every
    assert trial.tensor("vector").value(2, mode=EVAL).tolist() == [2, 2]
    assert trial.tensor("scalar/odd").values(mode=EVAL) == {1: 1.0, 3: 3.0}
    assert trial.tensor("gradients/weightGrad").steps(mode=TRAIN) == list(range(0, 12, 2))
    assert trial.troubles() == {}


@KINDS
def test_recorded_values(tmp_path: Path, traced: bool) -> None:
    """They follow the configuration, and are numbered in each step."""
    weight = tf.Variable(2.0, name="weight")
    with hooked(tmp_path / "run", interval=2, include_regex="^chosen") as hook:

        def step(x: Any) -> None:
            with hook.wrap_tape(tf.GradientTape()) as tape:
                loss = weight * x
            tape.gradient(loss, weight)
            hook.record_tensor_value("mse_loss", loss)
            hook.record_tensor_value("mse_loss", loss + 1)
            hook.record_tensor_value("chosen", loss)
            hook.record_tensor_value("other", loss)

        run = tf.function(step) if traced else step
        for number in range(4):
            run(tf.constant(float(number)))
    trial = read(tmp_path / "run")
    losses = {"loss", "mse_loss_output_0", "mse_loss_output_1"}
    assert set(trial.tensor_names(collection="losses")) == losses
    assert set(trial.tensor_names()) == {*losses, "chosen_output_0"}
    assert trial.tensor("mse_loss_output_0").values(mode=TRAIN) == {0: 0.0, 2: 4.0}
    assert trial.tensor("mse_loss_output_1").values(mode=TRAIN) == {0: 1.0, 2: 5.0}
    assert trial.tensor("chosen_output_0").values(mode=TRAIN) == {0: 0.0, 2: 4.0}


def test_recorded_values_of_a_session(tmp_path: Path) -> None:
    x, y = data(8)
    v1 = tf.compat.v1
    hook = session_jobs.hooked(smd.SessionHook, tmp_path / "run", interval=2)
    with tf.Graph().as_default():
        loss, _ = session_jobs.linear(tf.constant(x), tf.constant(y))
        with v1.train.MonitoredSession(hooks=[hook]) as session:
            for number in range(3):
                session.run(loss)
                hook.record_tensor_value("my_loss", float(number))
        hook.close()
    trial = read(tmp_path / "run")
    assert trial.tensor("my_loss_output_0").values(mode=GLOBAL) == {0: 0.0, 2: 2.0}
    assert "my_loss_output_0" in trial.tensor_names(collection="losses")
