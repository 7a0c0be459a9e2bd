"""smdist, as a script uses it."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

import smdist.pytorch as smd
from benchmarks.peers.base import FIVE, Base, Setup

ENVIRONMENT = "main"


class Peer(Base):
    def attach(self, model: nn.Module, setup: Setup) -> None:
        super().attach(model, setup)
        reductions = smd.ReductionConfig(reductions=list(FIVE[:4]), norms=[FIVE[4]])
        self._hook = smd.Hook(
            out_dir=setup.place,
            save_config=smd.SaveConfig(save_interval=setup.interval),
            reduction_config=reductions if setup.how == "five" else None,
            include_regex=setup.wanted,
            include_workers="all",
            on_error="raise",
            overhead_budget=setup.budget,
        )
        self._hook.register_module(model)

    def settle(self) -> None:
        deadline = time.monotonic() + 30
        while (usage := self._hook.usage()) is not None and time.monotonic() < deadline:
            if usage.stored_steps:
                return
            time.sleep(0.01)

    def detach(self) -> dict[str, Any]:
        usage = self._hook.usage()
        self._hook.close()
        if usage is None:
            return {}
        return {"waited_s": usage.blocked_s, "steps": usage.captured_steps}
