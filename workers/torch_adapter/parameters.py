"""Know the parameters of all registered roots by name, and capture their values.

`TorchRecording` calls `refresh` and `save_values` at the start of each captured step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from smdist.errors import CaptureError
from smdist.planning import StepPlan
from smdist.workers.capture.part_plan import PartPlan
from smdist.workers.hook.core import HookCore
from smdist.workers.torch_adapter.module_names import NamedParameter, parameters_of
from smdist.workers.torch_adapter.tensor_access import Value, readable

__all__ = ["Parameters"]

_lazy: Callable[[torch.Tensor], bool] = is_lazy  # typed so that a Parameter could never be one


class _Values:
    """Parameters that were captured together. While they are `unchanged` they are read without checks."""

    def __init__(self, part: PartPlan, tensors: Sequence[Value]) -> None:
        self.part, self.tensors = part, tensors
        self._facts = [
            (tensor, tensor.dtype, tensor.shape, tensor.nbytes)
            for tensor in tensors
            if type(tensor) is nn.Parameter
        ]

    @property
    def unchanged(self) -> bool:
        """Check what `readable` and `describe` check, for tensors that fill their storage."""
        for tensor, dtype, shape, nbytes in self._facts:
            if (
                type(tensor) is not nn.Parameter
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.layout is not torch.strided
                or tensor.is_meta
                or tensor.untyped_storage().nbytes() != nbytes
            ):
                return False
        return len(self._facts) == len(self.tensors)


class Parameters:
    def __init__(self, core: HookCore[Value]) -> None:
        self.entries: list[NamedParameter] = []
        self._recorder, self._errors = core.recorder, core.errors
        self._roots: list[tuple[nn.Module, str]] = []
        self._names: dict[int, str] = {}
        self._modules: list[nn.Module] = []
        self._tables: list[dict[str, Any]] = []
        self._members: list[int] = []
        self._values: dict[StepPlan, _Values] = {}

    def add(self, root: nn.Module, name: str) -> None:
        self._roots.append((root, name))
        self._list()

    def clear(self) -> None:
        self._roots.clear()
        self._list()

    def name_of(self, parameter: torch.Tensor) -> str | None:
        return self._names.get(id(parameter))

    def refresh(self) -> None:
        """List the parameters again if a script has replaced or added parameters or modules."""
        if _members(self._tables) != self._members:
            self._list()

    def forget(self) -> None:
        """Forget what was captured under plans of the configuration before."""
        self._values.clear()

    def _list(self) -> None:
        found: dict[int, NamedParameter] = {}
        for root, name in self._roots:
            for entry in parameters_of(root, name):
                found.setdefault(id(entry.parameter), entry)
        # Keeps the modules alive, as `entries` does the parameters: their ids must not be reused.
        self._modules = [module for root, _ in self._roots for module in root.modules()]
        self._tables = [d for m in self._modules for d in (m._modules, m._parameters)]
        self._members = _members(self._tables)
        self._values.clear()
        self.entries = list(found.values())
        self._names = {key: entry.name for key, entry in found.items()}

    def save_values(self) -> None:
        plan = self._recorder.plan
        assert plan is not None
        known = self._values.get(plan)
        if known is not None and known.unchanged:
            self._recorder.put(known.part, known.tensors)
            return
        wanted = [entry for entry in self.entries if plan.wants(entry.name) is not None]
        names, tensors = [], []
        for name, parameter, _ in wanted:
            if _lazy(parameter):
                continue
            try:
                tensors.append(readable(parameter))
            except CaptureError as error:
                self._errors.warn_not_captured(name, error)
                continue
            names.append(name)
        done = self._recorder.offer_many(tuple(names), tensors)
        if done is not None and len(names) == len(wanted):
            self._values[plan] = _Values(*done)


def _members(tables: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ids of all values of these dictionaries. Runs no Python per module: there are many."""
    return list(map(id, chain.from_iterable(map(dict.values, tables))))
