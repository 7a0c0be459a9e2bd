"""A small Keras model, and the same training worked out with numpy alone."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import smdist.tensorflow as smd
from smdist.trials import Trial
from tests.support.waiting import until

Array = np.ndarray[Any, np.dtype[Any]]

RATE = 0.1
BATCH = 4
KERAS_3 = hasattr(tf.keras, "Variable")
WEIGHTS = {
    "hidden/weights/hidden/kernel:0": "w1",
    "hidden/weights/hidden/bias:0": "b1",
    "top/weights/top/kernel:0": "w2",
    "top/weights/top/bias:0": "b2",
}
GRADIENTS = {
    "gradients/hidden/kernelGrad": "w1",
    "gradients/hidden/biasGrad": "b1",
    "gradients/top/kernelGrad": "w2",
    "gradients/top/biasGrad": "b2",
}
EVERYTHING = [
    "weights",
    "biases",
    "gradients",
    "inputs",
    "outputs",
    "layers",
    "optimizer_variables",
]


def data(samples: int = 20) -> tuple[Array, Array]:
    random = np.random.default_rng(7)
    x = random.normal(size=(samples, 3)).astype(np.float32)
    return x, random.normal(size=(samples, 2)).astype(np.float32)


def initial() -> dict[str, Array]:
    random = np.random.default_rng(11)
    shapes = {"w1": (3, 5), "b1": (5,), "w2": (5, 2), "b2": (2,)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def make_model(*, eager: bool = False, compiled: bool = True, **options: Any) -> Any:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(3,)),
            layers.Dense(5, activation="relu", name="hidden"),
            layers.Dense(2, name="top"),
        ],
        name="net",
    )
    model.set_weights(list(initial().values()))
    if compiled:
        model.compile(
            optimizer=tf.keras.optimizers.SGD(RATE),
            loss="mse",
            metrics=["mae"],
            run_eagerly=eager,
            **options,
        )
    return model


def way(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a model and of a hook: how the inside of a step is reached.

    "inline" is what a process of several does; the others need not be there for that.
    """
    several = {"rank": 0, "world_size": 2}
    model: dict[str, dict[str, Any]] = {
        "eager": {"eager": True},
        "compiled": {},
        "plain": {"jit_compile": False},  # Keras 3 compiles with XLA where it can
        "inline": {"jit_compile": False},
    }
    return model[name], several if name == "inline" else {}


def hooked(folder: Path, interval: int = 1, **options: Any) -> smd.KerasHook:
    return smd.KerasHook(
        folder, save_config=smd.SaveConfig(save_interval=interval), on_error="raise", **options
    )


def is_ours(function: Any) -> bool:
    return type(function).__module__.partition(".")[0] == "smdist"


def parts_of(hook: smd.KerasHook) -> list[weakref.ref[Any]]:
    return [
        weakref.ref(part)
        for part in (hook, hook._recording, hook._core.recorder, hook._core.errors)
    ]


def wait_until_gone(parts: list[weakref.ref[Any]]) -> None:
    """Soon: the thread that has looked after the uploader may hold one of them for a moment."""

    def gone() -> bool:
        gc.collect()
        return all(part() is None for part in parts)

    until(gone, "nothing holds the hook")


def read(folder: Path) -> Trial:
    trial = smd.create_trial(folder)
    assert trial.loaded_all_steps
    return trial


class Step:
    """One batch through the network: everything by hand."""

    def __init__(self, weights: dict[str, Array], x: Array, y: Array) -> None:
        self.weights, self.x, self.y = {k: v.copy() for k, v in weights.items()}, x, y
        before = x @ weights["w1"] + weights["b1"]
        self.hidden = np.maximum(before, 0)
        self.out = self.hidden @ weights["w2"] + weights["b2"]
        error = self.out - y
        self.loss = float(np.mean(error**2))
        self.mae = float(np.mean(np.abs(error)))
        d_out = 2 * error / error.size
        d_hidden = (d_out @ weights["w2"].T) * (before > 0)
        self.gradients = {
            "w1": x.T @ d_hidden,
            "b1": d_hidden.sum(0),
            "w2": self.hidden.T @ d_out,
            "b2": d_out.sum(0),
        }

    @property
    def updated(self) -> dict[str, Array]:
        return {k: v - RATE * self.gradients[k] for k, v in self.weights.items()}


def training(
    x: Array, y: Array, epochs: int = 1, weights: dict[str, Array] | None = None
) -> list[list[Step]]:
    """The steps of each epoch."""
    weights, found = weights or initial(), []
    for _ in range(epochs):
        steps = []
        for start in range(0, len(x), BATCH):
            steps.append(Step(weights, x[start : start + BATCH], y[start : start + BATCH]))
            weights = steps[-1].updated
        found.append(steps)
    return found


def running_mean(values: list[float]) -> list[float]:
    """What Keras reports: the mean since the epoch began."""
    return [float(np.mean(values[: i + 1])) for i in range(len(values))]


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)
