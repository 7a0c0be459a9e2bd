"""The hook's settings in a file, so that a job is re-aimed without touching its code.

    python examples/from_json.py --config examples/config.json

Without `--config` the file is the one that SMDEBUG_CONFIG_FILE_PATH names.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import smdist.pytorch as smd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    model, loss_function = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    hook = smd.Hook.create_from_json_file(args.config)
    hook.register_module(model)
    hook.register_loss(loss_function)
    hook.set_mode(smd.modes.TRAIN)

    for _ in range(args.steps):
        optimizer.zero_grad()
        loss_function(model(torch.randn(4, 8)), torch.zeros(4, 2)).backward()
        optimizer.step()

    hook.close()


if __name__ == "__main__":
    main()
