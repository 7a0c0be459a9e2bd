"""Several Keras hooks in one `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import (
    BATCH,
    GRADIENTS,
    WEIGHTS,
    close,
    data,
    hooked,
    is_ours,
    make_model,
    read,
    running_mean,
    training,
    way,
)

TRAIN, EVAL, PREDICT = smd.modes.TRAIN, smd.modes.EVAL, smd.modes.PREDICT
ways = pytest.mark.parametrize("name", ["eager", "compiled", "inline"])


@ways
def test_each_captures_what_it_is_asked_for(tmp_path: Path, name: str) -> None:
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    with (
        hooked(tmp_path / "one", 1, include_collections=["weights", "biases"], **place) as one,
        hooked(tmp_path / "two", 2, include_collections=["gradients", "layers"], **place) as two,
        hooked(tmp_path / "few", 3, **place) as few,
    ):
        hooks = [one, two, few]
        model.fit(
            x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=hooks,
            validation_data=(x[:8], y[:8]), validation_batch_size=BATCH,
        )  # fmt: skip
        model.predict(x, batch_size=BATCH, verbose=0, callbacks=hooks)
        for kind in ("train", "test", "predict"):
            assert not is_ours(getattr(model, f"{kind}_function"))
        for hook in hooks:
            assert [hook.mode_steps[mode] for mode in (TRAIN, EVAL, PREDICT)] == [9, 3, 4]
    epochs = training(x, y, epochs=2)
    steps = [step for epoch in epochs for step in epoch]
    close(model.get_weights()[0], steps[-1].updated["w1"])

    trial = read(tmp_path / "one")
    assert set(trial.tensor_names()) == {*WEIGHTS, "loss", "mae", "val_loss", "val_mae"}
    assert trial.steps(mode=TRAIN) == list(range(10))
    assert trial.steps(mode=EVAL) == [0, 1, 2, 3]
    for number, step in enumerate(steps):
        for tensor, key in WEIGHTS.items():
            close(trial.tensor(tensor).value(number, mode=TRAIN), step.weights[key])
    trial = read(tmp_path / "two")
    assert not set(WEIGHTS) & set(trial.tensor_names())
    assert trial.tensor("gradients/top/kernelGrad").steps(mode=TRAIN) == [0, 2, 4, 6, 8]
    for number in range(0, 10, 2):
        for tensor, key in GRADIENTS.items():
            close(trial.tensor(tensor).value(number, mode=TRAIN), steps[number].gradients[key])
        outputs = trial.tensor("hidden/outputs").value(number, mode=TRAIN)
        close(outputs, steps[number].hidden)
    assert trial.tensor("hidden/outputs").steps(mode=EVAL) == [0, 2]
    assert trial.tensor("hidden/outputs").steps(mode=PREDICT) == [0, 2, 4]
    trial = read(tmp_path / "few")
    losses = [m for epoch in epochs for m in running_mean([step.loss for step in epoch])]
    found = trial.tensor("loss").values(mode=TRAIN)
    assert list(found) == [0, 3, 6, 9]
    close(list(found.values()), losses[::3])


@ways
@pytest.mark.parametrize("leaves", [0, 1], ids=["the first", "the second"])
def test_either_may_close_within_fit(tmp_path: Path, name: str, leaves: int) -> None:
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    hooks = [
        hooked(tmp_path / str(number), include_collections=["weights", "gradients"], **place)
        for number in range(2)
    ]

    class Closing(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                hooks[leaves].close()

    callbacks = [*hooks, Closing()]
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    assert not is_ours(model.train_function)
    hooks[1 - leaves].close()
    assert read(tmp_path / str(leaves)).steps(mode=TRAIN) == [0, 1, 2]
    trial = read(tmp_path / str(1 - leaves))
    assert trial.steps(mode=TRAIN) == [0, 1, 2, 3, 4]
    for number, step in enumerate(training(x, y)[0]):
        for tensor, key in GRADIENTS.items():
            close(trial.tensor(tensor).value(number, mode=TRAIN), step.gradients[key])
    assert "train_step" not in vars(model)


def test_nothing_is_traced_again(tmp_path: Path) -> None:
    x, y = data()
    calls = 0

    class Counting(tf.keras.layers.Dense):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            nonlocal calls
            calls += 1  # Python runs while a function is traced, and not when it is called
            return super().call(inputs)

    model = tf.keras.Sequential([tf.keras.Input(shape=(3,)), Counting(2, name="top")])
    model.compile(optimizer="sgd", loss="mse")
    with (
        hooked(tmp_path / "one", include_collections=["gradients"]) as one,
        hooked(tmp_path / "two", 2, include_collections=["layers"]) as two,
    ):
        seen = []
        for _ in range(3):  # the steps of the second are odd ones every other time
            for _ in range(2):
                model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[one, two])
            seen.append(calls)
    assert seen[1:] == seen[:1] * 2
    assert read(tmp_path / "one").steps(mode=TRAIN) == list(range(30))
    assert read(tmp_path / "two").steps(mode=TRAIN) == list(range(0, 30, 2))


def test_several_steps_in_one_execution(tmp_path: Path) -> None:
    x, y = data()
    model = make_model(steps_per_execution=2)
    with (
        hooked(tmp_path / "one", 3, include_collections=["gradients"]) as one,
        hooked(tmp_path / "two", 4, include_collections=["gradients"]) as two,
    ):
        options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(x, y, callbacks=[one, two], **options)
    steps = [step for epoch in training(x, y, epochs=2) for step in epoch]
    for folder, due in (("one", [0, 3, 6, 9]), ("two", [0, 4, 8])):
        gradient = read(tmp_path / folder).tensor("gradients/hidden/kernelGrad")
        assert gradient.steps(mode=TRAIN) == due
        for number in due:
            close(gradient.value(number, mode=TRAIN), steps[number].gradients["w1"])


def test_a_step_that_draws_random_numbers(tmp_path: Path) -> None:
    """It has one function, whoever wants what of it: what the hooks see is of the same step."""
    x, y = data()

    class Noise(tf.keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs * tf.random.normal(tf.shape(inputs))

    layers = [tf.keras.Input(shape=(3,)), Noise(name="noise"), tf.keras.layers.Dense(2, name="top")]
    model = tf.keras.Sequential(layers)
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
    with (
        hooked(tmp_path / "one", include_collections=["gradients"]) as one,
        hooked(tmp_path / "two", 2, include_collections=["layers", "outputs"]) as two,
    ):
        for hooks in ([one], [one, two], [two, one]):
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=hooks)
    first, second = read(tmp_path / "one"), read(tmp_path / "two")
    assert first.steps(mode=TRAIN) == list(range(15))
    gradient = first.tensor("gradients/top/kernelGrad")
    assert gradient.steps(mode=TRAIN) == list(range(15))
    seen = []
    for number in second.steps(mode=TRAIN):

        def value(name: str, number: int = number) -> Any:
            return second.tensor(name).value(number, mode=TRAIN)

        error = value("predictions") - value("labels")
        expected = value("noise/outputs").T @ (2 * error / error.size)
        close(gradient.value(number + 5, mode=TRAIN), expected)  # the first came five steps earlier
        seen.append((value("noise/outputs") / value("noise/inputs")).tobytes())
    assert len(seen) == len(set(seen)) == 5, "no numbers twice"
