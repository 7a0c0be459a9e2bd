"""What the Keras hook captures, read back through a trial and compared with numpy's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from smdist.workers.keras_adapter.step_function import StepFunction
from tests.tensorflow.keras_jobs import (
    BATCH,
    EVERYTHING,
    GRADIENTS,
    KERAS_3,
    WEIGHTS,
    close,
    data,
    hooked,
    initial,
    make_model,
    read,
    running_mean,
    training,
    way,
)

TRAIN, EVAL, PREDICT = smd.modes.TRAIN, smd.modes.EVAL, smd.modes.PREDICT
WAYS = ["eager", "compiled", "plain", "inline"] if KERAS_3 else ["eager", "compiled", "inline"]
ways = pytest.mark.parametrize("name", WAYS)


@ways
def test_every_value_of_every_step_in_every_mode(tmp_path: Path, name: str) -> None:
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    with hooked(tmp_path / "run", include_collections=EVERYTHING, **place) as hook:
        model.fit(
            x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[hook],
            validation_data=(x[:8], y[:8]), validation_batch_size=BATCH,
        )  # fmt: skip
        model.predict(x[:8], batch_size=BATCH, verbose=0, callbacks=[hook])
    trial, epochs = read(tmp_path / "run"), training(x, y, epochs=2)

    def value(name: str, step: int, mode: Any = TRAIN) -> Any:
        return trial.tensor(name).value(step, mode=mode)

    steps = [step for epoch in epochs for step in epoch]
    assert trial.steps(mode=TRAIN) == list(range(len(steps)))
    for number, step in enumerate(steps):
        for tensor, key in WEIGHTS.items():
            close(value(tensor, number), step.weights[key])
        for tensor, key in GRADIENTS.items():
            close(value(tensor, number), step.gradients[key])
        close(value("inputs", number), step.x)
        close(value("labels", number), step.y)
        close(value("predictions", number), step.out)
        close(value("hidden/inputs", number), step.x)
        close(value("hidden/outputs", number), step.hidden)
        close(value("top/inputs", number), step.hidden)
        close(value("top/outputs", number), step.out)
        assert value("optimizer/iterations", number) == number
        close(value("optimizer/learning_rate", number), 0.1)
    for tensor in ("loss", "mae"):
        means = [m for epoch in epochs for m in running_mean([getattr(s, tensor) for s in epoch])]
        close([value(tensor, number) for number in range(len(steps))], means)

    weights = [epoch[-1].updated for epoch in epochs]
    validated = [training(x[:4], y[:4], weights=w)[0] + training(x[4:8], y[4:8], weights=w)[0]
                 for w in weights]  # fmt: skip
    assert trial.steps(mode=EVAL) == [0, 1, 2, 3]
    for epoch, batches in enumerate(validated):
        for index, step in enumerate(batches):
            number = 2 * epoch + index
            close(value("hidden/outputs", number, EVAL), step.hidden)
            close(value("top/weights/top/kernel:0", number, EVAL), step.weights["w2"])
            close(value("loss", number, EVAL), running_mean([s.loss for s in batches])[index])
        last = 5 * (epoch + 1) - 1
        close(value("val_loss", last), np.mean([s.loss for s in batches]))
        close(value("val_mae", last), np.mean([s.mae for s in batches]))
    assert trial.steps(mode=PREDICT) == [0, 1]
    final = training(x[4:8], y[4:8], weights=weights[-1])[0][0]
    close(value("predictions", 1, PREDICT), final.out)
    close(value("hidden/outputs", 1, PREDICT), final.hidden)


@ways
def test_collections_and_names(tmp_path: Path, name: str) -> None:
    x, y = data(8)
    options, place = way(name)
    model = make_model(compiled=False)
    model.compile(
        optimizer="adam",
        loss="mse",
        metrics=["mae"],
        run_eagerly=options.pop("eager", False),
        **options,
    )
    with hooked(tmp_path / "run", save_all=True, **place) as hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
        hook.save_scalar("rate", 0.5, sm_metric=True)
    trial = read(tmp_path / "run")
    kept = ["momentums", "velocities"]
    paths = ["hidden/kernel", "hidden/bias", "top/kernel", "top/bias"]
    expected = {
        "weights": [name for name in WEIGHTS if "bias" not in name],
        "biases": [name for name in WEIGHTS if "bias" in name],
        "gradients": list(GRADIENTS),
        "losses": ["loss"],
        "metrics": ["mae"],
        "inputs": ["inputs"],
        "outputs": ["labels", "predictions"],
        "layers": [f"{n}/{side}" for n in ("hidden", "top") for side in ("inputs", "outputs")],
        "optimizer_variables": [
            "optimizer/iterations",
            "optimizer/learning_rate",
            *(f"optimizer/{path}/{slot}" for path in paths for slot in kept),
        ],
        "sm_metrics": ["scalar/rate"],
    }
    for collection, names in expected.items():
        assert set(trial.tensor_names(collection=collection)) == set(names), collection
    known = {name for names in expected.values() for name in names}
    assert set(trial.tensor_names()) == known | {"batch_loss"}


def test_only_losses_and_metrics_are_saved_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("Keras' own function gives these")

    monkeypatch.setattr(StepFunction, "__call__", fail)
    x, y = data()
    model = make_model()
    with hooked(tmp_path / "run", interval=2) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names()) == {"loss", "mae"}
    steps = training(x, y)[0]
    losses = running_mean([step.loss for step in steps])
    found = trial.tensor("loss").values(mode=TRAIN)
    assert list(found) == [0, 2, 4]
    close(list(found.values()), losses[::2])


def test_reductions_are_those_of_the_values(tmp_path: Path) -> None:
    x, y = data()
    model = make_model()
    reductions = smd.ReductionConfig(reductions=["min", "mean", "std"], norms=["l2"])
    with hooked(
        tmp_path / "run", include_collections=["gradients", "weights"], reduction_config=reductions
    ) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    for number, step in enumerate(training(x, y)[0]):
        tensor, expected = trial.tensor("gradients/hidden/kernelGrad"), step.gradients["w1"]
        for name in ("min", "mean", "std"):
            close(tensor.reduction_value(number, name, mode=TRAIN), getattr(np, name)(expected))
        close(tensor.reduction_value(number, "l2", mode=TRAIN), np.linalg.norm(expected))


def test_the_loss_of_the_batch_itself(tmp_path: Path) -> None:
    x, y = data()
    model = make_model()
    with hooked(tmp_path / "run", include_regex="^batch_loss$") as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    found = read(tmp_path / "run").tensor("batch_loss").values(mode=TRAIN)
    close(list(found.values()), [step.loss for step in training(x, y)[0]])


def test_a_model_that_is_built_by_its_first_batch(tmp_path: Path) -> None:
    x, y = data(8)
    layers = tf.keras.layers

    class Net(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.block = tf.keras.Sequential([layers.Dense(4, name="inner")], name="block")
            self.top = layers.Dense(2, name="top")

        def call(self, inputs: Any) -> Any:
            return self.top(self.block(inputs))

    model = Net()
    model.compile(optimizer="sgd", loss="mse")
    with hooked(tmp_path / "run", include_collections=["weights", "gradients", "layers"]) as hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names(collection="weights")) == {
        "block/weights/block/inner/kernel:0",
        "top/weights/top/kernel:0",
    }
    assert "gradients/block/inner/kernelGrad" in trial.tensor_names(collection="gradients")
    assert {"block/outputs", "block/inner/outputs"} <= set(trial.tensor_names(collection="layers"))
    kernel = trial.tensor("block/weights/block/inner/kernel:0")
    gradient = trial.tensor("gradients/block/inner/kernelGrad")
    assert kernel.steps(mode=TRAIN) == gradient.steps(mode=TRAIN) == [0, 1]
    close(
        kernel.value(1, mode=TRAIN),
        kernel.value(0, mode=TRAIN) - 0.01 * gradient.value(0, mode=TRAIN),
    )


def test_a_custom_step_shared_layers_and_several_inputs(tmp_path: Path) -> None:
    x, y = data(8)
    layers = tf.keras.layers

    class Custom(tf.keras.Model):  # type: ignore[misc]
        def train_step(self, given: Any) -> Any:
            inputs, labels = given[0], given[1]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(inputs, training=True) - labels) ** 2)
            found = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
            return {"loss": loss, "double": 2 * loss}

    left, right = tf.keras.Input(shape=(3,)), tf.keras.Input(shape=(3,))
    shared = layers.Dense(2, name="shared")
    model = Custom([left, right], layers.Add(name="add")([shared(left), shared(right)]))
    model.compile(optimizer="sgd")
    with hooked(tmp_path / "run", save_all=True) as hook:
        dataset = tf.data.Dataset.from_tensor_slices(((x, 2 * x), y)).batch(BATCH)
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")

    def value(name: str) -> Any:
        return trial.tensor(name).value(1, mode=TRAIN)

    assert set(trial.tensor_names(collection="metrics")) == {"double"}
    assert value("double") == 2 * value("loss")
    close(value("inputs_1"), 2 * x[4:])
    kernel = value("shared/weights/shared/kernel:0")
    bias = value("shared/weights/shared/bias:0")
    first, second = x[4:] @ kernel + bias, 2 * x[4:] @ kernel + bias
    found = [value("shared/outputs"), value("shared/outputs_1")]
    for expected in (first, second):
        assert any(np.allclose(expected, f, rtol=1e-4, atol=1e-5) for f in found)
    close(value("add/outputs"), first + second)
    error = first + second - y[4:]
    expected = (x[4:].T + 2 * x[4:].T) @ (2 * error / error.size)
    close(value("gradients/shared/kernelGrad"), expected)


def test_an_embedding_and_a_trained_part(tmp_path: Path) -> None:
    """Sparse gradients come as what they stand for; what is frozen has none."""
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(2,), dtype="int32"),
            tf.keras.layers.Embedding(5, 3, name="table"),
            tf.keras.layers.Flatten(name="flat"),
            tf.keras.layers.Dense(1, name="top", trainable=False),
        ]
    )
    model.compile(optimizer=tf.keras.optimizers.SGD(1.0), loss="mse")
    x, y = np.array([[0, 1], [1, 1]], np.int32), np.ones((2, 1), np.float32)
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"]) as hook:
        model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.tensor_names(collection="gradients") == ["gradients/table/embeddingsGrad"]
    table = trial.tensor("table/weights/table/embeddings:0")
    gradient = trial.tensor("gradients/table/embeddingsGrad").value(0, mode=TRAIN)
    assert gradient.shape == (5, 3)
    assert not gradient[2:].any()
    close(table.value(1, mode=TRAIN), table.value(0, mode=TRAIN) - gradient)


def test_collections_of_layers_and_variables(tmp_path: Path) -> None:
    x, y = data(8)
    model = make_model()
    with hooked(tmp_path / "run", include_collections=["mine", "sides"]) as hook:
        hook.get_collection("mine").add(model.layers[-1].kernel)
        hook.add_to_collection("mine", [model.layers[-2].bias])
        sides = hook.get_collection("sides")
        sides.add_keras_layer(model.layers[-1], inputs=True, outputs=False)
        sides.add_keras_layer(model.layers[-2])
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names(collection="mine")) == {
        "top/weights/top/kernel:0",
        "hidden/weights/hidden/bias:0",
    }
    assert set(trial.tensor_names(collection="sides")) == {"top/inputs", "hidden/outputs"}
    close(trial.tensor("top/weights/top/kernel:0").value(0, mode=TRAIN), initial()["w2"])
