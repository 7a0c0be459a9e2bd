"""Register hooks on models, losses and optimizers, and capture what they show.

A counting root begins steps (`StepClock`); an idle step costs nothing else. On a due step, in this order:

    the step before is closed
    weights are captured
    hooks for gradients, modules and optimizers are armed

Once everything expected has arrived the step is closed. What has not arrived when the next step begins
will not arrive. Hooks are removed at the next idle step. `HookCore` calls the listener's methods, the
rest is called by torch's hooks on the training thread.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from smdist.config.collection import CollectionKeys
from smdist.planning import NEVER
from smdist.workers.hook.core import HookCore
from smdist.workers.hook.step_clock import NEXT_STEP, StepOn
from smdist.workers.hook.step_listener import StepListener
from smdist.workers.torch_adapter.callbacks import Callback, Counting, in_backward, within_compiled
from smdist.workers.torch_adapter.compiled_modules import stop_outer_graphs, within_outer_graph
from smdist.workers.torch_adapter.gradients import Gradients
from smdist.workers.torch_adapter.missed_calls import MissedCallDetector
from smdist.workers.torch_adapter.module_names import ModuleNames, compiled, entrance
from smdist.workers.torch_adapter.modules import Modules
from smdist.workers.torch_adapter.optimizers import Optimizers
from smdist.workers.torch_adapter.parameters import Parameters
from smdist.workers.torch_adapter.tensor_access import Value

__all__ = ["TorchRecording"]

_FORWARD_FAILED = "an exception ended its forward pass"


class _Root(NamedTuple):
    name: str
    module: nn.Module
    counts: bool
    compiled: bool


class TorchRecording(StepListener):
    """The torch adapter of one hook."""

    def __init__(self, core: HookCore[Value]) -> None:
        self._core = core
        self._clock, self._recorder, self._errors = core.clock, core.recorder, core.errors
        self._names = ModuleNames()
        self._roots: list[_Root] = []
        self._losses: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._end_handles: list[RemovableHandle] = []
        self._eager = ExitStack()
        self._armed_for_graph = False
        self._entered = ""  # the counting root whose forward runs
        self._handled: BaseException | None = (
            None  # the exception that the script was handling then
        )
        self._missed_calls = MissedCallDetector(core.errors)
        self.modules = Modules(core, self._arrived, self._enter)
        self._parameters = Parameters(core)
        self._gradients = Gradients(core, self._arrived)
        self._optimizers = Optimizers(
            core,
            self._parameters,
            self._arrived,
            before_update=self._gradients.save_synced,
            after_update=self._after_update,
        )

    # -- registering --------------------------------------------------------------------------

    def add_root(self, module: nn.Module, step_on: StepOn | None) -> None:
        root = entrance(module)
        if any(known.module is root for known in self._roots):
            return
        counts = not self._roots or step_on is not None
        if step_on is not None:
            self._clock.step_on = step_on
        name, named = self._names.add_root(module)
        named[name] = root
        self._parameters.add(root, name)
        self.modules.add(named, root=name)
        known = _Root(name, root, counts, compiled(root))
        self._roots.append(known)
        callback: Callback
        if counts and not known.compiled:
            callback = Counting(self._clock, partial(self._on_counting_forward, known))
        else:
            callback = Callback(partial(self._on_other_forward, known))
        self._handles.append(root.register_forward_pre_hook(callback, with_kwargs=True))
        self._handles += stop_outer_graphs(root)
        self._missed_calls.watch(name, root)
        self._registered()

    def add_loss(self, module: nn.Module) -> None:
        if any(known is module for known in self._losses):
            return
        self._losses.append(module)
        name = self._names.add_loss(module)
        self.modules.add({name: entrance(module)}, loss=True)
        losses = self._core.manager.get(CollectionKeys.LOSSES)
        losses.request(module, inputs=False, outputs=True)
        self._registered()

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._registered()

    def _registered(self) -> None:
        if self._clock.step_on == "optimizer":
            self._optimizers.mark_steps()
        self._bind()
        self._clock.due = NEXT_STEP

    def on_config_change(self) -> None:
        self.modules.forget()
        self._gradients.forget()
        self._parameters.forget()
        self._bind()

    def _bind(self) -> list[str]:
        """Give collections the names of modules they asked for; return the classes of unknown ones."""
        unknown = []
        for collection in self._core.manager.get_collections().values():
            for request in collection.unbound_requests:
                target = request.target
                name = self._names.of(target) if isinstance(target, nn.Module) else None
                if name is None:
                    unknown.append(type(target).__name__)
                    continue
                sides = [s for s in ("input", "output") if getattr(request, f"{s}s")]
                collection.bind(request, [rf"^{re.escape(name)}_{side}_\d+$" for side in sides])
        return unknown

    # -- every forward ------------------------------------------------------------------------

    def _on_counting_forward(
        self, root: _Root, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if in_backward():
            return
        self._entered, self._handled = root.name, sys.exc_info()[1]
        if self._clock.forward():
            self._core.on_step_start()
        if self._recorder.plan is not None:
            self.modules.record_inputs(root.name, args, kwargs)

    def incomplete_reason(self) -> str:
        return _FORWARD_FAILED if self._entered else ""

    def _on_other_forward(
        self, root: _Root, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if root.counts or self._clock.awaiting_next_step:
            self._on_counting_forward(root, module, args, kwargs)
        elif self._recorder.plan is not None and not in_backward():
            self.modules.record_inputs(root.name, args, kwargs)
        if root.compiled and self._recorder.recording and self.modules.inside:
            self._run_eagerly()

    def _enter(self) -> bool:
        """Begin a step if the running module does; check whether the current step is recorded."""
        if self._clock.awaiting_next_step and self._clock.forward():
            self._entered = ""
            self._core.on_step_start()
        plan = self._recorder.plan
        # After a change of mode the step before may still receive gradients, but nothing else.
        return plan is not None and plan.mode is self._clock.mode

    def _run_eagerly(self) -> None:
        """Run this forward of a compiled root uncompiled: its graph calls no hooks.

        The compiled code stays, for steps that are not recorded.
        """
        stance = getattr(torch.compiler, "set_stance", None)
        if stance is None:
            self._errors.warn_once(
                "Submodules of a compiled model are not captured: this needs torch 2.6 or later."
            )
        else:
            self._eager.close()
            self._eager.enter_context(stance("force_eager"))

    def _after_update(self) -> None:
        if self._clock.step_on == "optimizer":
            self._clock.end()
            self._clock.due = NEXT_STEP
            self._recorder.close()

    # -- a step -------------------------------------------------------------------------------

    def on_reported_step(self) -> None:
        self._missed_calls.stop()

    def on_capture_step(self) -> None:
        plan = self._recorder.plan
        assert plan is not None
        for kind in self._bind():
            self._errors.warn_once(
                f"A {kind} passed to add_module_tensors() is not captured: register the model it belongs to."
            )
        if self._clock.step_on == "optimizer" and not len(self._optimizers):
            self._errors.warn_once(
                "step_on='optimizer' without an optimizer: all forwards count as one step. Call "
                "hook.register_optimizer(optimizer)."
            )
        self._parameters.refresh()
        self._parameters.save_values()
        tokens: list[Hashable] = [("forward", root.name) for root in self._roots if root.counts]
        tokens += self._gradients.arm(self._parameters.entries, self._optimizers)
        tokens += self.modules.arm(plan)
        tokens += self._optimizers.arm(anyway=self._gradients.synced)
        if not self._end_handles:
            self._end_handles = [
                root.module.register_forward_hook(
                    Callback(partial(self._on_forward_end, root)), always_call=True
                )
                for root in self._roots
                if root.counts or root.compiled
            ]
        self._recorder.expect(tokens)

    def on_idle_step(self, next_due: int) -> None:
        self._disarm()
        outside = any(root.compiled for root in self._roots)
        in_graph = within_outer_graph if outside else within_compiled
        if not (self._armed_for_graph or next_due == NEVER) and in_graph():
            # A graph calls the hooks of a module only if there were some when it was compiled.
            self.modules.arm(self._core.planner.at(self._clock.mode, next_due), only_losses=outside)
            self._clock.due = NEXT_STEP
        self._armed_for_graph = True

    def awaits_gradients(self) -> bool:
        return self._recorder.recording and self._gradients.pending

    def _on_forward_end(self, root: _Root, *_: Any) -> None:
        if in_backward():
            return
        self._eager.close()
        # torch also calls this for a forward that raised.
        ended = self._entered == root.name and sys.exc_info()[1] is self._handled
        self._handled = None
        if ended and self._recorder.incomplete_reason == _FORWARD_FAILED:
            self._recorder.incomplete_reason = ""
        if self._recorder.recording and root.counts:
            self._arrived(("forward", root.name))

    def _arrived(self, token: Hashable) -> None:
        if self._recorder.arrived(token) and self._clock.step_on == "forward":
            self._recorder.incomplete_reason = (
                ""  # all is there, though the backward pass may still run
            )
            self._recorder.close()

    # -- end ----------------------------------------------------------------------------------

    def on_close(self) -> None:
        self._missed_calls.report_at_end()

    def _disarm(self) -> None:
        for handle in self._end_handles:
            handle.remove()
        self._end_handles.clear()
        self._gradients.disarm()
        self.modules.disarm()
        self._optimizers.disarm()

    def uninstall(self) -> None:
        with suppress(Exception):
            self._eager.close()
        self._disarm()
        self._missed_calls.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizers.clear()
        self.modules.clear()
        self._parameters.clear()
        self._roots.clear()
        self._losses.clear()
        self._names.forget()
