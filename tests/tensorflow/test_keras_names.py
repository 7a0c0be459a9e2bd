"""What tensors are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import BATCH, KERAS_3, close, data, hooked, read, way

TRAIN = smd.modes.TRAIN
RECURRENT = [
    f"{cell}/{leaf}"
    for cell in ("both/forward_lstm/lstm_cell", "both/backward_lstm/lstm_cell", "gru/gru_cell")
    for leaf in ("kernel", "recurrent_kernel", "bias")
]
ATTENTION = [
    f"mha/{part}/{leaf}"
    for part in ("query", "key", "value", "attention_output")
    for leaf in ("kernel", "bias")
]
DENSE = ["each/dense/kernel", "each/dense/bias"]


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


def names_of(folder: Path, optimizer: Any) -> set[str]:
    layers = tf.keras.layers
    given = tf.keras.Input(shape=(2, 3))
    both = layers.Bidirectional(layers.LSTM(2, return_sequences=True, name="lstm"), name="both")
    found = layers.GRU(4, return_sequences=True, name="gru")(both(given))
    found = layers.MultiHeadAttention(2, 2, name="mha")(found, found)
    found = layers.TimeDistributed(layers.Dense(1, name="dense"), name="each")(found)
    model = tf.keras.Model(given, found)
    model.compile(optimizer, "mse", jit_compile=False)
    wanted = ["weights", "biases", "gradients", "layers", "optimizer_variables"]
    with hooked(folder, include_collections=wanted) as hook:
        x, y = np.ones((4, 2, 3), np.float32), np.ones((4, 2, 1), np.float32)
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[hook])
    return set(read(folder).tensor_names()) - {"loss"}


def sides(layer: str, *numbers: str) -> set[str]:
    return {f"{layer}/{side}{number}" for side in ("inputs", "outputs") for number in numbers}


def test_layers_within_layers_have_the_same_names_in_both_keras(tmp_path: Path) -> None:
    found = names_of(tmp_path / "run", tf.keras.optimizers.Nadam())
    paths = [*RECURRENT, *ATTENTION, *DENSE]
    kept = {"optimizer/iterations", "optimizer/learning_rate"}
    for path in paths:
        kept |= {f"optimizer/{path}/{slot}" for slot in ("momentums", "velocities")}
    assert {name for name in found if name.startswith("gradients/")} == {
        f"gradients/{path}Grad" for path in paths
    }
    assert {name for name in found if "/weights/" in name} == {
        f"{path.partition('/')[0]}/weights/{path}:0" for path in paths
    }
    assert {name for name in found if name.startswith("optimizer/")} == (
        kept | {"optimizer/variable"} if KERAS_3 else kept
    )
    shared = {"mha/inputs_0", "mha/inputs_1", "mha/outputs"}
    for layer in ("both", "both/forward_lstm", "both/backward_lstm", "gru", "each", "each/dense"):
        shared |= sides(layer, "")
    for part in ("query", "key", "value", "attention_output"):
        shared |= sides(f"mha/{part}", "")
    layers = {name for name in found if "inputs" in name or "outputs" in name}
    assert shared <= layers
    alone = layers - shared
    if KERAS_3:
        assert sides("each/dense", "_1") <= alone  # once per time step
        assert all(
            "/lstm_cell/" in n or "/gru_cell/" in n for n in alone - sides("each/dense", "_1")
        )
        assert {name.rpartition("/")[0] for name in alone} >= {
            p.rpartition("/")[0] for p in RECURRENT
        }
    else:
        assert alone == sides("mha/softmax", "") | sides("mha/dropout", "")


def optimizers() -> dict[str, tuple[Any, list[str]]]:
    """With what they keep for each variable."""
    found = tf.keras.optimizers
    both = {
        "sgd": (found.SGD(), [] if KERAS_3 else ["momentums"]),
        "momentum": (found.SGD(momentum=0.9), ["momentums"]),
    }
    old = {} if KERAS_3 else {
        "old sgd": (found.legacy.SGD(momentum=0.9), ["momentum"]),
        "old adam": (found.legacy.Adam(), ["m", "v"]),
    }  # fmt: skip
    return {**both, **old}


@pytest.mark.parametrize("name", list(optimizers()))
def test_what_optimizers_keep(tmp_path: Path, name: str) -> None:
    optimizer, slots = optimizers()[name]
    x, y = data(8)
    model = tf.keras.Sequential([tf.keras.Input(shape=(3,)), tf.keras.layers.Dense(2, name="top")])
    model.compile(optimizer, "mse")
    with hooked(tmp_path / "run", include_collections=["optimizer_variables"]) as hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    found = set(read(tmp_path / "run").tensor_names(collection="optimizer_variables"))
    general = {"optimizer/iterations"} | (
        set() if name.startswith("old") else {"optimizer/learning_rate"}
    )
    assert found == general | {f"optimizer/top/{v}/{s}" for v in ("kernel", "bias") for s in slots}
