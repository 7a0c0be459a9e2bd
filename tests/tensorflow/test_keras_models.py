"""Models that change while a hook looks at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import (
    BATCH,
    RATE,
    close,
    data,
    hooked,
    initial,
    make_model,
    read,
    way,
)

TRAIN = smd.modes.TRAIN
ways = pytest.mark.parametrize("name", ["eager", "compiled", "plain", "inline"])


def compiled(model: Any, options: dict[str, Any]) -> Any:
    given = {"run_eagerly" if key == "eager" else key: value for key, value in options.items()}
    model.compile(tf.keras.optimizers.SGD(RATE), "mse", **given)
    return model


@ways
def test_layers_that_are_frozen_at_first(tmp_path: Path, name: str) -> None:
    x, y = data(8)
    options, place = way(name)
    model = make_model(compiled=False)
    frozen = model.get_layer("hidden")
    frozen.trainable = False
    compiled(model, options)
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"], **place) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        frozen.trainable = True
        compiled(model, options)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.tensor("gradients/top/kernelGrad").steps(mode=TRAIN) == [0, 1, 2, 3]
    gradient = trial.tensor("gradients/hidden/kernelGrad")
    assert gradient.steps(mode=TRAIN) == [2, 3]
    weight = trial.tensor("hidden/weights/hidden/kernel:0")
    close(weight.value(2, mode=TRAIN), initial()["w1"])
    after = weight.value(2, mode=TRAIN) - RATE * gradient.value(2, mode=TRAIN)
    close(weight.value(3, mode=TRAIN), after)


def test_a_change_that_keras_does_not_know_of_yet(tmp_path: Path) -> None:
    """Before it is compiled anew, a model is trained as it was."""
    x, y = data(8)
    model = make_model(compiled=False)
    frozen = model.get_layer("hidden")
    frozen.trainable = False
    compiled(model, {})
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        frozen.trainable = True
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.tensor("gradients/top/kernelGrad").steps(mode=TRAIN) == [0, 1, 2, 3]
    assert "gradients/hidden/kernelGrad" not in trial.tensor_names()
    close(frozen.kernel, initial()["w1"])
