"""Collections of torch modules' tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from smdist.config.collection import Collection

__all__ = ["TorchCollection"]


class TorchCollection(Collection):
    def add_module_tensors(
        self, module: nn.Module, inputs: bool = False, outputs: bool = True
    ) -> None:
        """Add inputs and/or outputs of `module` to this collection.

        The module's name is known once it is registered with a hook, itself or as part of a model,
        before or after this call.
        """
        self.request(module, inputs, outputs)

    @property
    def modules(self) -> Mapping[nn.Module, tuple[bool, bool]]:
        """Return the modules that were added: whether their inputs, whether their outputs."""
        asked = {
            request.target: (request.inputs, request.outputs)
            for request in self.requests
            if isinstance(request.target, nn.Module)
        }
        return MappingProxyType(asked)
