"""Train with MultiWorkerMirroredStrategy: one process per worker, numbered by TF_CONFIG.

    TF_CONFIG='{"cluster": {"worker": ["localhost:9001", "localhost:9002"]},
                "task": {"type": "worker", "index": 0}}' \\
        python examples/keras_multiworker.py --out-dir run
    (and the same with index 1 beside it)
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
parser.add_argument("--workers", choices=["one", "all"], default="all", help="which ranks save")
args = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
tf.keras.utils.set_random_seed(1)
x = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = dataset.with_options(options)

with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input(shape=(16,)), tf.keras.layers.Dense(1, name="top")])
    model.compile(optimizer=tf.keras.optimizers.SGD(0.01), loss="mse")

hook = smd.KerasHook(
    out_dir=args.out_dir,
    include_workers=args.workers,
    save_config=smd.SaveConfig(save_interval=args.interval),
    include_collections=["weights", "biases", "gradients", "inputs"],
)
model.fit(dataset, epochs=args.epochs, shuffle=False, verbose=0, callbacks=[hook])
hook.close()
print(f"{hook.worker} is done")
