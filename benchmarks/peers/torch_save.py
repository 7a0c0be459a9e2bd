"""torch.save of everything, on the training thread."""

from __future__ import annotations

import torch

from benchmarks.peers.base import Base, weights_and_gradients

ENVIRONMENT = "main"


class Peer(Base):
    def save(self, step: int) -> None:
        torch.save(dict(weights_and_gradients(self.model)), self.place_of(step, ".pt"))
