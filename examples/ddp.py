"""A data-parallel job with every rank captured.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py --out-dir runs/ddp
    python examples/read_a_run.py runs/ddp

Lines with smdist in them, and `hook`, are all that capture adds.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
    parser.add_argument("--out-dir", required=True)
    parser.add_argument("--workers", choices=("one", "all"), default="all")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interval", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.125)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hook = smd.Hook(
        out_dir=args.out_dir,
        include_workers=args.workers,
        include_collections=["weights", "gradients"],
        save_config=smd.SaveConfig(save_interval=args.interval),
    )

    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    hook.register_module(model)
    hook.register_loss(loss_function)

    torch.manual_seed(dist.get_rank())  # each rank has data of its own
    for _ in range(args.steps):
        features, labels = torch.randn(8, 16), torch.randint(4, (8,))
        optimizer.zero_grad()
        loss_function(model(features), labels).backward()
        optimizer.step()

    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
