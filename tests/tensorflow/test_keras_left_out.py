"""What cannot be stored of a step is left out, and said once; everything else of it is there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from smdist.workers.keras_adapter import recording as keras_recording
from smdist.workers.tf_adapter.tensor_access import array_of
from tests.tensorflow.keras_jobs import (
    BATCH,
    close,
    data,
    hooked,
    make_model,
    read,
    training,
    way,
)

TRAIN = smd.modes.TRAIN
WAYS = ["eager", "compiled", "inline"]


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def quiet_hook(folder: Path, **options: Any) -> smd.KerasHook:
    """One that goes on after an error."""
    return smd.KerasHook(folder, save_config=smd.SaveConfig(save_interval=1), **options)


@pytest.mark.parametrize("name", WAYS)
def test_strings(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    layers = tf.keras.layers
    words = tf.keras.Input(shape=(1,), dtype="string", name="words")
    numbers = tf.keras.Input(shape=(3,), name="numbers")
    ids = layers.StringLookup(vocabulary=["a", "b", "c"], name="lookup")(words)
    flat = layers.Flatten(name="flat")(layers.Embedding(5, 3, name="table")(ids))
    joined = layers.Concatenate(name="join")([flat, numbers])
    model = tf.keras.Model([words, numbers], layers.Dense(1, name="top")(joined))
    options, place = way(name)
    model.compile(optimizer="sgd", loss="mse", run_eagerly=options.pop("eager", False), **options)
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    given = (tf.constant([["a"], ["b"], ["c"], ["a"]] * 2), x), np.ones((8, 1), np.float32)
    batches = tf.data.Dataset.from_tensor_slices(given).batch(BATCH)
    wanted = ["gradients", "inputs", "outputs", "layers"]
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        hooked(tmp_path / "run", include_collections=wanted, **place) as hook,
    ):
        model.fit(batches, epochs=2, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    for tensor in (
        "gradients/top/kernelGrad",
        "gradients/table/embeddingsGrad",
        "labels",
        "predictions",
        "inputs_1",
        "lookup/outputs",
        "table/outputs",
    ):
        assert trial.tensor(tensor).steps(mode=TRAIN) == [0, 1, 2, 3], tensor
    close(trial.tensor("inputs_1").value(1, mode=TRAIN), x[4:])
    assert not {"inputs_0", "lookup/inputs"} & set(trial.tensor_names())
    for tensor in ("inputs_0", "lookup/inputs"):
        assert said(caplog, f"{tensor} is left out: elements of type string") == 1
    assert all(record.exc_info is None for record in caplog.records)


def of_form(form: str) -> Any:
    """What four samples are given as, and what makes it numbers of a row each."""
    if form == "sparse":
        return tf.sparse.from_dense(np.eye(4, 3, dtype=np.float32)), tf.sparse.to_dense
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0]])
    return ragged, lambda given: given.to_tensor(shape=(None, 3))


@pytest.mark.parametrize("form", ["sparse", "ragged"])
@pytest.mark.parametrize("name", WAYS)
def test_tensors_that_are_not_dense(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, form: str
) -> None:
    given, to_dense = of_form(form)

    class Net(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.top = tf.keras.layers.Dense(2, name="top")
            self.top.build((None, 3))
            self.built = True

        def call(self, inputs: Any) -> Any:
            return self.top(tf.ensure_shape(to_dense(inputs), (None, 3)))

    model, (options, place) = Net(), way(name)
    model.compile(optimizer="sgd", loss="mse", run_eagerly=options.pop("eager", False), **options)
    batches = tf.data.Dataset.from_tensors((given, np.ones((4, 2), np.float32))).repeat(2)
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        hooked(tmp_path / "run", include_regex="^(inputs|labels|top/outputs)", **place) as hook,
    ):
        model.fit(batches, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    for tensor in ("labels", "top/outputs"):
        assert trial.tensor(tensor).steps(mode=TRAIN) == [0, 1], tensor
    assert "inputs" not in trial.tensor_names()
    assert said(caplog, f"inputs is left out: it is {form}") == 1
    assert [message for found in trial.troubles().values() for message in found] == [
        f"inputs is left out: it is {form}"
    ]


def test_what_cannot_be_read_does_not_take_the_others_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(8)
    model = make_model()

    class Offering(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            values = [(np.array(["a"], object),), (np.full(2, batch),)]
            hook._recording.replicas.offer(("mine_text", "mine_number"), values, array_of)

    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        hooked(tmp_path / "run", include_regex="^mine") as hook,
    ):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook, Offering()])
    found = read(tmp_path / "run").tensor("mine_number").values(mode=TRAIN)
    assert {step: list(value) for step, value in found.items()} == {0: [0, 0], 1: [1, 1]}
    assert said(caplog, "mine_text is left out") == 1


def test_what_goes_wrong_at_every_step_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data()
    model = make_model()
    hook = quiet_hook(tmp_path / "run", include_collections=["gradients"])

    def fail(seen: Any, *rest: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(hook._recording.replicas, "offer", fail)
    with caplog.at_level(logging.WARNING, logger="smdist"), hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    assert hook.mode_steps[TRAIN] == 4
    assert said(caplog, "no room") == 1


@pytest.mark.parametrize("part", ["VariableNames", "capture_set_of"])
@pytest.mark.parametrize("options", [{"eager": True}, {"steps_per_execution": 2}, {}], ids=str)
def test_a_model_that_cannot_be_looked_at_is_trained_all_the_same(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    part: str,
) -> None:
    x, y = data()
    model = make_model(**options)

    def fail(*_: Any) -> Any:
        raise RuntimeError("cannot look")

    monkeypatch.setattr(keras_recording, part, fail)
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        quiet_hook(tmp_path / "run", include_collections=["gradients", "weights"]) as hook,
    ):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        assert hook.mode_steps[TRAIN] == 4
    assert said(caplog, "cannot look") >= 1
    assert read(tmp_path / "run").tensor("loss").steps(mode=TRAIN) == list(range(5))
    close(model.get_weights()[0], training(x, y)[0][-1].updated["w1"])


def test_results_that_are_numbers_of_numpy(tmp_path: Path) -> None:
    x, y = data(8)

    class Custom(tf.keras.Model):  # type: ignore[misc]
        def train_step(self, batch: Any) -> Any:
            loss = tf.reduce_mean((self(batch[0], training=True) - batch[1]) ** 2)
            return {"loss": loss.numpy(), "array": np.asarray(2 * loss), "text": "left out"}

    given = tf.keras.Input(shape=(3,))
    model = Custom(given, tf.keras.layers.Dense(2)(given))
    model.compile(optimizer="sgd", run_eagerly=True)
    with hooked(tmp_path / "run") as hook:
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names()) == {"loss", "array"}
    for step in (0, 1):
        assert trial.tensor("array").value(step, mode=TRAIN) == 2 * trial.tensor("loss").value(
            step, mode=TRAIN
        )


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_the_gradients_of_the_first_step_are_not_scaled(tmp_path: Path, eager: bool) -> None:
    """An optimizer that scales the loss has no variable for that before its first update."""
    x, y = data(8)
    model = make_model(compiled=False)
    rate, scale = 0.1, 1024.0
    scaling = tf.keras.mixed_precision.LossScaleOptimizer(
        tf.keras.optimizers.SGD(rate), initial_scale=scale
    )
    model.compile(optimizer=scaling, loss="mse", jit_compile=False, run_eagerly=eager)
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"]) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    weights, gradients = (
        trial.tensor(n) for n in ("hidden/weights/hidden/kernel:0", "gradients/hidden/kernelGrad")
    )
    after = weights.value(0, mode=TRAIN) - rate * gradients.value(0, mode=TRAIN)
    close(weights.value(1, mode=TRAIN), after)


def test_a_model_without_variables_among_several_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorFlow traces a function that makes variables twice, and the second time they are known."""
    x, y = data(8)

    class Net(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="late")
            self.top = tf.keras.layers.Dense(2, name="top")

        def call(self, inputs: Any) -> Any:
            return self.top(inputs)

    options, place = way("inline")
    model = Net()
    model.compile(optimizer=tf.keras.optimizers.Adam(), loss="mse", **options)
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        quiet_hook(tmp_path / "run", include_collections=["gradients"], **place) as hook,
    ):
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.tensor("gradients/top/kernelGrad").steps(mode=TRAIN) == [0, 1, 2, 3]
    assert said(caplog, "steps of late are not captured") == 0


def test_a_model_that_never_has_variables_among_several_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing makes TensorFlow trace it once more."""

    class Net(tf.keras.Model):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return 2 * inputs

    options, place = way("inline")
    model = Net(name="bare")
    model.compile(**options)
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        quiet_hook(tmp_path / "run", include_regex="^predictions$", **place) as hook,
    ):
        model.predict(data(8)[0], batch_size=BATCH, verbose=0, callbacks=[hook])
        hook.save_scalar("last", 1.0)
    assert read(tmp_path / "run").tensor_names() == ["scalar/last"]
    assert said(caplog, "steps of bare are not captured") == 1
