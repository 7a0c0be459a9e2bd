"""Loops of a script's own with a GradientTape, compared with numpy's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import (
    BATCH,
    GRADIENTS,
    RATE,
    WEIGHTS,
    close,
    data,
    hooked,
    make_model,
    read,
    training,
)

TRAIN = smd.modes.TRAIN


def loop(model: Any, hook: smd.KerasHook, *, traced: bool, epochs: int = 1) -> int:
    """Train as a script would; how often the step was traced."""
    x, y = data()
    optimizer = hook.wrap_optimizer(tf.keras.optimizers.SGD(RATE))
    traces = 0

    def step(inputs: Any, labels: Any) -> Any:
        nonlocal traces
        traces += 1
        with hook.wrap_tape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - labels) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    run = tf.function(step) if traced else step
    for _ in range(epochs):
        for start in range(0, len(x), BATCH):
            loss = run(tf.constant(x[start : start + BATCH]), tf.constant(y[start : start + BATCH]))
            hook.save_tensor("seen", loss, "metrics")
    return traces


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("registered", [False, True], ids=["", "registered"])
def test_a_loop_of_ones_own(tmp_path: Path, traced: bool, registered: bool) -> None:
    x, y = data()
    model = make_model(compiled=False)
    with hooked(
        tmp_path / "run", interval=2, include_collections=["weights", "biases", "gradients"]
    ) as hook:
        if registered:
            hook.register_model(model)
        traces = loop(model, hook, traced=traced, epochs=2)
        assert not traced or traces <= 2
    trial = read(tmp_path / "run")
    steps = [step for epoch in training(x, y, epochs=2) for step in epoch]
    assert set(trial.tensor_names()) == {*WEIGHTS, *GRADIENTS, "loss", "seen"}
    assert trial.tensor("loss").steps(mode=TRAIN) == [0, 2, 4, 6, 8]
    assert trial.tensor("seen").steps(mode=TRAIN) == list(range(10))
    for number in range(0, 10, 2):
        step = steps[number]
        close(trial.tensor("loss").value(number, mode=TRAIN), step.loss)
        for name, key in WEIGHTS.items():
            close(trial.tensor(name).value(number, mode=TRAIN), step.weights[key])
        for name, key in GRADIENTS.items():
            close(trial.tensor(name).value(number, mode=TRAIN), step.gradients[key])


def test_layers_of_a_registered_model(tmp_path: Path) -> None:
    x, y = data()
    model = make_model(compiled=False)
    with hooked(tmp_path / "run", include_collections=["layers", "inputs", "outputs"]) as hook:
        hook.register_model(model)
        loop(model, hook, traced=False)
        assert "call" not in vars(model)
        assert all("call" not in vars(layer) for layer in model.layers)
    trial = read(tmp_path / "run")
    for number, step in enumerate(training(x, y)[0]):
        close(trial.tensor("hidden/outputs").value(number, mode=TRAIN), step.hidden)
        close(trial.tensor("inputs").value(number, mode=TRAIN), step.x)
        close(trial.tensor("predictions").value(number, mode=TRAIN), step.out)


def test_a_tape_that_is_used_otherwise(tmp_path: Path) -> None:
    """Persistent, for single variables, for no variables at all: results are the tape's."""
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:
        variable = tf.Variable([1.0, 2.0], name="alone")
        with hook.wrap_tape(tf.GradientTape(persistent=True)) as tape:
            fixed = tf.constant([3.0, 4.0])
            tape.watch(fixed)
            result = tf.reduce_sum(variable * variable * fixed)
        np.testing.assert_array_equal(tape.gradient(result, variable), [6.0, 16.0])
        np.testing.assert_array_equal(tape.gradient(result, [fixed])[0], [1.0, 4.0])
    trial = read(tmp_path / "run")
    np.testing.assert_array_equal(
        trial.tensor("gradients/aloneGrad").value(0, mode=TRAIN), [6.0, 16.0]
    )
