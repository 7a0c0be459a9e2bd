"""A rank under Horovod that trains in less usual ways, each with a hook and a run of its own.

`variants_job.py torch|keras FOLDER`: runs are FOLDER/<name>-<stage>, what the rank expects of their
local gradients is FOLDER/<rank>.npz, by `<name>/<step>`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

STEPS, CLIP = 3, 0.02
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


def main() -> None:
    folder = Path(sys.argv[2])
    expected = (torch_runs if sys.argv[1] == "torch" else keras_runs)(folder)
    np.savez(folder / f"{expected.pop('rank')}.npz", **expected)


if __name__ == "__main__":
    main()
