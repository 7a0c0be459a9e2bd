"""Capture the gradients of a recorded step.

    local    what this rank computed: read when autograd has accumulated it. DistributedDataParallel
             reduces it later: its own hook on the same node runs after this one
    synced   what the optimizer sees: read when the optimizer is about to step. Without a registered
             optimizer, read after all other callbacks at the end of the backward pass. Horovod
             reduces until its optimizer steps, so it needs the optimizer

`TorchRecording` calls `arm` for each captured step and `disarm` at the next idle one. Parameters have hooks
only while recorded steps want their gradients. The hooks run on autograd's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from smdist.errors import CaptureError
from smdist.planning import StepPlan, TensorPlan
from smdist.workers import horovod_support as horovod
from smdist.workers.capture.part_plan import PartPlan
from smdist.workers.hook.core import HookCore
from smdist.workers.torch_adapter.callbacks import Callback
from smdist.workers.torch_adapter.module_names import NamedParameter
from smdist.workers.torch_adapter.tensor_access import Value, readable

__all__ = ["GRADIENT", "Gradients"]

GRADIENT = "gradient/"
_END = "end of backward"
_INCOMPLETE = "an exception ended its backward pass"


class _Wanted:
    """A parameter whose gradient is wanted.

    `part` fits gradients of `dtype` and `shape`. All three are None until the first gradient.
    """

    __slots__ = ("dtype", "module", "name", "parameter", "part", "plan", "shape")

    def __init__(self, entry: NamedParameter, plan: TensorPlan) -> None:
        self.name, self.plan = GRADIENT + entry.name, plan
        self.parameter: torch.Tensor = entry.parameter
        self.module = entry.module
        self.part: PartPlan | None = None
        self.dtype: torch.dtype | None = None
        self.shape: torch.Size | None = None


class Gradients:
    def __init__(self, core: HookCore[Value], arrived: Callable[[Hashable], None]) -> None:
        """`arrived` is called with the token of each captured gradient."""
        self._recorder, self._errors, self._arrived = core.recorder, core.errors, arrived
        self.synced = core.config.stage_gradients == "synced"
        self._wanted: dict[int, _Wanted] = {}
        # By plan: the parameters, which of them are trained, and what is wanted of them.
        self._known: dict[
            StepPlan, tuple[list[NamedParameter], list[bool], dict[int, _Wanted]]
        ] = {}
        self._handles: dict[int, RemovableHandle] = {}
        self._queued_for = -1
        self._any_received = False  # in this step

    @property
    def pending(self) -> bool:
        """Check whether the step wants gradients and no backward pass has brought one."""
        return bool(self._wanted) and not self._any_received

    def arm(self, entries: list[NamedParameter], optimizers: Iterable[Any]) -> list[Hashable]:
        """Watch for the gradients that the step's plan wants; return the tokens that will arrive."""
        at_optimizer = [id(optimizer) for optimizer in optimizers] if self.synced else []
        self._wanted = self._wanted_of(entries)
        self._any_received = False
        if self._wanted and self.synced and not at_optimizer and horovod.is_running("torch"):
            self._errors.warn_once(
                "Gradients are not captured: with Horovod, stage_gradients='synced' needs the optimizer. "
                "Call hook.register_optimizer(optimizer)."
            )
            self._wanted = {}
        self._watch({} if at_optimizer else self._wanted)
        if not self._wanted:
            return []
        if self.synced:
            return [(_END, key) for key in at_optimizer or [0]]
        return list(self._wanted)

    def disarm(self) -> None:
        self._wanted = {}
        self._watch({})

    def forget(self) -> None:
        self._known.clear()

    def _wanted_of(self, entries: list[NamedParameter]) -> dict[int, _Wanted]:
        plan = self._recorder.plan
        assert plan is not None
        trained = [entry.parameter.requires_grad for entry in entries]
        known = self._known.get(plan)
        if known is None or known[0] is not entries or known[1] != trained:
            found: dict[int, _Wanted] = {}
            for entry, requires_grad in zip(entries, trained, strict=True):
                wanted = plan.wants(GRADIENT + entry.name) if requires_grad else None
                if wanted is not None:
                    found[id(entry.parameter)] = _Wanted(entry, wanted)
            known = self._known[plan] = (entries, trained, found)
        return known[2]

    def _watch(self, wanted: dict[int, _Wanted]) -> None:
        if wanted.keys() == self._handles.keys():
            return
        for key in self._handles.keys() - wanted.keys():
            self._handles.pop(key).remove()
        for key in wanted.keys() - self._handles.keys():
            self._handles[key] = self._register_hook(wanted[key])

    def _register_hook(self, wanted: _Wanted) -> RemovableHandle:
        watched: Any = wanted.parameter  # the method is untyped
        if is_lazy(watched):  # takes no hook until its module has run
            body = Callback(partial(self._on_shaped, id(watched)))
            return wanted.module.register_forward_hook(body)
        body = Callback(self._on_synced if self.synced else self._on_local)
        handle: RemovableHandle = watched.register_post_accumulate_grad_hook(body)
        return handle

    def _on_shaped(self, key: int, *_: Any) -> None:
        wanted = self._wanted.get(key)
        if wanted is None or is_lazy(wanted.parameter):
            return
        with self._errors.guard(f"waiting for {wanted.name}"):
            self._handles.pop(key).remove()
            self._handles[key] = self._register_hook(wanted)

    # -- during backward ----------------------------------------------------------------------

    def _on_local(self, parameter: torch.Tensor) -> None:
        key, recorder = id(parameter), self._recorder
        wanted = self._wanted.get(key)
        if wanted is None or recorder.plan is None:
            return
        self._any_received = True
        if not recorder.incomplete_reason:
            self._mark_until_backward_ends()
        try:
            gradient, part = parameter.grad, wanted.part
            # Plain and as last time: `_save_one` would find nothing else, and costs more calls.
            if (
                part is not None
                and type(gradient) is torch.Tensor
                and gradient.dtype is wanted.dtype
                and gradient.shape == wanted.shape
                and gradient.layout is torch.strided
            ):
                recorder.put(part, (gradient,))
            else:
                self._save_one(wanted)
            if len(recorder.missing) > 1:  # others are still missing
                recorder.missing.discard(key)
            else:
                self._arrived(key)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, f"capturing {wanted.name}")

    def _mark_until_backward_ends(self) -> None:
        """Mark the step as incomplete until the backward pass, which has begun, ends."""
        with suppress(RuntimeError):  # where autograd itself is compiled
            Variable._execution_engine.queue_callback(self._on_backward_end)
            self._recorder.incomplete_reason = _INCOMPLETE

    def _on_backward_end(self) -> None:
        if self._recorder.incomplete_reason == _INCOMPLETE:
            self._recorder.incomplete_reason = ""

    def _save_one(self, wanted: _Wanted) -> None:
        gradient = self._read(wanted)
        if gradient is None:
            return
        part = wanted.part
        if part is None or gradient.dtype != wanted.dtype or gradient.shape != wanted.shape:
            part = wanted.part = self._recorder.part(wanted.name, gradient, wanted.plan)
            wanted.dtype, wanted.shape = gradient.dtype, gradient.shape
        self._recorder.put(part, (gradient,))

    def _read(self, wanted: _Wanted) -> torch.Tensor | None:
        gradient = wanted.parameter.grad
        if gradient is None:  # not used in this step
            return None
        try:
            return readable(gradient)
        except CaptureError as error:
            self._errors.warn_not_captured(wanted.name, error)
            return None

    def _on_synced(self, parameter: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._queued_for:
            return
        self._queued_for = task
        if not self._recorder.incomplete_reason:
            self._mark_until_backward_ends()
        # Callbacks run in order. By the time ours runs, reducers have queued theirs. One that is queued
        # from there runs after them.
        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._at_end))

    def _at_end(self) -> None:
        self._queued_for = -1
        self.save_synced(None)

    def save_synced(self, optimizer: Any) -> None:
        """Capture reduced gradients: before `optimizer` updates, or (None) after a backward pass."""
        if not self.synced or not self._wanted or not self._recorder.recording:
            return
        if horovod.awaits_reduction(optimizer):
            return
        self._any_received = True
        with self._errors.guard("capturing reduced gradients"):
            before = self._recorder.hold_incomplete(_INCOMPLETE)
            self._save_many(self._updated_by(optimizer))
            self._recorder.incomplete_reason = before
            self._arrived((_END, 0 if optimizer is None else id(optimizer)))

    def _updated_by(self, optimizer: Any) -> Iterable[_Wanted]:
        if optimizer is None:
            return self._wanted.values()
        ids = (id(p) for group in optimizer.param_groups for p in group["params"])
        return [self._wanted[key] for key in ids if key in self._wanted]

    def _save_many(self, wanted: Iterable[_Wanted]) -> None:
        found = [(w.name, g) for w in wanted if (g := self._read(w)) is not None]
        self._recorder.offer_many(tuple(name for name, _ in found), [g for _, g in found])
