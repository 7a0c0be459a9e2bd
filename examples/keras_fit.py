"""Train with `model.fit`, capture with one callback, and look at what was saved.

python examples/keras_fit.py --out-dir run
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf

import smdist.tensorflow as smd

parser = argparse.ArgumentParser()
parser.add_argument("--out-dir", required=True, help="a new directory, or s3://bucket/prefix")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--interval", type=int, default=10)
args = parser.parse_args()

tf.keras.utils.set_random_seed(1)
random = np.random.default_rng(1)
images = random.normal(size=(512, 8, 8, 1)).astype(np.float32)
labels = (images.mean(axis=(1, 2, 3)) > 0).astype(np.int32)
x_train, x_test, y_train, y_test = images[:448], images[448:], labels[:448], labels[448:]

hook = smd.KerasHook(
    out_dir=args.out_dir,
    save_config=smd.SaveConfig(save_interval=args.interval),
    include_collections=["weights", "gradients", "layers"],
)

model = tf.keras.models.Sequential(
    [
        tf.keras.Input(shape=(8, 8, 1)),
        tf.keras.layers.Conv2D(4, 3, activation="relu", name="conv"),
        tf.keras.layers.Flatten(name="flatten"),
        tf.keras.layers.Dense(2, activation="softmax", name="classes"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x_train, y_train, epochs=args.epochs, verbose=0, callbacks=[hook])
model.evaluate(x_test, y_test, verbose=0, callbacks=[hook])
hook.close()

trial = smd.create_trial(out_dir=args.out_dir)
print(f"Saved tensor values for {trial.tensors()}")
print(f"Loss values were {trial.tensor('loss').values(mode=smd.modes.TRAIN)}")
gradient = trial.tensor("gradients/conv/kernelGrad")
for step in gradient.steps(mode=smd.modes.TRAIN):
    print(step, np.abs(gradient.value(step, mode=smd.modes.TRAIN)).mean())
