"""smdebug 1.0.34, configured as smdist is."""

from __future__ import annotations

from typing import Any

import smdebug.pytorch as smd  # type: ignore[import-not-found]
from torch import nn

from benchmarks.peers.base import FIVE, Base, Setup

ENVIRONMENT = "smdebug"


class Peer(Base):
    def attach(self, model: nn.Module, setup: Setup) -> None:
        super().attach(model, setup)
        reductions = smd.ReductionConfig(reductions=list(FIVE[:4]), norms=[FIVE[4]])
        self._hook = smd.Hook(
            out_dir=setup.place,
            save_config=smd.SaveConfig(save_interval=setup.interval),
            reduction_config=reductions if setup.how == "five" else None,
            include_regex=[setup.wanted],
            include_workers="all",
        )
        self._hook.register_module(model)

    def detach(self) -> dict[str, Any]:
        self._hook.close()
        # It has no way to leave a model: its callbacks are the only ones there.
        for module in self.model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        for parameter in self.model.parameters():
            if parameter._backward_hooks:
                parameter._backward_hooks.clear()
        return {}
