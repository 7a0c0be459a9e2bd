"""Capture the variables of registered optimizers, and end steps at their updates.

Variables are named `optimizer/<parameter>/<key>` (`optimizer/Net_fc1.weight/exp_avg`) and have the values
before the update. A parameter outside of registered modules is named `group<i>.<j>`, and that of the k-th
further optimizer `<k>.group<i>.<j>`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from smdist.errors import CaptureError
from smdist.workers.hook.core import HookCore
from smdist.workers.torch_adapter.callbacks import Callback
from smdist.workers.torch_adapter.parameters import Parameters
from smdist.workers.torch_adapter.tensor_access import Value, readable

__all__ = ["Optimizers"]

_INCOMPLETE = "an exception interrupted the capture of its optimizer variables"


class Optimizers:
    def __init__(
        self,
        core: HookCore[Value],
        parameters: Parameters,
        arrived: Callable[[Hashable], None],
        before_update: Callable[[Optimizer], None],
        after_update: Callable[[], None],
    ) -> None:
        """`before_update` is called in recorded steps, `after_update` after `mark_steps` was called."""
        self._recorder, self._errors, self._parameters = core.recorder, core.errors, parameters
        self._arrived = arrived
        self._before_update, self._after_update = before_update, after_update
        self._optimizers: list[Optimizer] = []
        self._armed: list[RemovableHandle] = []
        self._boundary: RemovableHandle | None = None

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._optimizers)

    def __len__(self) -> int:
        return len(self._optimizers)

    def add(self, optimizer: Optimizer) -> None:
        if any(known is optimizer for known in self._optimizers):
            return
        self._optimizers.append(optimizer)

    def mark_steps(self) -> None:
        """Report every update of the first optimizer from now on."""
        if self._boundary is None and self._optimizers:
            self._boundary = self._optimizers[0].register_step_post_hook(
                Callback(lambda *_: self._after_update())
            )

    def clear(self) -> None:
        self.disarm()
        if self._boundary is not None:
            self._boundary.remove()
            self._boundary = None
        self._optimizers.clear()

    # -- a recorded step ----------------------------------------------------------------------

    def arm(self, *, anyway: bool) -> list[Hashable]:
        """Watch the next update if its variables are wanted, or `anyway`; return tokens of those wanted."""
        wanted = [
            ("optimizer", id(optimizer))
            for place, optimizer in enumerate(self._optimizers)
            if next(self._variables(place, optimizer), None) is not None
        ]
        if not wanted and not anyway:
            self.disarm()
        elif not self._armed:
            self._armed = [
                optimizer.register_step_pre_hook(Callback(partial(self._before, place)))
                for place, optimizer in enumerate(self._optimizers)
            ]
        return [*wanted]

    def disarm(self) -> None:
        for handle in self._armed:
            handle.remove()
        self._armed.clear()

    def _before(self, place: int, optimizer: Optimizer, *_: Any) -> None:
        if not self._recorder.recording:
            return
        before = self._recorder.hold_incomplete(_INCOMPLETE)
        with self._errors.guard("capturing optimizer variables"):
            found = list(self._variables(place, optimizer))
            self._recorder.offer_many(tuple(n for n, _ in found), [t for _, t in found])
        self._recorder.incomplete_reason = before
        self._before_update(optimizer)
        self._arrived(("optimizer", id(optimizer)))

    def _variables(self, place: int, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        plan = self._recorder.plan
        assert plan is not None
        other = f"{place}." if place else ""
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                name = self._parameters.name_of(parameter) or f"{other}group{i}.{j}"
                for key, value in optimizer.state.get(parameter, {}).items():
                    full_name = f"optimizer/{name}/{key}"
                    if not isinstance(value, torch.Tensor) or plan.wants(full_name) is None:
                        continue
                    try:
                        yield full_name, readable(value)
                    except CaptureError as error:
                        self._errors.warn_not_captured(full_name, error)
