"""Support models whose parts were compiled one by one, and graphs around a model.

A compiled graph does not call hooks that are added later. So a part runs uncompiled on steps that watch
modules inside it. The compiled code stays, for all other steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.torch_adapter.callbacks import Callback, untraced
from smdist.workers.torch_adapter.module_names import compiled, layers

__all__ = ["CompiledParts", "stop_outer_graphs", "within_outer_graph"]

# Where `module.compile()` keeps what it calls instead of the module's forward.
_COMPILED_CALL = "_compiled_call_impl"

_COMPILER = os.path.join("torch", "_dynamo", "eval_frame.py")
_REASON = (
    "smdist's hook reads tensors and cannot be part of a graph; call the registered module outside of "
    "functions compiled with fullgraph=True, or do not use fullgraph"
)

Stance = Callable[[str], AbstractContextManager[object]]


class _Stop(Callback):
    """Ends a graph where it is registered; another one begins after the call."""

    __slots__ = ()

    @untraced
    def __call__(self, *arguments: Any) -> None:
        pass


_Stop.__call__._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]


def stop_outer_graphs(root: nn.Module) -> list[RemovableHandle]:
    """Make functions that are compiled around a compiled module call the module's hooks.

    Such a function would inline what the module wraps, and skip the hooks of the module. A hook inside
    makes it call the module. The module's own graph begins after it, except for classes of torch.
    """
    if not compiled(root):
        return []
    inside = cast("nn.Module", root._modules["_orig_mod"])
    call = getattr(root.forward, "_torchdynamo_orig_callable", None)
    if getattr(call, "__self__", None) is not inside:
        return []
    return [inside.register_forward_pre_hook(_Stop(_nothing))]


def within_outer_graph() -> bool:
    """Check, from a hook of a compiled module, whether another graph calls the module. Slow."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        # The call of a compiled module, around its hooks, is in that file too.
        if code.co_filename.endswith(_COMPILER) and code.co_name != "__call__":
            return True
        frame = frame.f_back
    return False


def _nothing(*_: Any) -> None:
    pass


class CompiledParts:
    def __init__(self, errors: ErrorPolicy) -> None:
        self._errors = errors
        self._handles: list[RemovableHandle] = []
        self._swapped: list[tuple[nn.Module, object]] = []
        self._entered: dict[int, list[AbstractContextManager[object]]] = {}

    @staticmethod
    def among(module: nn.Module) -> list[nn.Module]:
        """Return those of a module and what it wraps that are compiled."""
        return [m for m in layers(module) if compiled(m) or _compiled_call(m) is not None]

    def arm(self, parts: Iterable[nn.Module]) -> None:
        """Run these uncompiled from now on."""
        for part in parts:
            if (call := _compiled_call(part)) is not None:
                self._swapped.append((part, call))
                setattr(part, _COMPILED_CALL, None)
            if compiled(part):
                self._watch(part)

    def _watch(self, part: nn.Module) -> None:
        stance: Stance | None = getattr(torch.compiler, "set_stance", None)
        if stance is None:
            self._errors.warn_once(
                "Submodules of a compiled module are not captured: this needs torch 2.6 or later."
            )
            return
        enter = Callback(partial(self._enter, id(part), stance))
        leave = Callback(partial(self._leave, id(part)))
        self._handles.append(part.register_forward_pre_hook(enter))
        self._handles.append(part.register_forward_hook(leave, always_call=True))

    def _enter(self, part: int, stance: Stance, *_: Any) -> None:
        with self._errors.guard("running a compiled module uncompiled"):
            context = stance("force_eager")
            context.__enter__()
            self._entered.setdefault(part, []).append(context)

    def _leave(self, part: int, *_: Any) -> None:
        if entered := self._entered.get(part):
            entered.pop().__exit__(None, None, None)

    def disarm(self) -> None:
        for part, call in self._swapped:
            setattr(part, _COMPILED_CALL, call)
        self._swapped.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entered.clear()


def _compiled_call(module: nn.Module) -> object:
    return getattr(module, _COMPILED_CALL, None)
