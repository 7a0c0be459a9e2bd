"""Optimizers: what they keep, those of before Keras 2.11, and those that scale the loss."""

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
    KERAS_3,
    close,
    data,
    hooked,
    make_model,
    read,
    training,
    way,
)

TRAIN = smd.modes.TRAIN
PLACE = way("inline")[1]
FIT: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
SLOT = "optimizer/top/kernel/momentums"
ADAMS = ["current"] if KERAS_3 else ["current", "of before"]
legacy: Any = tf.keras.optimizers.legacy


def compiled(optimizer: Any, **options: Any) -> Any:
    model = make_model(compiled=False)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False, **options)
    return model


def test_what_an_optimizer_keeps(tmp_path: Path) -> None:
    """It comes with the first update, where Keras' function is traced once more."""
    x, y = data()
    for name, place in (("alone", {}), ("several", PLACE)):
        with hooked(
            tmp_path / name, 2, include_collections=["optimizer_variables"], **place
        ) as hook:
            compiled("adam").fit(x, y, epochs=2, callbacks=[hook], **FIT)
    alone, several = read(tmp_path / "alone"), read(tmp_path / "several")
    kept = {n for n in alone.tensor_names() if n.startswith("optimizer/")}
    assert SLOT in kept
    assert kept == {n for n in several.tensor_names() if n.startswith("optimizer/")}
    for name in kept:
        expected, found = (t.tensor(name).values(mode=TRAIN) for t in (alone, several))
        assert set(expected) - {0} == set(found) - {0} == {2, 4, 6, 8}
        for step in (2, 4, 6, 8):
            close(found[step], expected[step])


@pytest.mark.parametrize("adam", ADAMS)
@pytest.mark.parametrize("name", ["eager", "compiled", "inline"])
def test_a_layer_that_is_frozen(tmp_path: Path, adam: str, name: str) -> None:
    x, y = data()
    options, place = way(name)
    model = make_model(compiled=False)
    model.get_layer("hidden").trainable = False
    model.compile(
        optimizer=legacy.Adam(0.1) if adam == "of before" else tf.keras.optimizers.Adam(0.1),
        loss="mse",
        run_eagerly=options.pop("eager", False),
        **options,
    )
    wanted = ["weights", "gradients", "optimizer_variables"]
    with hooked(tmp_path / "run", include_collections=wanted, **place) as hook:
        model.fit(x, y, callbacks=[hook], **FIT)
    trial = read(tmp_path / "run")
    kernel = trial.tensor("top/weights/top/kernel:0").values(mode=TRAIN)
    gradient = trial.tensor("gradients/top/kernelGrad").values(mode=TRAIN)
    assert list(kernel) == list(gradient) == list(range(5))
    assert not np.array_equal(kernel[0], kernel[4])
    slot = "optimizer/top/kernel/m" if adam == "of before" else SLOT
    kept = trial.tensor(slot).values(mode=TRAIN)
    assert set(kept) >= {1, 2, 3, 4}
    for step in range(1, 4):
        close(kept[step + 1], 0.9 * kept[step] + 0.1 * gradient[step])
    assert not [n for n in trial.tensor_names() if n.startswith("optimizer/hidden")]


def test_gradients_are_not_scaled(tmp_path: Path) -> None:
    x, y = data()
    sgd = tf.keras.optimizers.SGD(0.1)
    model = compiled(tf.keras.mixed_precision.LossScaleOptimizer(sgd, initial_scale=1024.0))
    with hooked(tmp_path / "run", include_collections=["gradients"], **PLACE) as hook:
        model.fit(x, y, callbacks=[hook], **FIT)
    trial = read(tmp_path / "run")
    for name, key in GRADIENTS.items():
        for number, step in enumerate(training(x, y)[0]):
            close(trial.tensor(name).value(number, mode=TRAIN), step.gradients[key])


