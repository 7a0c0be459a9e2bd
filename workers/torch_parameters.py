"""The parameters of all registered roots, by name."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from smdist.errors import CaptureError
from smdist.workers.mishaps import Mishaps
from smdist.workers.recorder import Recorder
from smdist.workers.torch_host import Value, readable
from smdist.workers.torch_names import NamedParameter, parameters_of

__all__ = ["Parameters"]


class Parameters:
    def __init__(self, recorder: Recorder[Value], mishaps: Mishaps) -> None:
        self.entries: list[NamedParameter] = []
        self._recorder, self._mishaps = recorder, mishaps
        self._roots: list[tuple[nn.Module, str]] = []
        self._names: dict[int, str] = {}
        self._known: list[tuple[nn.Module, tuple[int, ...]]] = []

    def add(self, root: nn.Module, name: str) -> None:
        self._roots.append((root, name))
        self._list()

    def clear(self) -> None:
        self._roots.clear()
        self._list()

    def name_of(self, parameter: torch.Tensor) -> str | None:
        return self._names.get(id(parameter))

    def refresh(self) -> None:
        """Look again if a script has put others in the place of parameters or modules we know, or
        has added some."""
        if any(_members(module) != known for module, known in self._known):
            self._list()

    def _list(self) -> None:
        found: dict[int, NamedParameter] = {}
        for root, name in self._roots:
            for entry in parameters_of(root, name):
                found.setdefault(id(entry.parameter), entry)
        self._known = [(m, _members(m)) for root, _ in self._roots for m in root.modules()]
        self.entries = list(found.values())
        self._names = {key: entry.name for key, entry in found.items()}

    def save_values(self) -> None:
        plan = self._recorder.plan
        assert plan is not None
        names, tensors = [], []
        for name, parameter, _ in self.entries:
            if plan.wants(name) is None or is_lazy(parameter):
                continue
            try:
                tensors.append(readable(parameter))
            except CaptureError as error:
                self._mishaps.trouble(f"{name} was not captured: {error}")
                continue
            names.append(name)
        self._recorder.offer_many(tuple(names), tensors)


def _members(module: nn.Module) -> tuple[int, ...]:
    """Of what is in a module; whoever keeps this keeps the members too, or ids come again."""
    return (*map(id, module._modules.values()), *map(id, module._parameters.values()))
