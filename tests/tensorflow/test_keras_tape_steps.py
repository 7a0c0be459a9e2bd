"""Loops with tapes: what is one step, what it starts with, and what its values are called."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import (
    BATCH,
    GRADIENTS,
    KERAS_3,
    RATE,
    WEIGHTS,
    close,
    data,
    hooked,
    initial,
    make_model,
    read,
    training,
    way,
)

TRAIN = smd.modes.TRAIN
KINDS = pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])


def told(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


# -- what a step starts with ------------------------------------------------------------------


def normalising(*, built: bool = True) -> Any:
    layers = tf.keras.layers
    parts = [
        layers.BatchNormalization(momentum=0.5, name="norm"),
        layers.Dense(1, name="top"),
    ]
    return tf.keras.Sequential([tf.keras.Input(shape=(3,)), *parts] if built else parts)


def normalise(model: Any, hook: smd.KerasHook, steps: int, *, traced: bool) -> Any:
    """What the mean of each batch is."""
    x = data()[0] + 1
    optimizer = hook.wrap_optimizer(tf.keras.optimizers.SGD(RATE))

    def step(inputs: Any) -> None:
        with hook.wrap_tape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(model(inputs, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if traced else step
    for _ in range(steps):
        run(tf.constant(x))
    return x.mean(0)


@KINDS
def test_variables_are_those_the_step_starts_with(tmp_path: Path, traced: bool) -> None:
    """Also those that a layer changes in its forward pass, and what an optimizer keeps."""
    model = normalising()
    wanted = ["weights", "optimizer_variables"]
    with hooked(tmp_path / "run", interval=2, include_collections=wanted) as hook:
        hook.register_model(model)
        mean = normalise(model, hook, 5, traced=traced)
    trial = read(tmp_path / "run")
    found = trial.tensor("norm/weights/norm/moving_mean:0")
    assert found.steps(mode=TRAIN) == [0, 2, 4]
    for number in (0, 2, 4):
        close(found.value(number, mode=TRAIN), mean * (1 - 0.5**number))
    for number in (2, 4):
        assert trial.tensor("optimizer/iterations").value(number, mode=TRAIN) == number


def test_variables_that_are_not_wanted_are_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = normalising()
    offered: list[str] = []
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:
        lanes = hook._recording.replicas
        offer = lanes.offer

        def noted(names: tuple[str, ...], values: Any, read: Any) -> None:
            offered.extend(names)
            offer(names, values, read)

        monkeypatch.setattr(lanes, "offer", noted)
        hook.register_model(model)
        normalise(model, hook, 2, traced=True)
    assert "gradients/top/kernelGrad" in offered
    assert not any("/weights/" in name or "optimizer/" in name for name in offered)


def test_a_model_that_is_built_in_its_first_step(tmp_path: Path) -> None:
    """Nobody can say what its statistics were before that."""
    model = normalising(built=False)
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_model(model)
        mean = normalise(model, hook, 2, traced=False)
    trial = read(tmp_path / "run")
    assert trial.tensor("norm/weights/norm/gamma:0").steps(mode=TRAIN) == [0, 1]
    statistics = trial.tensor("norm/weights/norm/moving_mean:0")
    assert statistics.steps(mode=TRAIN) == [1]
    close(statistics.value(1, mode=TRAIN), mean * 0.5)


@KINDS
def test_within_a_tape_of_the_scripts_own(tmp_path: Path, traced: bool) -> None:
    model = normalising()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_model(model)

        def step() -> Any:
            with tf.GradientTape() as outer:
                with hook.wrap_tape(tf.GradientTape()) as tape:
                    loss = tf.reduce_mean(model(tf.ones((2, 3)), training=True) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                total = tf.add_n([tf.reduce_sum(gradient) for gradient in gradients])
            return outer.gradient(total, model.trainable_variables)

        (tf.function(step) if traced else step)()
    trial = read(tmp_path / "run")
    close(trial.tensor("norm/weights/norm/moving_mean:0").value(0, mode=TRAIN), np.zeros(3))


# -- what is one step -------------------------------------------------------------------------


@KINDS
def test_tapes_that_are_open_together_are_one_step(tmp_path: Path, traced: bool) -> None:
    one, other = tf.Variable(2.0, name="one"), tf.Variable(3.0, name="other")
    wanted = ["weights", "gradients"]
    with hooked(tmp_path / "run", interval=2, include_collections=wanted) as hook:

        def step() -> None:
            with (
                hook.wrap_tape(tf.GradientTape()) as tape,
                hook.wrap_tape(tf.GradientTape()) as second,
            ):
                square, cube = one * one, other * other * other
            gradient = tape.gradient(square, one)
            second.gradient(cube, other)
            one.assign_sub(gradient / 4)

        run = tf.function(step) if traced else step
        for _ in range(5):
            run()
        assert hook.mode_steps[TRAIN] == 4
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == [0, 2, 4]
    assert set(trial.tensor_names(collection="losses")) == {"loss", "loss_1"}
    for number in (0, 2, 4):
        value = 2.0 / 2**number
        expected = {
            "loss": value**2,
            "loss_1": 27.0,
            "gradients/oneGrad": 2 * value,
            "gradients/otherGrad": 27.0,
            "one/weights/one:0": value,
            "other/weights/other:0": 3.0,
        }
        assert set(trial.tensor_names(step=number, mode=TRAIN)) == set(expected)
        for name, number_of in expected.items():
            assert trial.tensor(name).value(number, mode=TRAIN) == number_of


@KINDS
def test_several_gradients_of_one_tape(tmp_path: Path, traced: bool) -> None:
    one, other = tf.Variable(2.0, name="one"), tf.Variable(3.0, name="other")
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"]) as hook:

        def step() -> None:
            with hook.wrap_tape(tf.GradientTape(persistent=True)) as tape:
                square, cube = one * one, other * other * other
            tape.gradient(square, [one])
            tape.gradient(cube, [other])
            one.assign(7.0)
            tape.gradient(cube, [one, other], unconnected_gradients="zero")
            one.assign(2.0)

        run = tf.function(step) if traced else step
        run()
        run()
    trial = read(tmp_path / "run")
    expected = {
        "loss": 4.0,
        "loss_1": 27.0,
        "loss_2": 27.0,
        "gradients/oneGrad": 4.0,
        "gradients/oneGrad_1": 0.0,
        "gradients/otherGrad": 27.0,
        "gradients/otherGrad_1": 27.0,
        "one/weights/one:0": 2.0,
        "other/weights/other:0": 3.0,
    }
    assert set(trial.tensor_names()) == set(expected)
    for name, value in expected.items():
        assert trial.tensor(name).values(mode=TRAIN) == {0: value, 1: value}


@KINDS
def test_several_losses_of_one_gradient(tmp_path: Path, traced: bool) -> None:
    one, other = tf.Variable(2.0, name="one"), tf.Variable(3.0, name="other")
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:

        def step() -> None:
            with hook.wrap_tape(tf.GradientTape(persistent=True)) as tape:
                square, cube = one * one, other * other * other
                both = square + cube
            tape.gradient({"b": square, "a": cube}, [one, other])
            tape.gradient([square, both], [one])

        run = tf.function(step) if traced else step
        run()
        run()
    trial = read(tmp_path / "run")
    losses = {"loss": 27.0, "loss_1": 4.0, "loss_2": 4.0, "loss_3": 31.0}
    gradients = {
        "gradients/oneGrad": 4.0,
        "gradients/oneGrad_1": 8.0,
        "gradients/otherGrad": 27.0,
    }
    assert set(trial.tensor_names(collection="losses")) == set(losses)
    assert set(trial.tensor_names()) == {*losses, *gradients}
    for name, value in (losses | gradients).items():
        assert trial.tensor(name).values(mode=TRAIN) == {0: value, 1: value}


@KINDS
@pytest.mark.parametrize("vectorized", [True, False], ids=["pfor", "loop"])
def test_a_jacobian_is_not_a_gradient(tmp_path: Path, traced: bool, vectorized: bool) -> None:
    """It calls `tape.gradient` for each of its rows."""
    x, y = data(BATCH)
    model, rows = make_model(compiled=False), tf.constant(x)

    def step() -> Any:
        with hook.wrap_tape(tf.GradientTape(persistent=True)) as tape:
            tape.watch(rows)
            out = model(rows, training=True)
            loss = tf.reduce_mean((out - y) ** 2)
        whole = tape.jacobian(out, model.trainable_variables, experimental_use_pfor=vectorized)
        batch = tape.batch_jacobian(out, rows, experimental_use_pfor=vectorized)
        tape.gradient(loss, model.trainable_variables)
        return whole[-1], batch

    with hooked(tmp_path / "run", include_collections=["gradients", "layers"]) as hook:
        if not traced:
            hook.register_model(model)
        whole, batch = (tf.function(step) if traced else step)()
        assert hook.mode_steps[TRAIN] == 0
    np.testing.assert_array_equal(whole, np.broadcast_to(np.eye(2), (BATCH, 2, 2)))
    assert batch.shape == (BATCH, 2, 3)
    trial, expected = read(tmp_path / "run"), training(x, y)[0][0]
    close(trial.tensor("loss").value(0, mode=TRAIN), expected.loss)
    for name, key in GRADIENTS.items():
        close(trial.tensor(name).value(0, mode=TRAIN), expected.gradients[key])
    layers = set() if traced else {"hidden/outputs", "top/outputs"}
    assert layers <= set(trial.tensor_names())
    assert not [name for name in trial.tensor_names() if name.endswith("_1")]
    assert not trial.troubles()


@KINDS
def test_tapes_one_after_the_other_with_steps_by_hand(tmp_path: Path, traced: bool) -> None:
    one, other = tf.Variable(2.0, name="one"), tf.Variable(3.0, name="other")
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:

        def step() -> None:
            with hook.wrap_tape(tf.GradientTape()) as tape:
                square = one * one
            tape.gradient(square, one)
            with hook.wrap_tape(tf.GradientTape()) as tape:
                cube = other * other * other
            tape.gradient(cube, other)

        run = tf.function(step) if traced else step
        hook.step()  # from now on steps end with this
        for _ in range(3):
            run()
            hook.step()
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == [0, 1, 2]
    assert trial.tensor("loss").values(mode=TRAIN) == dict.fromkeys(range(3), 4.0)
    assert trial.tensor("loss_1").values(mode=TRAIN) == dict.fromkeys(range(3), 27.0)


def test_a_traced_step_within_an_open_tape(tmp_path: Path) -> None:
    variable = tf.Variable(2.0, name="one")
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:

        def inner() -> Any:
            with hook.wrap_tape(tf.GradientTape()) as tape:
                cube = variable**3
            return tape.gradient(cube, variable)

        run = tf.function(inner)
        for _ in range(2):
            with hook.wrap_tape(tf.GradientTape()) as tape:
                slope = run()
            assert slope == tape.gradient(slope, variable) == 12.0
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == [0, 1]
    assert trial.tensor("gradients/oneGrad").values(mode=TRAIN) == {0: 12.0, 1: 12.0}
    assert trial.tensor("gradients/oneGrad_1").values(mode=TRAIN) == {0: 12.0, 1: 12.0}


# -- within fit -------------------------------------------------------------------------------


def taped(hook: smd.KerasHook, **options: Any) -> Any:
    """The usual model, whose own step wraps its tape."""

    class Taped(tf.keras.Model):  # type: ignore[misc]
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with hook.wrap_tape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    given = tf.keras.Input(shape=(3,))
    hidden = tf.keras.layers.Dense(5, activation="relu", name="hidden")(given)
    model = Taped(given, tf.keras.layers.Dense(2, name="top")(hidden))
    model.set_weights(list(initial().values()))
    model.compile(tf.keras.optimizers.SGD(RATE), "mse", **options)
    return model


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("name", ["eager", "plain", "xla", "inline"])
def test_a_tape_within_fit_begins_no_step(tmp_path: Path, name: str, interval: int) -> None:
    x, y = data()
    options: dict[str, Any] = {"jit_compile": True}
    place: dict[str, Any] = {}
    if name != "xla":
        options, place = way(name)
        options = {"run_eagerly" if key == "eager" else key: v for key, v in options.items()}
    wanted = ["weights", "biases", "gradients"]
    with hooked(tmp_path / "run", interval, include_collections=wanted, **place) as hook:
        model = taped(hook, **options)
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[hook])
        assert hook.mode_steps[TRAIN] == 9
    trial = read(tmp_path / "run")
    steps = [step for epoch in training(x, y, epochs=2) for step in epoch]
    due = list(range(0, 10, interval))
    assert trial.steps(mode=TRAIN) == due
    for number in due:
        for weight, key in WEIGHTS.items():
            close(trial.tensor(weight).value(number, mode=TRAIN), steps[number].weights[key])
        for gradient, key in GRADIENTS.items():
            close(trial.tensor(gradient).value(number, mode=TRAIN), steps[number].gradients[key])


def test_a_tape_that_was_traced_before_fit_had_the_hook(tmp_path: Path) -> None:
    x, y = data()
    with hooked(tmp_path / "run", interval=2) as hook:
        model = taped(hook, jit_compile=False)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)  # as a loop of its own
        assert hook.mode_steps[TRAIN] == 4
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        assert hook.mode_steps[TRAIN] == 9
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert hook.mode_steps[TRAIN] == 14
    trial = read(tmp_path / "run")
    assert trial.tensor("loss").steps(mode=TRAIN) == list(range(0, 15, 2))


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False], ids=["one call", "two calls"])
@KINDS
def test_layers_of_the_same_name(
    tmp_path: Path, traced: bool, together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layers = tf.keras.layers
    one = tf.keras.Sequential([tf.keras.Input((3,)), layers.Dense(4, name="same")], name="one")
    other = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(2, name="same")], name="other")
    computed: list[Any] = []
    with hooked(tmp_path / "run", include_collections=["weights", "biases", "gradients"]) as hook:

        def step(x: Any) -> list[Any]:
            with hook.wrap_tape(tf.GradientTape(persistent=True)) as tape:
                loss = tf.reduce_mean(other(one(x)) ** 2)
            first, second = one.trainable_variables, other.trainable_variables
            if together:
                return list(tape.gradient(loss, [*first, *second]))
            return [*tape.gradient(loss, first), *tape.gradient(loss, second)]

        run = tf.function(step) if traced else step
        for _ in range(2):
            computed = run(tf.constant(data()[0]))
    trial = read(tmp_path / "run")
    if not KERAS_3:  # whose variables do not know the model they are of
        paths = ["same/kernel", "same/bias", "same/kernel_1", "same/bias_1"]
    elif together:
        paths = ["one/same/kernel", "one/same/bias", "other/same/kernel", "other/same/bias"]
    else:
        paths = ["same/kernel", "same/bias", "other/same/kernel", "other/same/bias"]
    assert told(caplog, "such as same/kernel_1") == (not KERAS_3)
    variables = [*one.trainable_variables, *other.trainable_variables]
    for path, gradient, variable in zip(paths, computed, variables, strict=True):
        top = path.partition("/")[0]
        for number in range(2):
            close(trial.tensor(f"gradients/{path}Grad").value(number, mode=TRAIN), gradient)
            close(trial.tensor(f"{top}/weights/{path}:0").value(number, mode=TRAIN), variable)


# -- what cannot be captured ------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 1000])
@pytest.mark.parametrize("nested", [False, True], ids=["itself", "within"])
def test_a_tape_in_a_function_for_xla(
    tmp_path: Path, nested: bool, interval: int, caplog: pytest.LogCaptureFixture
) -> None:
    variable = tf.Variable([1.0, 2.0], name="alone")
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        hooked(tmp_path / "run", interval) as hook,
    ):

        def step(x: Any) -> Any:
            with hook.wrap_tape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(variable * variable * x)
            return tape.gradient(loss, variable)

        inner = tf.function(step) if nested else step
        run = tf.function(lambda x: inner(x), jit_compile=True)
        for factor in (1.0, 2.0):
            np.testing.assert_array_equal(run(tf.constant(factor)), [2 * factor, 4 * factor])
        np.testing.assert_array_equal(run(tf.constant([1.0, 0.0])), [2.0, 0.0])  # traced anew
        assert hook.global_step == -1
    assert told(caplog, "jit_compile=False") == 1


def test_a_tape_around_a_function_for_xla(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    variable = tf.Variable([1.0, 2.0], name="alone")
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        hooked(tmp_path / "run") as hook,
    ):
        compiled = tf.function(lambda: tf.reduce_sum(variable * variable), jit_compile=True)
        with hook.wrap_tape(tf.GradientTape()) as tape:  # only what is inside is compiled
            loss = compiled()
        np.testing.assert_array_equal(tape.gradient(loss, variable), [2.0, 4.0])
    assert told(caplog, "XLA") == 0
    assert read(tmp_path / "run").tensor("loss").value(0, mode=TRAIN) == 5.0


@pytest.mark.parametrize("wrapped", [False, True], ids=["no tape", "tape"])
def test_an_optimizer_without_a_tape(
    tmp_path: Path, wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(BATCH)
    model = make_model(compiled=False)
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        hooked(tmp_path / "run") as hook,
    ):
        optimizer = hook.wrap_optimizer(tf.keras.optimizers.SGD(RATE))
        tape = tf.GradientTape()
        with hook.wrap_tape(tape) if wrapped else tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert told(caplog, "no gradient was saved: an optimizer was wrapped") == (not wrapped)
    [[step]] = training(x, y)
    for weight, expected in zip(model.get_weights(), step.updated.values(), strict=True):
        close(weight, expected)
