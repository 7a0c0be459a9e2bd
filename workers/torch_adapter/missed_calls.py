"""Detecting a registered module that trains without a step having begun: nothing is captured then.

Hooks of a module run when the module is called. They do not run if a script calls its `forward()`, a
copy of it, or a graph that was compiled around it before. Gradients that arrive all the same show that,
and without gradients the end of the job does.
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

# The forward of the first backward pass may have run before the module was registered.
_BACKWARD_PASSES = 2


class MissedCallDetector:
    """Watches one parameter of the first root until a step begins."""

    def __init__(self, errors: ErrorPolicy) -> None:
        self._errors = errors
        self._name = ""
        self._passes = 0
        self._handle: RemovableHandle | None = None

    def watch(self, name: str, root: nn.Module) -> None:
        """Expect a step of `root`; further roots change nothing."""
        if self._name:
            return
        self._name = name
        trained = (p for p in root.parameters() if p.requires_grad and not is_lazy(p))
        parameter: Any = next(trained, None)  # the method is untyped
        # A parameter that takes no hook is left to the end of the job.
        with suppress(RuntimeError, NotImplementedError):
            if parameter is not None:
                body = Callback(self._on_gradient)
                self._handle = parameter.register_post_accumulate_grad_hook(body)

    def stop(self) -> None:
        """Stop watching: a step began, or none is expected any more."""
        self._passes = _BACKWARD_PASSES
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _on_gradient(self, _: object) -> None:
        self._passes += 1
        if self._passes == _BACKWARD_PASSES:
            self._warn()

    def report_at_end(self) -> None:
        if self._name and self._passes < _BACKWARD_PASSES:
            self._warn()
        self.stop()

    def _warn(self) -> None:
        self._errors.warn_once(
            f"Nothing was captured from {self._name}: the registered module was never called. Register "
            "the object the training loop calls; calls of .forward() or of a copy are not seen."
        )
