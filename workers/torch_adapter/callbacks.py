"""What smdist hangs on modules and parameters: callables that leave no trace in copies and graphs."""

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
    """Is this thread inside a backward pass? A forward then is a recomputed one."""
    return _graph_task() != -1


def within_compiled() -> bool:
    """Is this called from a graph of `torch.compile`? Slow: looks at the callers."""
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

    What `torch.compiler.disable` does, without its import of the compiler (seconds, in a job that
    may never compile). Two things are needed: the mark stops a caller's graph before the call, the
    strategy lets the call itself run as it is.
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
    """Calls `function`. A copy or a pickle of it does nothing, and needs no smdist to be loaded."""

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
    """The pre-hook of a counting root: steps that are not due are counted here and nowhere else.

    Flat on purpose. Between two forwards a model has pushed everything of ours out of the caches,
    so each further function on the way costs microseconds.
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
