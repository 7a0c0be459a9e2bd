"""The physical limit: every byte once into memory that is warm, or one `sum()` of every tensor."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from benchmarks.peers.base import Base, Setup, weights_and_gradients

ENVIRONMENT = "main"


class Peer(Base):
    def attach(self, model: nn.Module, setup: Setup) -> None:
        super().attach(model, setup)
        nbytes = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
        self._target = torch.ones(nbytes if setup.how == "full" else 1, dtype=torch.uint8)

    def save(self, step: int) -> None:
        if self.setup.how == "five":
            for _, tensor in weights_and_gradients(self.model):
                tensor.sum()
            return
        target = self._target.data_ptr()
        for _, tensor in weights_and_gradients(self.model):
            nbytes = tensor.numel() * tensor.element_size()
            ctypes.memmove(target, tensor.data_ptr(), nbytes)
            target += nbytes
