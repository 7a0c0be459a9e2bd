"""The hook for PyTorch.

    hook = Hook(out_dir, save_config=SaveConfig(save_interval=100))
    hook.register_module(model)
    hook.register_loss(criterion)
    ...                             train as before
    hook.close()                    or let the process end

Weights of a step are those that its forward starts with. Gradients are what `.grad` holds after its last
backward: with accumulation over several forwards, the sum so far.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from smdist.config import PYTORCH, HookConfig
from smdist.config.readers import read_text
from smdist.errors import ConfigurationError
from smdist.workers.capture.tensor_access import to_little_endian
from smdist.workers.hook.base import BaseHook
from smdist.workers.hook.core import HookCore
from smdist.workers.hook.step_clock import StepOn
from smdist.workers.hook.user_values import TensorAdapter
from smdist.workers.torch_adapter.collection import TorchCollection
from smdist.workers.torch_adapter.recording import TorchRecording
from smdist.workers.torch_adapter.tensor_access import TorchAccess, Value, describe, readable

__all__ = ["Hook"]


class Hook(BaseHook[Value]):
    _framework = PYTORCH
    _collection_type = TorchCollection

    def __reduce__(self) -> tuple[Any, ...]:
        # A checkpoint of a model with the hook as an attribute loads a hook that captures nothing.
        return _silent, (type(self), self.out_dir)

    def _tensor_adapter(self) -> TensorAdapter[Value]:
        return TensorAdapter(TorchAccess(), describe, _value, _copy)

    def _attach(self, core: HookCore[Value]) -> TorchRecording:
        self._recording = TorchRecording(core)
        return self._recording

    # -- registering --------------------------------------------------------------------------

    def get_collection(self, name: str, create: bool = True) -> TorchCollection:
        return cast("TorchCollection", super().get_collection(name, create))

    def register_module(self, module: nn.Module, *, step_on: StepOn | None = None) -> None:
        """Capture weights, gradients, inputs and outputs of `module`, as configured.

        `step_on` says what a step is:

            "forward"      each forward of this module; the default for the first module
            "optimizer"    all forwards up to the update of the optimizer that is registered
            "manual"       everything until the next `hook.step()`

        Further modules belong to the steps of the first one, unless they have a `step_on` themselves.
        """
        if not isinstance(module, nn.Module):
            raise ConfigurationError(f"register_module takes a torch.nn.Module, not {module!r}")
        if self._core.can_save():
            self._recording.add_root(module, step_on)

    def register_hook(self, module: nn.Module) -> None:
        self.register_module(module)

    def register_loss(self, loss_module: nn.Module) -> None:
        """Capture the outputs of any module as losses, by its class name."""
        if not isinstance(loss_module, nn.Module):
            raise ConfigurationError(
                f"register_loss takes a torch.nn.Module, not {loss_module!r}. Pass the result of a loss "
                "function to record_tensor_value() or save_scalar()"
            )
        if self._core.can_save():
            self._recording.add_loss(loss_module)

    def register_optimizer(self, optimizer: Optimizer) -> None:
        """Capture the variables of `optimizer`; with `step_on="optimizer"` its update ends a step."""
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"register_optimizer takes a torch.optim.Optimizer, not {optimizer!r}"
            )
        if self._core.can_save():
            self._recording.add_optimizer(optimizer)

    def record_tensor_value(self, tensor_name: str, tensor_value: torch.Tensor) -> None:
        """Record a tensor like the output of a module of that name: `<tensor_name>_output_0`."""
        tensor_name = read_text("tensor_name", tensor_name)
        self._core.warn_if_closed()
        if self._core.active:
            self._recording.modules.record(tensor_name, "output", tensor_value)


def _silent(kind: type[Hook], out_dir: str) -> Hook:
    hook = kind.__new__(kind)
    config = HookConfig.from_arguments(PYTORCH, out_dir=out_dir)
    hook._build(config, silent=True)
    return hook


def _value(given: object) -> Value:
    if isinstance(given, torch.Tensor):
        return readable(given)
    return to_little_endian(np.asarray(given))


def _copy(value: Value) -> Value:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()
