"""A Keras job under Horovod, with every rank captured: `fit`, or (--tape) a loop of one's own.

    horovodrun --gloo -np 2 -H localhost:2 python examples/horovod_keras.py --out-dir runs/horovod
    python examples/read_a_run.py runs/horovod

Lines with smdist in them, and `hook`, are all that capture adds.
"""

from __future__ import annotations

import argparse
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

import smdist.tensorflow as smd

BATCH = 8


def data(seed: int) -> tuple[Any, Any]:
    x = np.random.default_rng(seed).normal(size=(32, 16)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def fit(model: Any, hook: smd.KerasHook, epochs: int) -> None:
    model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), loss="mse")
    x, y = data(seed=hvd.rank())  # each rank has data of its own
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hook]
    model.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, callbacks=callbacks)


def loop(model: Any, hook: smd.KerasHook, epochs: int) -> None:
    from horovod.tensorflow import DistributedGradientTape

    optimizer = tf.keras.optimizers.SGD(0.01)
    hook.register_model(model)

    def train_step(inputs: Any, labels: Any) -> None:
        with hook.wrap_tape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - labels) ** 2)
        tape = DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(train_step)
    dataset = tf.data.Dataset.from_tensor_slices(data(seed=hvd.rank())).batch(BATCH)
    for _ in range(epochs):
        for inputs, labels in dataset:
            step(inputs, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", required=True, help="a new directory, or s3://bucket/prefix")
    parser.add_argument("--workers", choices=("one", "all"), default="all", help="who saves")
    parser.add_argument("--stage", choices=("local", "synced"), default="local")
    parser.add_argument("--tape", action="store_true", help="instead of fit")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--interval", type=int, default=2)
    args = parser.parse_args()

    hvd.init()
    hook = smd.KerasHook(
        out_dir=args.out_dir,
        include_workers=args.workers,
        stage_gradients=args.stage,
        include_collections=["weights", "biases", "gradients", "inputs"],
        save_config=smd.SaveConfig(save_interval=args.interval),
    )
    tf.keras.utils.set_random_seed(1)  # the same weights everywhere
    model = tf.keras.Sequential([tf.keras.Input(shape=(16,)), tf.keras.layers.Dense(1, name="top")])
    (loop if args.tape else fit)(model, hook, args.epochs)

    hook.close()
    print(f"{hook.worker} is done")
    hvd.shutdown()


if __name__ == "__main__":
    main()
