"""Parts of a model that were compiled by themselves, block by block, and graphs around a model.

A graph has no place for hooks, and one that exists already does not look for them. So a part runs as
it is written on steps that watch modules inside it; what was compiled stays, for all other steps.
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
_IN_PLACE = "_compiled_call_impl"

_COMPILER = os.path.join("torch", "_dynamo", "eval_frame.py")
_REASON = (
    "smdist's hook reads tensors and cannot be part of a graph; call the module that is registered "
    "outside of functions that are compiled with fullgraph=True, or leave that out"
)

Stance = Callable[[str], AbstractContextManager[object]]


class _Stop(Callback):
    """Where it hangs a graph ends, and goes on after the call."""

    __slots__ = ()

    @untraced
    def __call__(self, *arguments: Any) -> None:
        pass


_Stop.__call__._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]


def stop_outer_graphs(root: nn.Module) -> list[RemovableHandle]:
    """A function that is compiled around a call of a compiled module takes in what that wraps, and
    leaves out the hooks of the compiled one. One inside makes it call the module as it is.

    The module's own graph begins behind it, except for classes of torch's own.
    """
    if not compiled(root):
        return []
    inside = cast("nn.Module", root._modules["_orig_mod"])
    call = getattr(root.forward, "_torchdynamo_orig_callable", None)
    if getattr(call, "__self__", None) is not inside:
        return []
    return [inside.register_forward_pre_hook(_Stop(_nothing))]


def within_outer_graph() -> bool:
    """Is a compiled module called from another graph? Asked by its own hooks. Slow."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        # The call of a compiled module is in that file too, around its hooks.
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
        """Of a module and what it wraps, those that are compiled."""
        return [m for m in layers(module) if compiled(m) or _in_place(m) is not None]

    def arm(self, parts: Iterable[nn.Module]) -> None:
        """From now on these run as they are written."""
        for part in parts:
            if (call := _in_place(part)) is not None:
                self._swapped.append((part, call))
                setattr(part, _IN_PLACE, None)
            if compiled(part):
                self._watch(part)

    def _watch(self, part: nn.Module) -> None:
        stance: Stance | None = getattr(torch.compiler, "set_stance", None)
        if stance is None:
            self._errors.warn_once("submodules of a compiled module need torch 2.6 to be captured")
            return
        enter = Callback(partial(self._enter, id(part), stance))
        leave = Callback(partial(self._leave, id(part)))
        self._handles.append(part.register_forward_pre_hook(enter))
        self._handles.append(part.register_forward_hook(leave, always_call=True))

    def _enter(self, part: int, stance: Stance, *_: Any) -> None:
        try:
            context = stance("force_eager")
            context.__enter__()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "running a compiled module as it is written")
        else:
            self._entered.setdefault(part, []).append(context)

    def _leave(self, part: int, *_: Any) -> None:
        if entered := self._entered.get(part):
            entered.pop().__exit__(None, None, None)

    def disarm(self) -> None:
        for part, call in self._swapped:
            setattr(part, _IN_PLACE, call)
        self._swapped.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entered.clear()


def _in_place(module: nn.Module) -> object:
    return getattr(module, _IN_PLACE, None)
