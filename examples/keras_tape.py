"""Train in a loop of your own, with a `tf.GradientTape` for each step.

python examples/keras_tape.py --out-dir run
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import tensorflow as tf

import smdist.tensorflow as smd

parser = argparse.ArgumentParser()
parser.add_argument("--out-dir", required=True, help="a new directory, or s3://bucket/prefix")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--interval", type=int, default=10)
parser.add_argument("--compiled", action="store_true", help="run the step as a tf.function")
args = parser.parse_args()

tf.keras.utils.set_random_seed(1)
x = np.random.default_rng(1).normal(size=(512, 16)).astype(np.float32)
y = (x.sum(axis=1) > 0).astype(np.int32)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.Input(shape=(16,)),
        tf.keras.layers.Dense(32, activation="relu", name="hidden"),
        tf.keras.layers.Dense(2, name="classes"),
    ]
)
cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

hook = smd.KerasHook(
    out_dir=args.out_dir,
    save_config=smd.SaveConfig(save_interval=args.interval),
    include_collections=["weights", "gradients", "metrics"],
)
optimizer = hook.wrap_optimizer(tf.keras.optimizers.Adam())


def train_step(inputs: Any, labels: Any) -> tuple[Any, Any]:
    with hook.wrap_tape(tf.GradientTape()) as tape:
        logits = model(inputs, training=True)
        loss = cross_entropy(labels, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    right = tf.argmax(logits, axis=1, output_type=tf.int32) == labels
    return loss, tf.reduce_mean(tf.cast(right, tf.float32))


step = tf.function(train_step) if args.compiled else train_step
for _ in range(args.epochs):
    for inputs, labels in dataset:
        loss, accuracy = step(inputs, labels)
        hook.save_tensor("accuracy", accuracy, "metrics")
hook.close()

trial = smd.create_trial(out_dir=args.out_dir)
print(f"Loss values were {trial.tensor('loss').values(mode=smd.modes.TRAIN)}")
