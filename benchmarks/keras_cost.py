"""What capture costs a Keras job: step times with and without a hook, interleaved in one process.

    python benchmarks/keras_cost.py [--rounds 7] [--steps 20] [--width 1536]

Each variant has its own model. After a first round, in which functions are traced, every round lets
each variant `fit` the same batches; the table shows the median of each and its ratio to no hook.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tensorflow as tf

import smdist.tensorflow as smd

WHOLE = ["weights", "biases", "gradients"]
VARIANTS: dict[str, dict[str, Any] | None] = {
    "no hook": None,
    "hook, nothing due": {"save_config": {"save_interval": 10**9, "start_step": 10**9}},
    "losses and metrics, every step": {"save_config": {"save_interval": 1}},
    "weights and gradients, every step": {
        "save_config": {"save_interval": 1},
        "include_collections": WHOLE,
    },
    "the same, every 10th step": {
        "save_config": {"save_interval": 10},
        "include_collections": WHOLE,
    },
    "five reductions of them, every step": {
        "save_config": {"save_interval": 1},
        "include_collections": WHOLE,
        "reduction_config": smd.ReductionConfig(
            reductions=["min", "max", "mean", "std"], norms=["l2"]
        ),
    },
}


def make_model(width: int, jit_compile: bool) -> Any:
    dense = tf.keras.layers.Dense
    model = tf.keras.Sequential(
        [tf.keras.Input(shape=(width,)), dense(width, activation="relu"), dense(width), dense(10)]
    )
    model.compile(optimizer="sgd", loss="mse", jit_compile=jit_compile)
    return model


@contextmanager
def hooks(out_dir: Path, options: dict[str, Any] | None) -> Iterator[list[Any]]:
    if options is None:
        yield []
        return
    config = smd.SaveConfig(**options["save_config"])
    with smd.KerasHook(out_dir, **{**options, "save_config": config}) as hook:
        yield [hook]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--jit", action="store_true", help="compile the models with XLA")
    args = parser.parse_args()
    x = np.random.default_rng(0).normal(size=(64 * args.steps, args.width)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :10])).batch(64).cache()
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = {}
        for i, (name, options) in enumerate(VARIANTS.items()):
            callbacks = stack.enter_context(hooks(Path(folder) / str(i), options))
            running[name] = make_model(args.width, args.jit), callbacks
        for round_ in range(args.rounds + 1):
            for name, (model, callbacks) in running.items():
                began = time.perf_counter()
                model.fit(data, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
                if round_:
                    times[name].append((time.perf_counter() - began) / args.steps)
                for hook in callbacks:
                    hook.flush()
        params = running["no hook"][0].count_params()
    print(f"{params * 8 / 1e6:.0f} MB of weights and gradients, {args.steps} steps of 64 a round")
    base = median(times["no hook"])
    for name, found in times.items():
        print(f"{name:38} {median(found) * 1e3:8.2f} ms  {median(found) / base:6.3f}x")


if __name__ == "__main__":
    main()
