"""Gradients of a recorded step.

    local    what this rank computed: read when autograd has accumulated it, which is before
             DistributedDataParallel reduces it (its own hook on the same node runs after)
    synced   what the optimizer sees: read when the optimizer is about to step, or, if none is
             registered, when the backward pass has ended for everybody else

Hooks hang on parameters only while a step is recorded that wants their gradients, and stay there
as long as every step is such a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from smdist.errors import CaptureError
from smdist.workers.mishaps import Mishaps
from smdist.workers.recorder import Recorder
from smdist.workers.torch_callback import Callback
from smdist.workers.torch_host import Value, readable
from smdist.workers.torch_names import NamedParameter

__all__ = ["GRADIENT", "Gradients"]

GRADIENT = "gradient/"
_END = "end of backward"


class Gradients:
    def __init__(
        self,
        recorder: Recorder[Value],
        mishaps: Mishaps,
        synced: bool,
        arrived: Callable[[Hashable], None],
    ) -> None:
        """`arrived` is told the token of whatever has been captured."""
        self._recorder, self._mishaps, self._arrived = recorder, mishaps, arrived
        self._synced = synced
        self._wanted: dict[int, tuple[str, torch.Tensor]] = {}
        self._handles: dict[int, RemovableHandle] = {}
        self._queued_for = -1

    def arm(self, entries: Iterable[NamedParameter], optimizers: Iterable[Any]) -> list[Hashable]:
        """Watch what the step's plan wants; the tokens that will arrive."""
        plan = self._recorder.plan
        assert plan is not None
        self._wanted = {
            id(parameter): (GRADIENT + name, parameter)
            for name, parameter, _, _ in entries
            if parameter.requires_grad and plan.wants(GRADIENT + name) is not None
        }
        at_optimizer = [id(optimizer) for optimizer in optimizers] if self._synced else []
        self._watch({} if at_optimizer else self._wanted)
        if not self._wanted:
            return []
        if self._synced:
            return [(_END, key) for key in at_optimizer or [0]]
        return list(self._wanted)

    def disarm(self) -> None:
        self._wanted = {}
        self._watch({})

    def _watch(self, wanted: dict[int, tuple[str, torch.Tensor]]) -> None:
        for key in self._handles.keys() - wanted.keys():
            self._handles.pop(key).remove()
        body = self._on_synced if self._synced else self._on_local
        for key in wanted.keys() - self._handles.keys():
            name, parameter = wanted[key]
            watched: Any = parameter  # the method is untyped
            self._handles[key] = watched.register_post_accumulate_grad_hook(
                Callback(partial(body, name))
            )

    # -- during backward ----------------------------------------------------------------------

    def _on_local(self, name: str, parameter: torch.Tensor) -> None:
        if not self._recorder.recording:
            return
        try:
            self._save(((name, parameter),))
            self._arrived(id(parameter))
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, f"capturing {name}")

    def _on_synced(self, name: str, parameter: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._queued_for:
            return
        self._queued_for = task
        # Callbacks run in order. Whoever reduces gradients has queued its own by the time ours
        # runs, so the one that is queued from there comes after it.
        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._at_end))

    def _at_end(self) -> None:
        self._queued_for = -1
        self.save_synced(None)

    def save_synced(self, optimizer: Any) -> None:
        """Called before `optimizer` updates, or (None) at the end of a backward pass."""
        if not self._synced or not self._wanted or not self._recorder.recording:
            return
        try:
            self._save(self._of(optimizer))
            self._arrived((_END, 0 if optimizer is None else id(optimizer)))
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, "capturing reduced gradients")

    def _of(self, optimizer: Any) -> Iterable[tuple[str, torch.Tensor]]:
        if optimizer is None:
            return self._wanted.values()
        ids = (id(p) for group in optimizer.param_groups for p in group["params"])
        return [self._wanted[key] for key in ids if key in self._wanted]

    def _save(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        names, tensors = [], []
        for name, parameter in wanted:
            gradient = parameter.grad
            if gradient is None:  # not used in this step
                continue
            try:
                tensors.append(readable(gradient))
            except CaptureError as error:
                self._mishaps.trouble(f"{name} was not captured: {error}")
                continue
            names.append(name)
        if len(names) == 1:
            self._recorder.offer(names[0], tensors[0])
        else:
            self._recorder.offer_many(tuple(names), tensors)
