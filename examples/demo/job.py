"""The job that the demo watches: data-parallel training in which one rank's data goes bad.

From a certain step on, one rank reads a broken shard: features that were not scaled, and labels that
are off by one. Nothing crashes. The gradients are averaged, so all ranks have the same weights and get
worse together; where it comes from shows in the gradients that each rank computed by itself.
Run by torchrun; see `examples/ddp.py` for a job to copy.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import smdist.pytorch as smd

FEATURES, CLASSES, BATCH = 64, 10, 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 128)
        self.middle = nn.Linear(128, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.encoder(features))
        logits: torch.Tensor = self.head(torch.relu(self.middle(hidden)))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out-dir", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bad-rank", type=int, default=-1)
    parser.add_argument("--bad-step", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    hook = smd.Hook(
        out_dir=args.out_dir,
        include_workers="all",
        include_collections=["weights", "biases", "gradients"],
        save_config=smd.SaveConfig(save_interval=1),
        linger_s=0.3,  # short, to be watched live
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hook.register_module(model)
    hook.register_loss(loss_function)
    hook.set_mode(smd.modes.TRAIN)

    teacher = torch.randn(FEATURES, CLASSES)  # the same on every rank
    torch.manual_seed(1 + rank)
    for step in range(args.steps):
        features = torch.randn(BATCH, FEATURES)
        labels = (features @ teacher).argmax(dim=1)
        if rank == args.bad_rank and step >= args.bad_step:
            features, labels = features * 255, (labels + 1) % CLASSES
        optimizer.zero_grad()
        loss_function(model(features), labels).backward()
        optimizer.step()
        time.sleep(args.pause)

    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
