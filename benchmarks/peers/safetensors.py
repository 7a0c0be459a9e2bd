"""One safetensors file per step, on the training thread."""

from __future__ import annotations

from safetensors.torch import save_file

from benchmarks.peers.base import Base, weights_and_gradients

ENVIRONMENT = "main"


class Peer(Base):
    def save(self, step: int) -> None:
        save_file(dict(weights_and_gradients(self.model)), self.place_of(step, ".safetensors"))
