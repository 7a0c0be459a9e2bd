"""How many steps an execution of several had, where Keras does not say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import BATCH, KERAS_3, data, hooked, make_model, read

TRAIN = smd.modes.TRAIN
SEVERAL: dict[str, Any] = {"steps_per_execution": 2, "jit_compile": False}


class Updating(tf.keras.Model):  # type: ignore[misc]
    """Each step applies its optimizer so many times."""

    times: int = 1
    mine: Any = None

    def train_step(self, data: Any) -> Any:
        x, y = data
        optimizer = self.mine or self.optimizer
        for _ in range(self.times):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def make(kind: str) -> Any:
    if kind == "accumulates":
        model = make_model(compiled=False)
        model.compile(tf.keras.optimizers.SGD(gradient_accumulation_steps=2), "mse", **SEVERAL)
        return model
    given = tf.keras.Input(shape=(3,))
    model = Updating(given, tf.keras.layers.Dense(2, name="top")(given))
    if kind == "updates twice":
        model.times = 2
    elif kind == "has its own":
        model.mine = tf.keras.optimizers.SGD()
    model.compile(optimizer="sgd", **SEVERAL)
    return model


KINDS = ["updates twice", "has its own", *(["accumulates"] if KERAS_3 else [])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "results"])
def test_steps_that_the_optimizer_does_not_count(tmp_path: Path, kind: str, inside: bool) -> None:
    x, y = data(16)
    wanted = ["weights"] if inside else []
    with hooked(tmp_path / "run", interval=7, include_collections=wanted) as hook:
        model = make(kind)
        for epochs in (1, 2, 3):
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
            assert hook.mode_steps[TRAIN] == 4 * epochs - 1
    assert read(tmp_path / "run").steps(mode=TRAIN) == [0, 7]


@pytest.mark.skipif(not KERAS_3, reason="optimizers of Keras 2 do not accumulate")
def test_an_execution_with_fewer_steps(tmp_path: Path) -> None:
    """The optimizer counts them, whether it updates or not."""
    x, y = data(20)
    with hooked(tmp_path / "run", interval=1000) as hook:
        make("accumulates").fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[hook])
        assert hook.mode_steps[TRAIN] == 9
