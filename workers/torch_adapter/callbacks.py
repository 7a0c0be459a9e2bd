"""The callables that smdist registers on modules and parameters.

Copies and pickles of a model do not contain them, and graphs of `torch.compile` do not trace them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch

from smdist.workers.hook.step_clock import StepClock

__all__ = ["Callback", "Counting", "in_backward", "untraced", "within_compiled"]

_COMPILED_CALL = os.path.join("torch", "_dynamo", "eval_frame.py")

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "smdist's hook reads tensors and cannot be part of a graph; with fullgraph=True, register the "
    "compiled module: hook.register_module(torch.compile(model, fullgraph=True))"
)

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Check whether this thread runs a backward pass. A forward in it is a recomputed one."""
    return _graph_task() != -1


def within_compiled() -> bool:
    """Check whether the caller runs in a graph of `torch.compile`. Slow: walks the stack."""
    if "torch._dynamo" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILED_CALL):
            return True
        frame = frame.f_back
    return False


def untraced(function: F) -> F:
    """Keep `torch.compile` out of `function` and all it calls.

    `torch.compiler.disable` does the same, but imports the compiler, which takes seconds. Two things
    are needed: the mark ends a caller's graph before the call, and the strategy has the call itself run
    uncompiled.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    elif hasattr(frames, "skip_code"):
        frames.skip_code(function.__code__)
    return function


class Callback:
    """Calls `function`. A copy or a pickle of it does nothing, and loads without smdist."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    @untraced
    def __call__(self, *arguments: Any) -> None:
        self.function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes any arguments, returns None, is in the standard library.
        return getattr, (contextlib.nullcontext(), "__exit__")


class Counting(Callback):
    """The pre-hook of a counting root: an idle step costs this one call.

    Flat on purpose. Between two forwards the model evicts this code from the caches, so each further
    function would cost microseconds.
    """

    __slots__ = ("clock",)

    def __init__(self, clock: StepClock, function: Callable[..., None]) -> None:
        super().__init__(function)
        self.clock = clock

    @untraced
    def __call__(self, *arguments: Any) -> None:
        clock = self.clock
        if clock.idle_forwards_left > 0:
            if _graph_task() == -1:
                clock.idle_forwards_left -= 1
        else:
            self.function(*arguments)
