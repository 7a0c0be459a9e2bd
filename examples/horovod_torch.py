"""A PyTorch job under Horovod, with every rank captured.

    horovodrun --gloo -np 2 -H localhost:2 python examples/horovod_torch.py --out-dir runs/horovod
    python examples/read_a_run.py runs/horovod

Lines with smdist in them, and `hook`, are all that capture adds.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from torch import nn

import smdist.pytorch as smd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc2(torch.relu(self.fc1(features)))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", required=True, help="a new directory, or s3://bucket/prefix")
    parser.add_argument("--workers", choices=("one", "all"), default="all", help="who saves")
    parser.add_argument("--stage", choices=("local", "synced"), default="local")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interval", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.125)
    args = parser.parse_args()

    torch.set_num_threads(1)
    hvd.init()
    hook = smd.Hook(
        out_dir=args.out_dir,
        include_workers=args.workers,
        include_collections=["weights", "biases", "gradients"],
        include_regex="Net_input_0",
        stage_gradients=args.stage,
        save_config=smd.SaveConfig(save_interval=args.interval),
    )

    torch.manual_seed(hvd.rank())  # each rank has weights and data of its own
    model, loss_function = Net(), nn.CrossEntropyLoss()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # the same weights after this
    hook.register_module(model)
    hook.register_loss(loss_function)
    hook.register_optimizer(optimizer)  # synced gradients are read when it is about to step

    for _ in range(args.steps):
        features = torch.randn(8, 16)
        labels = features[:, :4].argmax(dim=1)
        optimizer.zero_grad()
        loss_function(model(features), labels).backward()
        optimizer.step()

    hook.close()
    print(f"{hook.worker} is done")
    hvd.shutdown()


if __name__ == "__main__":
    main()
