"""Capture the inputs and outputs of modules in a recorded step.

`TorchRecording` calls `arm` for each captured step and `disarm` at the next idle one; the hooks run on the
training thread. Inputs are read before the module runs, as it may change them in place. A module that
is called again in the same step continues its numbers. Forwards that run again inside a backward pass
(activation checkpointing) are not recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from smdist.config import PYTORCH
from smdist.config.collection import compile_regex
from smdist.errors import CaptureError
from smdist.planning import StepPlan
from smdist.workers.hook.core import HookCore
from smdist.workers.torch_adapter.callbacks import Callback, in_backward, within_compiled
from smdist.workers.torch_adapter.compiled_modules import CompiledParts
from smdist.workers.torch_adapter.module_names import compiled
from smdist.workers.torch_adapter.nested_tensors import MAX_ENTRIES, MAX_VALUES, tensors_in
from smdist.workers.torch_adapter.tensor_access import Value, readable

__all__ = ["Modules"]

INPUT, OUTPUT = "input", "output"
_NUMBERED = re.compile(r"(.*)_(input|output)_\d+")
_FIRST = 3
_INCOMPLETE = "an exception interrupted the capture of inputs or outputs"
# A pattern without any of these selects all numbers or none. smdist's own select all.
_HAS_NUMBERS = re.compile(r"[0-9\[]|\\[dw]|\.\.")
_WRITTEN = re.compile(r"[0-9]{3,9}")
_OURS = frozenset(text for texts in PYTORCH.collections.values() for text in texts)


class _Watch(NamedTuple):
    name: str
    module: nn.Module
    inputs: bool
    outputs: bool


class Modules:
    def __init__(
        self,
        core: HookCore[Value],
        arrived: Callable[[Hashable], None],
        enter: Callable[[], bool],
    ) -> None:
        """`arrived` is called with captured losses; `enter` checks whether the current call is recorded."""
        self._recorder, self._planner, self._errors = core.recorder, core.planner, core.errors
        self._arrived, self._enter = arrived, enter
        self._modules: dict[str, nn.Module] = {}
        self._roots: set[str] = set()
        self._losses: set[str] = set()
        self._watches: dict[StepPlan, tuple[_Watch, ...]] = {}
        self._armed: tuple[_Watch, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._in_graph: bool | None = None  # whether the root of this step was called from a graph
        self._warned_of_skipped_hooks = False
        self._parts = CompiledParts(core.errors)

    def add(self, named: dict[str, nn.Module], *, root: str = "", loss: bool = False) -> None:
        """Add modules by name. `root` is the one whose inputs come by `record_inputs`."""
        # A loss may be part of a root, and have another name there.
        known = {id(module) for module in named.values()}
        self._modules = {n: m for n, m in self._modules.items() if id(m) not in known}
        self._modules.update(named)
        if root:
            self._roots.add(root)
        if loss:
            self._losses.update(named)
        self.forget()

    def clear(self) -> None:
        self.disarm()
        self._modules.clear()
        self._losses.clear()
        self._roots.clear()
        self.forget()

    def forget(self) -> None:
        """Forget what plans of the configuration before have selected."""
        self._watches.clear()

    # -- which --------------------------------------------------------------------------------

    def wanted(self, plan: StepPlan) -> tuple[_Watch, ...]:
        """Return the modules to watch in a step with this plan."""
        found = self._watches.get(plan)
        if found is None:
            exact = {
                match.groups()
                for collection in self._planner.active().values()
                for name in collection.tensor_names
                if (match := _NUMBERED.fullmatch(name))
            }

            singled_out = self._singled_out()

            def wants(name: str, side: str) -> bool:
                if (name, side) in exact:
                    return True
                # How many tensors there are is known only when the module runs.
                numbered = (f"{name}_{side}_{i}" for i in range(_FIRST))
                others = (
                    full_name
                    for pattern, numbers in singled_out
                    for i in numbers
                    if pattern.search(full_name := f"{name}_{side}_{i}")
                )
                return any(
                    plan.wants(full_name) is not None for full_name in chain(numbered, others)
                )

            watches = (
                _Watch(name, module, wants(name, INPUT), wants(name, OUTPUT))
                for name, module in self._modules.items()
            )
            found = tuple(watch for watch in watches if watch.inputs or watch.outputs)
            self._watches[plan] = found
        return found

    def _singled_out(self) -> list[tuple[re.Pattern[str], set[int]]]:
        """Return patterns that may select later numbers only, each with the numbers to try.

        These have up to two digits, or are written out in the pattern.
        """
        return [
            (compile_regex(text), {*range(_FIRST, 100), *map(int, _WRITTEN.findall(text))})
            for collection in self._planner.active().values()
            for text in collection.include_regex
            if text not in _OURS and _HAS_NUMBERS.search(text)
        ]

    @property
    def inside(self) -> bool:
        """Check whether the recorded step watches modules inside a model."""
        return any(map(self._is_inside, self._armed))

    def _is_inside(self, watch: _Watch) -> bool:
        return watch.name not in self._losses and watch.name not in self._roots

    # -- a recorded step ----------------------------------------------------------------------

    def arm(self, plan: StepPlan, *, only_losses: bool = False) -> list[Hashable]:
        """Watch what the plan wants; return the tokens that will arrive (one for each loss)."""
        self._warn_if_hooks_skipped()
        wanted = self.wanted(plan)
        if only_losses:
            wanted = tuple(watch for watch in wanted if watch.name in self._losses)
        if wanted != self._armed:
            self.disarm()
            for watch in wanted:
                self._handles += self._watch(watch)
            self._armed = wanted
            self._parts.arm(self._compiled_parts())
        return [watch.name for watch in wanted if watch.name in self._losses and watch.outputs]

    def disarm(self) -> None:
        self._warn_if_hooks_skipped()
        self._parts.disarm()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._armed = ()

    def _compiled_parts(self) -> list[nn.Module]:
        """Return the compiled modules inside which something is watched."""
        inside = [watch.name for watch in self._armed if self._is_inside(watch)]
        return [
            part
            for name, module in self._modules.items()
            if name not in self._roots and (parts := CompiledParts.among(module))
            if any(other.startswith(f"{name}.") for other in inside)
            for part in parts
        ]

    def _warn_if_hooks_skipped(self) -> None:
        """Warn at the end of a step if a graph compiled earlier ran without calling the hooks.

        A module that did not run proves nothing by itself: a script need not use every module.
        """
        in_graph, self._in_graph = self._in_graph, None
        ran = {name for name, _ in self._counts} if in_graph else set()
        self._counts.clear()
        if not in_graph:
            return
        inside = [watch.name for watch in self._armed if self._is_inside(watch)]
        if not inside or not ran.isdisjoint(inside):
            return
        self._warned_of_skipped_hooks = True
        others = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        self._errors.warn_once(
            f"Inputs and outputs of {inside[0]}{others} were not captured: the model was compiled before "
            "it was registered. Use model = torch.compile(model); hook.register_module(model)."
        )

    def _watch(self, watch: _Watch) -> Iterable[RemovableHandle]:
        name, module = watch.name, watch.module
        # This is armed and disarmed while the root's own pre-hook runs. torch would still call a
        # pre-hook of the root that was removed meanwhile.
        if watch.inputs and name not in self._roots:
            body = Callback(partial(self._before, name))
            yield module.register_forward_pre_hook(body, with_kwargs=True)
        if watch.outputs:
            yield module.register_forward_hook(Callback(partial(self._after, name)))

    def _before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not in_backward():
            self.record(name, INPUT, (args, kwargs))

    def _after(self, name: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if not in_backward():
            self.record(name, OUTPUT, result)
            self._arrived(name)

    def record_inputs(self, root: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._in_graph is None and not self._warned_of_skipped_hooks and self.inside:
            self._in_graph = not compiled(self._modules[root]) and within_compiled()
        if any(watch.inputs and watch.name == root for watch in self._armed):
            self.record(root, INPUT, (args, kwargs))

    def record(self, name: str, side: str, value: object) -> None:
        """Record the tensors in `value` under the next numbers of that name in this step."""
        if not self._enter():
            return
        before = self._recorder.hold_incomplete(_INCOMPLETE)
        count = self._counts.get((name, side), 0)
        found = tensors_in(value)
        if found.truncated:
            self._errors.warn_once(
                f"The {side}s of {name} were only partly searched for tensors: sequences are skipped after "
                f"{MAX_ENTRIES} entries without one, and the search stops after {MAX_VALUES} values."
            )
        for tensor in found.tensors:
            full_name = f"{name}_{side}_{count}"
            count += 1
            try:
                plan = self._recorder.plan
                if plan is not None and plan.wants(full_name) is not None:
                    self._recorder.offer(full_name, readable(tensor))
            except CaptureError as error:
                self._errors.warn_not_captured(full_name, error)
            except Exception as error:  # noqa: BLE001 (the policy decides)
                self._errors.on_exception(error, f"capturing {full_name}")
        self._counts[name, side] = count
        self._recorder.incomplete_reason = before
        if found.error is not None:
            self._errors.on_exception(found.error, f"searching the {side}s of {name} for tensors")
