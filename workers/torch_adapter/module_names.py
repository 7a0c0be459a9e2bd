"""Name modules and parameters, however they are wrapped.

    root of class Net                 Net           Net_input_0, Net_output_0
    its parameters                    Net_fc1.weight, gradient/Net_fc1.weight
    its submodules, by path           fc1           fc1_input_0, fc1_output_0
    a loss                            its class     CrossEntropyLoss_output_0

DataParallel, DistributedDataParallel, FSDP, `torch.compile` and checkpoint wrappers do not appear in a
name, at the root or inside. Modules and parameters that are used in several places have the first name.

Names are unique. A second root `Net` is `Net_1`. A further root whose paths are taken prefixes them with
its own name (`Net_1.fc1_output_0`). So does a submodule named like the class of its root
(`Net.Net_output_0`). A root's parameter named like one of its outputs (`output_0`) is `Net_.output_0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

__all__ = [
    "ModuleNames",
    "NamedParameter",
    "compiled",
    "entrance",
    "inner",
    "layers",
    "parameters_of",
]

# The attribute under which a wrapper keeps what it wraps.
_COMPILED = "_orig_mod"
_WRAPPERS = (_COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

_AS_OUTPUT = re.compile(r"(input|output)_[0-9]+")


def compiled(module: nn.Module) -> bool:
    """Check whether `module` is what `torch.compile` returned."""
    return _COMPILED in module._modules


def _wrapped(module: nn.Module) -> nn.Module | None:
    parallel = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    for key in ("module",) if parallel else _WRAPPERS:
        if (found := module._modules.get(key)) is not None:
            return found
    return None


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, what it wraps, what that wraps."""
    yield module
    while (found := _wrapped(module)) is not None:
        yield (module := found)


def inner(module: nn.Module) -> nn.Module:
    """Return the module the user wrote."""
    *_, found = layers(module)
    return found


def entrance(module: nn.Module) -> nn.Module:
    """Return where to watch a root.

    Inside wrappers, as a script may call either. Outside a compiled module, as hooks inside it would
    become part of its graph.
    """
    while not compiled(module) and (found := _wrapped(module)) is not None:
        module = found
    return module


def _walk(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield `(path, module)` in the order of `named_modules`.

    Of a wrapper and what it wraps only the outermost is yielded, as others call that one.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    core = module
    while (found := _wrapped(core)) is not None:
        core = found
        seen.add(id(core))
    for key, child in core._modules.items():
        if child is not None:
            yield from _walk(child, f"{path}.{key}" if path else key, seen)


class NamedParameter(NamedTuple):
    """`module` owns it: the one the user wrote, inside any wrapper."""

    name: str
    parameter: nn.Parameter
    module: nn.Module


def parameters_of(root: nn.Module, root_name: str) -> Iterator[NamedParameter]:
    """Yield each parameter once, including lazy ones that have no shape yet."""
    seen: set[int] = set()
    for path, module in _walk(root, "", set()):
        core = inner(module)
        for key, parameter in core._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            own = path or _AS_OUTPUT.fullmatch(key)
            name = f"{root_name}_{path}.{key}" if own else f"{root_name}_{key}"
            yield NamedParameter(name, parameter, core)


class ModuleNames:
    """Names given so far, by the identity of the module."""

    def __init__(self) -> None:
        # Keeps the module alive: its id must not be reused.
        self._of: dict[int, tuple[str, nn.Module]] = {}
        self._taken: set[str] = set()

    def of(self, module: nn.Module) -> str | None:
        """Return the name of a module or of what it wraps; None if it has none."""
        known = (self._of.get(id(layer)) for layer in layers(module))
        return next((found[0] for found in known if found is not None), None)

    def add_root(self, module: nn.Module) -> tuple[str, dict[str, nn.Module]]:
        """Name a root; return its name, and by name all modules under it that had none, and itself."""
        root = inner(module)
        root_name = self._free(type(root).__name__)
        found = [(p, m) for p, m in _walk(root, "", set()) if p and self.of(m) is None]
        clash = any(path in self._taken for path, _ in found)
        named = {root_name: root}
        self._take(root_name, root)
        for path, submodule in found:
            own = f"{root_name}.{path}" if clash or path == root_name else path
            name = self._free(own)
            named[name] = submodule
            self._take(name, submodule)
        return root_name, named

    def add_loss(self, module: nn.Module) -> str:
        """Name a loss after its class, even if it is part of a root: that name is better known."""
        loss = inner(module)
        name = self._free(type(loss).__name__)
        self._take(name, loss)
        return name

    def forget(self) -> None:
        self._of.clear()
        self._taken.clear()

    def _take(self, name: str, module: nn.Module) -> None:
        self._taken.add(name)
        for layer in layers(module):
            self._of[id(layer)] = name, layer

    def _free(self, name: str) -> str:
        if name not in self._taken:
            return name
        return next(
            n for i in range(1, len(self._taken) + 2) if (n := f"{name}_{i}") not in self._taken
        )
