"""One process: training and evaluation, reductions instead of whole tensors, values of your own.

python examples/single_process.py --out-dir runs/single
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import smdist.pytorch as smd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(4 * 6 * 6, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.relu(self.conv(images)).flatten(1))
        return logits


def make_hook(out_dir: str) -> smd.Hook:
    hook = smd.Hook(
        out_dir=out_dir,
        # Every second training step; every evaluation step.
        save_config=smd.SaveConfig(
            {
                smd.modes.TRAIN: smd.SaveConfigMode(save_interval=2),
                smd.modes.EVAL: smd.SaveConfigMode(save_interval=1),
            }
        ),
        include_collections=["gradients", "relus"],
    )
    # Of gradients a few numbers are enough.
    hook.get_collection("gradients").reduction_config = smd.ReductionConfig(
        reductions=["mean", "std", "nans", "q0.99"], norms=["l2"]
    )
    # A collection of one's own, by name: activations after any ReLU, whole.
    hook.get_collection("relus").include("relu_output")
    return hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    model, loss_function = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(48, 1, 8, 8), torch.randint(10, (48,))

    with make_hook(args.out_dir) as hook:
        hook.register_module(model)
        hook.register_loss(loss_function)
        for epoch in range(args.epochs):
            hook.set_mode(smd.modes.TRAIN)
            for batch in range(0, 32, 8):
                optimizer.zero_grad()
                output = model(images[batch : batch + 8])
                loss_function(output, labels[batch : batch + 8]).backward()
                optimizer.step()
            hook.save_scalar("learning_rate", optimizer.param_groups[0]["lr"])
            hook.set_mode(smd.modes.EVAL)
            with torch.no_grad():
                output = model(images[32:])
                loss_function(output, labels[32:])
                hook.save_tensor("predictions", output.argmax(dim=1))
            hook.save_scalar("epoch", epoch)


if __name__ == "__main__":
    main()
