"""An elastic Keras job under Horovod: each time that ranks come or go is an attempt of the run.

    horovodrun --gloo -np 2 --min-np 1 --host-discovery-script examples/elastic_hosts.sh \\
        python examples/horovod_elastic_keras.py --out-dir runs/elastic

As in horovod_elastic.py: the hook is made where training starts over, and the state that Horovod
keeps and shares says which attempt it is and at which step to go on.
"""

from __future__ import annotations

import argparse
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

import smdist.tensorflow as smd


class Progress(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps in the state where to go on; comes before what commits it."""

    def __init__(self, state: Any, hook: smd.KerasHook) -> None:
        super().__init__()
        self._state, self._hook = state, hook

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state.batch += 1
        self._state.steps = self._hook.state_dict()


def train(state: Any, args: argparse.Namespace) -> None:
    hook = smd.KerasHook(
        out_dir=args.out_dir,
        include_workers="all",
        include_collections=["weights", "gradients"],
        save_config=smd.SaveConfig(save_interval=args.interval),
        resume=True,
        attempt=state.attempt,
    )
    if state.steps is not None:
        hook.load_state_dict(state.steps)  # the next step has the next number
    x = np.random.default_rng(hvd.rank()).normal(size=(32, 16)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(8).repeat()
    commit = hvd.elastic.CommitStateCallback(state)  # raises when ranks come or go
    try:
        state.model.fit(
            data,
            steps_per_epoch=args.batches - state.batch,
            verbose=0,
            callbacks=[hook, Progress(state, hook), commit],
        )
    finally:
        hook.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", required=True, help="a directory, or s3://bucket/prefix")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--interval", type=int, default=2)
    args = parser.parse_args()

    hvd.init()
    model = tf.keras.Sequential([tf.keras.Input(shape=(16,)), tf.keras.layers.Dense(1, name="top")])
    model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0, attempt=0, steps=None)

    def started_over() -> None:
        state.attempt += 1
        state.save()

    state.register_reset_callbacks([started_over])
    hvd.elastic.run(train)(state, args)
    print(f"rank {hvd.rank()} is done after {state.batch} batches")


if __name__ == "__main__":
    main()
