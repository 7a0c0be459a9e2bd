"""An elastic PyTorch job under Horovod: each time that ranks come or go is an attempt of the run.

    horovodrun --gloo -np 2 --min-np 1 --host-discovery-script examples/elastic_hosts.sh \\
        python examples/horovod_elastic.py --out-dir runs/elastic

Ranks are numbered anew when Horovod starts over, so the hook is made where training starts over too:
in the function that `hvd.elastic.run` calls. The state that Horovod keeps and shares says which
attempt it is and at which step to go on.
"""

from __future__ import annotations

import argparse
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import smdist.pytorch as smd


def train(state: Any, args: argparse.Namespace) -> None:
    hook = smd.Hook(
        out_dir=args.out_dir,
        include_workers="all",
        include_collections=["weights", "gradients"],
        save_config=smd.SaveConfig(save_interval=args.interval),
        resume=True,
        attempt=state.attempt,
    )
    loss_function = nn.MSELoss()
    if state.steps is not None:
        hook.load_state_dict(state.steps)  # the next step has the next number
    hook.register_module(state.model)
    hook.register_loss(loss_function)
    try:
        while state.batch < args.batches:
            features = torch.randn(8, 16)
            state.optimizer.zero_grad()
            loss_function(state.model(features), features.sum(dim=1, keepdim=True)).backward()
            state.optimizer.step()
            state.batch += 1
            state.steps = hook.state_dict()
            state.commit()  # raises when ranks come or go
    finally:
        hook.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", required=True, help="a directory, or s3://bucket/prefix")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--interval", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, optimizer, batch=0, attempt=0, steps=None)

    def started_over() -> None:
        state.attempt += 1
        state.save()

    state.register_reset_callbacks([started_over])
    hvd.elastic.run(train)(state, args)
    print(f"rank {hvd.rank()} is done after {state.batch} batches")


if __name__ == "__main__":
    main()
