"""What tensors are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import BATCH, close, data, hooked, read, way

TRAIN = smd.modes.TRAIN


@pytest.mark.parametrize("name", ["eager", "compiled", "inline"])
@pytest.mark.parametrize("wanted", ["inputs_1", "labels_1", "predictions_1", "shared/outputs_1"])
def test_one_of_several_tensors(tmp_path: Path, name: str, wanted: str) -> None:
    """It need not be the first that is asked for."""
    x, y = data(8)
    layers = tf.keras.layers
    left, right = tf.keras.Input(shape=(3,)), tf.keras.Input(shape=(3,))
    shared = layers.Dense(2, name="shared")
    ends = [
        layers.Add(name="sum")([shared(left), shared(right)]),
        layers.Dense(2, name="top")(left),
    ]
    model = tf.keras.Model([left, right], ends)
    options, place = way(name)
    model.compile("sgd", ["mse", "mse"], run_eagerly=options.pop("eager", False), **options)
    with hooked(tmp_path / "run", include_regex=f"^{wanted}$", **place) as hook:
        dataset = tf.data.Dataset.from_tensor_slices(((x, 2 * x), (y, 3 * y))).batch(BATCH)
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.tensor_names(collection="default") == [wanted]
    found = trial.tensor(wanted)
    assert found.steps(mode=TRAIN) == [0, 1]
    if wanted == "inputs_1":
        close(found.value(1, mode=TRAIN), 2 * x[4:])
    if wanted == "labels_1":
        close(found.value(1, mode=TRAIN), 3 * y[4:])