class Parts(tf.keras.Model):  # type: ignore[misc]
    """Its optimizers are its own, one for each layer; the one that Keras knows of trains nothing."""

    def __init__(self, *optimizers: Any, noisy: bool = False) -> None:
        super().__init__(name="parts")
        self.noisy = noisy
        self.hidden = tf.keras.layers.Dense(5, name="hidden")
        self.top = tf.keras.layers.Dense(2, name="top")
        self.mine = optimizers
        self(np.zeros((1, 3), np.float32))

    def call(self, x: Any) -> Any:
        if self.noisy:
            x = x * tf.random.normal(tf.shape(x))
        return self.top(self.hidden(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        parts = [self.hidden.trainable_variables, self.top.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, parts)
        for optimizer, grads, variables in zip(self.mine, gradients, parts, strict=False):
            optimizer.apply_gradients(zip(grads, variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("name", ["eager", "compiled", "inline"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_optimizers_that_keras_does_not_know(tmp_path: Path, name: str, wrapped: bool) -> None:
    x, y = data()
    options, place = way(name)
    adams = [tf.keras.optimizers.Adam(rate) for rate in (0.25, 0.5)]
    elsewhere = tf.keras.optimizers.Adam()
    other = tf.Variable([1.0])
    elsewhere.apply_gradients([(tf.constant([1.0]), other)])
    model = Parts(*adams)
    model.compile(run_eagerly=options.pop("eager", False), **options)
    wanted = ["gradients", "optimizer_variables"]
    with hooked(tmp_path / "run", include_collections=wanted, **place) as hook:
        for optimizer in (elsewhere, *adams) if wrapped else ():
            hook.wrap_optimizer(optimizer)
        model.fit(x, y, callbacks=[hook], **FIT)
    trial = read(tmp_path / "run")
    said = [message for messages in trial.troubles().values() for message in messages]
    names = set(trial.tensor_names())
    assert {"optimizer/iterations", "optimizer/learning_rate"} <= names
    if not wrapped:
        assert not [n for n in names if n.startswith("gradients/")]
        assert len(said) == 1
        assert "pass the optimizers that its train_step applies to hook.wrap_optimizer" in said[0]
        return
    assert not said
    assert trial.tensor("optimizer/iterations").value(4, mode=TRAIN) == 0
    for number, rate in ((1, 0.25), (2, 0.5)):
        assert trial.tensor(f"optimizer/iterations_{number}").value(4, mode=TRAIN) == 4
        close(trial.tensor(f"optimizer/learning_rate_{number}").value(4, mode=TRAIN), rate)
    assert "optimizer/iterations_3" not in names
    for path in ("hidden/kernel", "hidden/bias", "top/kernel", "top/bias"):
        gradient = trial.tensor(f"gradients/{path}Grad").values(mode=TRAIN)
        kept = trial.tensor(f"optimizer/{path}/momentums").values(mode=TRAIN)
        for step in range(1, 4):
            close(kept[step + 1], 0.9 * kept[step] + 0.1 * gradient[step])


def test_nothing_is_missed_of_a_model_that_is_frozen(tmp_path: Path) -> None:
    x, y = data()
    model = Parts()
    model.trainable = False
    model.compile()
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:
        model.fit(x, y, callbacks=[hook], **FIT)
    assert not read(tmp_path / "run").troubles()


def parts(name: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """A model, its optimizers, and options of a hook; "random": all its steps run as one function."""
    options, place = way("plain" if name == "random" else name)
    adams = [tf.keras.optimizers.Adam(rate) for rate in (0.25, 0.5)]
    model = Parts(*adams, noisy=name == "random")
    model.compile(run_eagerly=options.pop("eager", False), **options)
    return model, adams, place


@pytest.mark.parametrize("name", ["eager", "compiled", "inline", "random"])
def test_an_optimizer_that_is_wrapped_later(tmp_path: Path, name: str) -> None:
    x, y = data()
    model, adams, place = parts(name)
    wanted = ["gradients", "optimizer_variables"]
    with hooked(tmp_path / "run", include_collections=wanted, **place) as hook:
        for optimizer in adams:
            hook.wrap_optimizer(optimizer)
            model.fit(x, y, callbacks=[hook], **FIT)
        made = model.train_function
        hook.wrap_optimizer(adams[0])
        model.fit(x, y, callbacks=[hook], **FIT)
        assert model.train_function is made
    trial = read(tmp_path / "run")
    for path, first in (("hidden/kernel", 0), ("top/kernel", 5)):
        gradient = trial.tensor(f"gradients/{path}Grad").values(mode=TRAIN)
        kept = trial.tensor(f"optimizer/{path}/momentums").values(mode=TRAIN)
        assert list(gradient) == list(range(first, 15))
        assert set(kept) >= set(range(first + 1, 15))
        for step in range(first + 1, 14):
            close(kept[step + 1], 0.9 * kept[step] + 0.1 * gradient[step])


@pytest.mark.parametrize("name", ["compiled", "random"])
def test_an_optimizer_that_another_hook_wrapped(tmp_path: Path, name: str) -> None:
    """What the two want is the same, and what one of them traced alone is not enough for both."""
    x, y = data()
    model, adams, _ = parts(name)
    with (
        hooked(tmp_path / "one", include_collections=["gradients"]) as one,
        hooked(tmp_path / "two", include_collections=["gradients"]) as two,
    ):
        one.wrap_optimizer(adams[0])
        two.wrap_optimizer(adams[1])
        model.fit(x, y, callbacks=[two], **FIT)
        model.fit(x, y, callbacks=[one, two], **FIT)
    first, second = read(tmp_path / "one"), read(tmp_path / "two")
    assert first.tensor("gradients/hidden/kernelGrad").steps(mode=TRAIN) == list(range(5))
    assert second.tensor("gradients/top/kernelGrad").steps(mode=TRAIN) == list(range(10))


def test_a_hook_below_that_asks_for_more(tmp_path: Path) -> None:
    """Who takes the batch looks again at what all of them may want."""
    x, y = data()
    model, _, _ = parts("random")
    with (
        hooked(tmp_path / "one", include_collections=["weights"]) as one,
        hooked(tmp_path / "two", include_collections=["weights"]) as two,
    ):
        model.fit(x, y, callbacks=[one, two], **FIT)
        one.get_collection("weights").include("hidden/outputs")
        model.fit(x, y, callbacks=[one, two], **FIT)
    outputs = read(tmp_path / "one").tensor("hidden/outputs")
    assert outputs.steps(mode=TRAIN) == list(range(5, 10))
    assert "hidden/outputs" not in read(tmp_path / "two").tensor_names()


def test_a_later_hook_is_told_what_it_misses(tmp_path: Path) -> None:
    """It looks into the function that an earlier one has left."""
    x, y = data()
    model, _, _ = parts("random")
    made = []
    for run, kind in (("one", np.float32), ("two", np.float64)):  # which is traced for itself
        batches = tf.data.Dataset.from_tensor_slices((x.astype(kind), y)).batch(BATCH)
        with hooked(tmp_path / run, include_collections=["gradients"]) as hook:
            model.fit(batches, shuffle=False, verbose=0, callbacks=[hook])
        made.append(model.train_function)
        (said,) = (m for found in read(tmp_path / run).troubles().values() for m in found)
        assert "no gradient was seen" in said
    assert made[0] is made[1]
