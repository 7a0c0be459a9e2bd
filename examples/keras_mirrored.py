"""Train on all devices of a machine with MirroredStrategy: each replica is a worker of the run.

    python examples/keras_mirrored.py --out-dir run

Without GPUs the CPU plays the part of `--replicas` devices.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

import smdist.tensorflow as smd

parser = argparse.ArgumentParser()
parser.add_argument("--out-dir", required=True, help="a new directory, or s3://bucket/prefix")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--interval", type=int, default=2)
parser.add_argument("--replicas", type=int, default=2)
args = parser.parse_args()

devices = None
if not tf.config.list_physical_devices("GPU"):
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(args.replicas)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    devices = [f"CPU:{i}" for i in range(args.replicas)]
strategy = tf.distribute.MirroredStrategy(devices)

tf.keras.utils.set_random_seed(1)
x = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input(shape=(16,)), tf.keras.layers.Dense(1, name="top")])
    model.compile(optimizer=tf.keras.optimizers.SGD(0.01), loss="mse")

hook = smd.KerasHook(
    out_dir=args.out_dir,
    include_workers="all",
    save_config=smd.SaveConfig(save_interval=args.interval),
    include_collections=["weights", "gradients", "inputs"],
)
model.fit(dataset, epochs=args.epochs, shuffle=False, verbose=0, callbacks=[hook])
hook.close()

trial = smd.create_trial(out_dir=args.out_dir)
gradient = trial.tensor("gradients/top/kernelGrad")
for step in gradient.steps(mode=smd.modes.TRAIN):
    for worker in trial.workers():
        value = gradient.value(step, mode=smd.modes.TRAIN, worker=worker)
        print(step, worker, np.linalg.norm(value))
