"""torch.distributed.checkpoint.async_save; a save waits for the one before, as it must."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.peers.base import Base, Setup, weights_and_gradients

ENVIRONMENT = "main"


class Peer(Base):
    def attach(self, model: nn.Module, setup: Setup) -> None:
        super().attach(model, setup)
        self._pending: Any = None

    def save(self, step: int) -> None:
        if self._pending is not None:
            self._pending.result()
        state = dict(weights_and_gradients(self.model))
        # All ranks write into one folder.
        folder = self.place_of(step).with_name(str(step))
        self._pending = async_save(state, checkpoint_id=folder, no_dist=self.setup.ranks == 1)

    def detach(self) -> dict[str, Any]:
        if self._pending is not None:
            self._pending.result()
        return {}
