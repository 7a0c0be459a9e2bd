"""Trains the small model of `keras_jobs` on several devices of one process, twice.

A process of its own, as TensorFlow takes new devices only before it has used any.
"""

from __future__ import annotations

import argparse
import json

import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import data, make_model

SAMPLES, SHARE, FITS = 12, 2, 2  # a batch has a share for each replica


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out-dir", required=True)
    parser.add_argument("--include-workers", type=json.loads, required=True)
    parser.add_argument("--start-step", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()

    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(args.replicas)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(args.replicas)])
    with strategy.scope():
        model = make_model()
    dataset = tf.data.Dataset.from_tensor_slices(data(SAMPLES)).batch(SHARE * args.replicas)
    hook = smd.KerasHook(
        args.out_dir,
        include_workers=args.include_workers,
        include_collections=["weights", "gradients", "inputs"],
        save_config=smd.SaveConfig(save_interval=1, start_step=args.start_step),
        on_error="raise",
    )
    for _ in range(FITS):
        model.fit(
            dataset, shuffle=False, verbose=0, callbacks=[hook], validation_data=dataset.take(1)
        )
    hook.save_scalar("done", 1.0)
    hook.close()


if __name__ == "__main__":
    main()
