"""Several forwards per update: with `step_on="optimizer"` a step is an update, not a forward.

python examples/gradient_accumulation.py --out-dir runs/accumulated
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import smdist.pytorch as smd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", required=True)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    model, loss_function = nn.Linear(8, 1), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)

    hook = smd.Hook(
        out_dir=args.out_dir,
        include_collections=["weights", "gradients", "optimizer_variables"],
        save_config=smd.SaveConfig(save_interval=1),
    )
    hook.register_optimizer(optimizer)
    hook.register_module(model, step_on="optimizer")
    hook.register_loss(loss_function)

    for _ in range(args.updates):
        optimizer.zero_grad()
        for _ in range(args.micro_batches):
            features = torch.randn(16, 8)
            loss = loss_function(model(features), features.sum(dim=1, keepdim=True))
            (loss / args.micro_batches).backward()
        optimizer.step()

    hook.close()


if __name__ == "__main__":
    main()
