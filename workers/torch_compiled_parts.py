"""Parts of a model that were compiled by themselves, block by block.

A graph has no place for hooks, and one that exists already does not look for them. So a part runs as
it is written on steps that watch modules inside it; what was compiled stays, for all other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smdist.workers.mishaps import Mishaps
from smdist.workers.torch_callback import Callback
from smdist.workers.torch_names import compiled, layers

__all__ = ["CompiledParts"]

# Where `module.compile()` keeps what it calls instead of the module's forward.
_IN_PLACE = "_compiled_call_impl"

Stance = Callable[[str], AbstractContextManager[object]]


class CompiledParts:
    def __init__(self, mishaps: Mishaps) -> None:
        self._mishaps = mishaps
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
            self._mishaps.trouble("submodules of a compiled module need torch 2.6 to be captured")
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
            self._mishaps.handle(error, "running a compiled module as it is written")
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
