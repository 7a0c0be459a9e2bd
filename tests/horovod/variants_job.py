"""A rank under Horovod that trains in less usual ways, each with a hook and a run of its own.

`variants_job.py torch|keras|fit|late FOLDER`: runs are FOLDER/<name>-<stage>, what the rank expects of their
local gradients is FOLDER/<rank>.npz, by `<name>/<step>`; those of `fit` tell themselves.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

STEPS, CLIP = 3, 0.02
BATCH, EPOCHS, RATE, MOMENTUM = 4, 2, 0.01, 0.75  # of `fit`
STAGES = ("local", "synced")


def torch_runs(folder: Path) -> dict[str, Any]:
    import horovod.torch as hvd
    import torch
    from torch import nn

    import smdist.pytorch as smd

    torch.set_num_threads(1)
    hvd.init()
    expected: dict[str, Any] = {}

    def train(name: str, stage: str, *, registered: bool = True) -> None:
        passes = 2 if name == "passes" else 1
        torch.manual_seed(7)
        model, twin = nn.Linear(4, 1), nn.Linear(4, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=passes,
        )
        hook = smd.Hook(
            folder / f"{name}-{stage}",
            include_workers="all",
            include_collections=["gradients"],
            save_config=smd.SaveConfig(save_interval=1),
            stage_gradients=stage,  # type: ignore[arg-type]
        )
        if registered:
            hook.register_optimizer(optimizer)
        hook.register_module(model, step_on="optimizer" if passes > 1 else "forward")
        torch.manual_seed(hvd.rank())
        for step in range(STEPS):
            batches = [torch.randn(3, 4) for _ in range(passes)]
            twin.load_state_dict(model.state_dict())
            losses: Any = sum(twin(batch).square().sum() for batch in batches)
            expected[f"{name}/{step}"] = torch.autograd.grad(losses, [twin.weight])[0].numpy()
            optimizer.zero_grad()
            if name == "late" and hvd.rank() == 1:
                time.sleep(0.3)  # nothing is reduced yet when the other one is about to step
            for batch in batches:
                model(batch).square().sum().backward()
            if name == "clipped":
                optimizer.synchronize()
                nn.utils.clip_grad_value_(model.parameters(), CLIP)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        hook.close()

    for stage in STAGES:
        for name in ("passes", "clipped", "late"):
            train(name, stage)
    train("unregistered", "synced", registered=False)
    return {"rank": hvd.rank(), **expected}


def keras_runs(folder: Path) -> dict[str, Any]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import smdist.tensorflow as smd

    hvd.init()
    expected: dict[str, Any] = {}

    def train(name: str, stage: str) -> None:
        weight = tf.Variable(tf.ones((4, 1)), name="weight")
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build([weight])
        hook = smd.KerasHook(
            folder / f"{name}-{stage}",
            include_workers="all",
            include_collections=["gradients"],
            save_config=smd.SaveConfig(save_interval=1),
            stage_gradients=stage,  # type: ignore[arg-type]
        )

        def step(x: Any) -> None:
            if name == "inner":
                with hook.wrap_tape(tf.GradientTape()) as tape:
                    loss = tf.reduce_sum((x @ weight) ** 2)
                tape = hvd.DistributedGradientTape(tape)
            else:
                with hook.wrap_tape(hvd.DistributedGradientTape(tf.GradientTape())) as tape:
                    loss = tf.reduce_sum((x @ weight) ** 2)
            gradients = tape.gradient(loss, [weight])
            optimizer.apply_gradients(zip(gradients, [weight], strict=True))

        run = tf.function(step) if name == "traced" else step
        random = np.random.default_rng(hvd.rank())
        for number in range(STEPS):
            x = random.normal(size=(3, 4)).astype(np.float32)
            expected[f"{name}/{number}"] = 2 * x.T @ (x @ weight.numpy())
            run(tf.constant(x))
        hook.close()

    for stage in STAGES:
        for name in ("inner", "outer", "traced"):
            train(name, stage)
    return {"rank": hvd.rank(), **expected}


def fit_runs(folder: Path) -> dict[str, Any]:
    """`fit` with a layer that is frozen and one that draws numbers, validation, `evaluate`, `predict`."""
    import horovod.tensorflow as hvd_tape
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    import smdist.tensorflow as smd

    hvd.init()
    keras: Any = tf.keras
    random = np.random.default_rng(hvd.rank())
    x = random.normal(size=(2 * BATCH, 4)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)

    class Own(tf.keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            inputs, labels = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(inputs, training=True) - labels) ** 2)
            tape = hvd_tape.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def make(kind: Any) -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        base = keras.layers.Dense(5, name="base", trainable=False)(inputs)
        dropped = keras.layers.Dropout(0.3, name="drop")(base)
        return kind(inputs, keras.layers.Dense(1, name="top")(dropped), name="net")

    def train(
        name: str, optimizer: Any, stages: tuple[str, ...] = STAGES, kind: Any = keras.Model
    ) -> None:
        model = make(kind)
        eager = name == "eager"
        model.compile(optimizer, loss="mse", run_eagerly=eager, jit_compile=False)
        hooks = [
            smd.KerasHook(
                folder / f"{name}-{stage}",
                include_workers="all",
                include_collections=[
                    "weights", "gradients", "outputs", "layers", "optimizer_variables"
                ],
                save_config=smd.SaveConfig(save_interval=1),
                stage_gradients=stage,  # type: ignore[arg-type]
            )
            for stage in stages
        ]  # fmt: skip
        options = {"batch_size": BATCH, "verbose": 0, "callbacks": hooks}
        held_out = x[:BATCH], y[:BATCH]
        model.fit(x, y, epochs=EPOCHS, shuffle=False, validation_data=held_out, **options)
        model.evaluate(x, y, **options)
        model.predict(x, **options)
        for hook in hooks:
            hook.close()

    def reducing(optimizer: Any, **options: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, **options)

    keras.mixed_precision.set_global_policy("mixed_float16")
    sgd = reducing(keras.optimizers.SGD(RATE, momentum=MOMENTUM))
    train("mixed", keras.mixed_precision.LossScaleOptimizer(sgd, initial_scale=1024.0))
    keras.mixed_precision.set_global_policy("float32")
    train("legacy", reducing(keras.optimizers.legacy.Adam(RATE, beta_1=MOMENTUM)))
    train("eager", reducing(keras.optimizers.Adam(RATE, beta_1=MOMENTUM)))
    train("passes", reducing(keras.optimizers.SGD(RATE), backward_passes_per_step=2))
    train("own", keras.optimizers.SGD(RATE), ("local",), Own)
    return {"rank": hvd.rank()}


def late_runs(folder: Path) -> dict[str, Any]:
    """One of two ranks comes to ask for more, and has another hook after that; under Horovod, or with
    MultiWorkerMirroredStrategy."""
    import tensorflow as tf

    import smdist.tensorflow as smd

    reducing: Callable[[Any], Any] = lambda optimizer: optimizer
    if "TF_CONFIG" in os.environ:
        strategy: Any = tf.distribute.MultiWorkerMirroredStrategy()
        rank = strategy.cluster_resolver.task_id
    else:
        import horovod.tensorflow.keras as hvd

        hvd.init()
        strategy, rank = tf.distribute.get_strategy(), hvd.rank()
        reducing = hvd.DistributedOptimizer
    tf.keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(4 * BATCH, 4)).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(2 * BATCH)
    with strategy.scope():
        layers = tf.keras.layers
        model = tf.keras.Sequential([
            tf.keras.Input((4,)), layers.BatchNormalization(), layers.Dropout(0.3),
            layers.Dense(1, name="top"),
        ])  # fmt: skip
        optimizer = reducing(tf.keras.optimizers.Adam(RATE))
        model.compile(optimizer, loss="mse", metrics=["mae"], jit_compile=False)
    for name in ("first", "second"):
        hook = smd.KerasHook(
            folder / name,
            include_collections=["gradients"],
            save_config=smd.SaveConfig(save_interval=1),
        )
        gradients = hook.get_collection("gradients")
        gradients.save_config = smd.SaveConfig(end_step=0)
        model.fit(batches, verbose=0, callbacks=[hook], validation_data=batches)
        gradients.save_config = smd.SaveConfig(save_interval=1)
        model.fit(batches, verbose=0, callbacks=[hook], validation_data=batches)
        hook.close()
    return {"rank": rank, "kernel": model.get_layer("top").kernel.numpy()}


def main() -> None:
    folder = Path(sys.argv[2])
    kinds = {"torch": torch_runs, "keras": keras_runs, "fit": fit_runs, "late": late_runs}
    expected = kinds[sys.argv[1]](folder)
    np.savez(folder / f"{expected.pop('rank')}.npz", **expected)


if __name__ == "__main__":
    main()
