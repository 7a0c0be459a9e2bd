"""A registered module that trains without a step having begun: nothing is captured, and that is said.

Hooks of a module run when it is called. They do not if a script calls its `forward()` or a copy of
it, or a graph that was compiled around it before. That gradients come all the same shows it, and if
none do the end of the job.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.torch_adapter.callbacks import Callback

__all__ = ["MissedCallDetector"]

_ENOUGH = 2  # backward passes: of the first one the forward may have run before registering


class MissedCallDetector:
    def __init__(self, errors: ErrorPolicy) -> None:
        self._errors = errors
        self._name = ""
        self._passes = 0
        self._handle: RemovableHandle | None = None

    def watch(self, name: str, root: nn.Module) -> None:
        """From now on a step is expected; a further root changes nothing."""
        if self._name:
            return
        self._name = name
        trained = (p for p in root.parameters() if p.requires_grad and not is_lazy(p))
        parameter: Any = next(trained, None)  # the method is untyped
        # What takes no hook is left to the end of the job.
        with suppress(RuntimeError, NotImplementedError):
            if parameter is not None:
                body = Callback(self._on_gradient)
                self._handle = parameter.register_post_accumulate_grad_hook(body)

    def stop(self) -> None:
        """A step began, or nobody waits for one any more."""
        self._passes = _ENOUGH
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _on_gradient(self, _: object) -> None:
        self._passes += 1
        if self._passes == _ENOUGH:
            self._warn()

    def report_at_end(self) -> None:
        if self._name and self._passes < _ENOUGH:
            self._warn()
        self.stop()

    def _warn(self) -> None:
        self._errors.warn_once(
            f"Nothing was captured from {self._name}: the registered module was never called. Common "
            "causes: the script calls model.forward() directly, calls a copy of the model, or compiled "
            "a function around it before registering. Register the object that the training loop calls."
        )
