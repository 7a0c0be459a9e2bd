"""TensorBoard: a histogram of every weight and gradient. It keeps no values."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

# Where TensorFlow is installed, TensorBoard would load it, to write files with.
sys.modules["tensorboard.compat.notf"] = ModuleType("tensorboard.compat.notf")

from torch import nn
from torch.utils.tensorboard import SummaryWriter

from benchmarks.peers.base import Base, Setup, weights_and_gradients

ENVIRONMENT = "peers"


class Peer(Base):
    def attach(self, model: nn.Module, setup: Setup) -> None:
        super().attach(model, setup)
        self._writer: Any = SummaryWriter(str(self.place_of(0)))

    def save(self, step: int) -> None:
        for name, tensor in weights_and_gradients(self.model):
            self._writer.add_histogram(name, tensor, step)

    def detach(self) -> dict[str, Any]:
        self._writer.close()
        return {}
