"""What every peer is: something that stores weights and gradients of a model that trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["FIVE", "WANTED", "Base", "Setup", "weights_and_gradients"]

FIVE = ("min", "max", "mean", "std", "l2")
WANTED = r"(weight|bias|parts\.\d+)$"


@dataclass(frozen=True)
class Setup:
    how: str  # "full": tensors as they are; "five": the five reductions of each
    interval: int
    place: str  # a folder, or the URL of a bucket
    wanted: str = WANTED  # regex of the parameters, for those that choose by name
    ranks: int = 1
    budget: float | None = None


class Base:
    """Calls in order, all on the training thread: attach, save after each step that is due, settle
    once before steps are timed, detach. Peers with callbacks of their own leave `save` empty."""

    def attach(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup

    def save(self, step: int) -> None:
        pass

    def settle(self) -> None:
        """Return once processes that `attach` started are up and have stored something."""

    def detach(self) -> dict[str, Any]:
        """Wait until everything is stored; the model is as it was before `attach`."""
        return {}

    def place_of(self, step: int, ending: str = "") -> Path:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        folder = Path(self.setup.place)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{step}-{rank}{ending}"


def weights_and_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"weight/{name}", parameter.detach()
        if parameter.grad is not None:
            yield f"gradient/{name}", parameter.grad
