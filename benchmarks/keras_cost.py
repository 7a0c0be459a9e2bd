"""What capture costs a Keras job: step times with a hook and without, by turns in one process.

    python -m benchmarks.keras_cost [--xla] [--rounds 5] [--steps 20] [--width 1536]

Each way to capture has a model of its own. After a first round, in which functions are traced, every
round lets each model `fit` the same batches; a ratio is to the model without a hook in that round.
Each is waited for until all is stored before the next one's turn. TensorFlow computes with one
thread, which leaves a processor for everything else. Prints rows as JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.table import Row

BATCH = 64
NONE = "no hook"
WHOLE = ["weights", "biases", "gradients"]
FIVE = {"reductions": ["min", "max", "mean", "std"], "norms": ["l2"]}
# Interval, and what of the model.
VARIANTS: dict[str, tuple[int, dict[str, Any]] | None] = {
    NONE: None,
    "no hook, again": None,
    "not due": (10**9, {"include_collections": WHOLE}),
    "losses and metrics, every step": (1, {}),
    "weights and gradients, every step": (1, {"include_collections": WHOLE}),
    "weights and gradients, every 10 steps": (10, {"include_collections": WHOLE}),
    "five reductions of them, every step": (1, {"include_collections": WHOLE, "five": True}),
}


def make_model(width: int, xla: bool) -> Any:
    import tensorflow as tf

    dense = tf.keras.layers.Dense
    model = tf.keras.Sequential(
        [tf.keras.Input(shape=(width,)), dense(width, activation="relu"), dense(width), dense(10)]
    )
    model.compile(optimizer="sgd", loss="mse", jit_compile=xla)
    return model


@contextmanager
def hooks(out_dir: Path, variant: tuple[int, dict[str, Any]] | None) -> Iterator[list[Any]]:
    import smdist.tensorflow as smd

    if variant is None:
        yield []
        return
    interval, options = variant[0], dict(variant[1])
    if options.pop("five", False):
        options["reduction_config"] = smd.ReductionConfig(**FIVE)
    # Never due is not due at step 0 either.
    config = smd.SaveConfig(save_interval=interval, start_step=1 if interval > 1000 else 0)
    with smd.KerasHook(out_dir, save_config=config, **options) as hook:
        yield [hook]


def times(
    rounds: int, steps: int, width: int, xla: bool, out: str | None
) -> dict[str, list[float]]:
    """Milliseconds per step, of each round."""
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    x = np.random.default_rng(0).normal(size=(BATCH * steps, width)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :10])).batch(BATCH).cache()
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory(dir=out) as folder, ExitStack() as stack:
        running = {}
        for i, (name, variant) in enumerate(VARIANTS.items()):
            callbacks = stack.enter_context(hooks(Path(folder, str(i)), variant))
            running[name] = make_model(width, xla), callbacks
        for number in range(rounds + 1):
            for name, (model, callbacks) in running.items():
                began = time.perf_counter()
                model.fit(data, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
                if number:
                    found[name].append(1e3 * (time.perf_counter() - began) / steps)
                for hook in callbacks:
                    hook.flush()
    return found


def rows_of(found: dict[str, list[float]], parameters: int, xla: bool) -> list[Row]:
    compiled = ", XLA" if xla else ""
    title = f"step time, Keras {version('keras')}{compiled}, MLP of {parameters / 1e6:.0f} M"
    base = found[NONE]
    rows = [Row(f"{title}: {NONE}", median(base), "ms", spread=(min(base), max(base)))]
    for name, values in found.items():
        if name != NONE:
            ratios = [a / b for a, b in zip(values, base, strict=True)]
            added = median([a - b for a, b in zip(values, base, strict=True)])
            note, spread = f"{added:+.2f} ms per step", (min(ratios), max(ratios))
            what = f"{title}: {name} / {NONE}"
            rows.append(Row(what, median(ratios), "x", note=note, spread=spread))
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.keras_cost")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--width", type=int, default=1536, help="of the model")
    parser.add_argument("--xla", action="store_true", help="models are compiled with XLA")
    parser.add_argument("--out", help="folder to store runs in")
    given = parser.parse_args(arguments)
    if find_spec("tensorflow") is None:
        rows = [Row("step time, Keras", None, "x", note="not measured: no TensorFlow is installed")]
    else:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        found = times(given.rounds, given.steps, given.width, given.xla, given.out)
        parameters = make_model(given.width, given.xla).count_params()
        rows = rows_of(found, parameters, given.xla)
    sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
