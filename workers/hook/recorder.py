"""Pass the tensors of the step that is being recorded from an adapter to the capture.

On the training thread, for every step on which something is due:

    begin(ref, plan)        begin the step
    expect(tokens)          name what will arrive if nothing goes wrong
    offer / put             record tensors; `arrived(token)` with each
    close / finish          end the step: everything arrived, or the next step begins

`save` is for values of the script: they go to the step they are said to belong to, due or not.

`incomplete_reason` says why the step would be incomplete if nothing more arrived, as an exception ended
what brings its tensors. It is set before something begins that brings tensors, and emptied at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from smdist.identity import StepRef
from smdist.planning import StepPlan, TensorPlan
from smdist.workers.capture.part_plan import CaptureRequest, PartPlan, plan_part
from smdist.workers.hook.capture_session import Sink

__all__ = ["Describe", "Recorder"]

T = TypeVar("T")

# Bounds for shapes or sets of tensors that change from step to step.
_MAX_PARTS, _MAX_GROUPS = 8192, 64
_CALL_S = 15e-6  # of the way from the framework to `put`, with cold caches
_BEGINNING = "an exception interrupted the beginning of its capture"

TensorMeta = tuple[str, tuple[int, ...], int]  # element type, shape, bytes
Describe = Callable[[T], TensorMeta]


class Recorder(Generic[T]):
    def __init__(self, describe: Describe[T]) -> None:
        self.plan: StepPlan | None = None  # of the step being recorded
        self.ref: StepRef | None = None
        self.incomplete_reason = ""
        self._describe = describe
        self.metered = False  # whether `spent_s` counts
        self.spent_s = 0.0  # seconds that captures took from training
        self._sink: Sink[T] | None = None
        self._at: StepRef | None = None  # the step that the sink is at
        self.missing: set[Hashable] = set()  # tokens of what is expected and has not arrived
        self._parts: dict[tuple[str, str, tuple[int, ...], TensorPlan], PartPlan] = {}
        self._chosen: dict[
            tuple[StepPlan, tuple[str, ...]], tuple[tuple[int, TensorPlan], ...]
        ] = {}
        self._groups: dict[tuple[StepPlan, tuple[str, ...], tuple[TensorMeta, ...]], PartPlan] = {}

    @property
    def recording(self) -> bool:
        return self.plan is not None

    def begin(self, sink: Sink[T], ref: StepRef, plan: StepPlan) -> None:
        """Begin a step; the caller sets `incomplete_reason` once what it starts with is captured."""
        self._sink, self.missing = sink, set()
        self.ref, self.plan, self.incomplete_reason = ref, plan, _BEGINNING
        if self._at != ref:
            self._move(sink, ref)

    def hold_incomplete(self, incomplete_reason: str) -> str:
        """Set `incomplete_reason` while something brings tensors; return what to set it to afterwards."""
        before = self.incomplete_reason
        self.incomplete_reason = before or incomplete_reason
        return before

    def expect(self, tokens: Iterable[Hashable]) -> None:
        self.missing.update(tokens)

    def arrived(self, token: Hashable) -> bool:
        """Note that `token` has arrived; True if it was the last one missing."""
        if token not in self.missing:
            return False
        self.missing.remove(token)
        return not self.missing

    def close(self) -> None:
        """Close the step, as everything expected has arrived. Tensors that follow are still recorded."""
        self._report_if_incomplete()
        if self._sink is not None and self._at == self.ref:
            self._sink.close_step()

    def finish(self) -> None:
        """End the step; nothing more of it is recorded."""
        self._report_if_incomplete()
        if self._sink is not None:
            self._sink.close_step()
        self.plan = self.ref = None

    def _report_if_incomplete(self) -> None:
        if self.incomplete_reason and self._sink is not None and self.ref is not None:
            self._sink.mark_incomplete(self.ref, self.incomplete_reason)
        self.incomplete_reason = ""

    def abandon(self) -> None:
        """Forget the step without closing it."""
        self.plan = self.ref = self._sink = self._at = None
        self.incomplete_reason = ""

    # -- tensors ------------------------------------------------------------------------------

    def offer(self, name: str, tensor: T) -> None:
        """Record the tensor if the step's plan wants it."""
        wanted = self.plan.wants(name) if self.plan is not None else None
        if wanted is not None:
            self.put(self.part(name, tensor, wanted), (tensor,))

    def put(self, part: PartPlan, tensors: Sequence[T]) -> None:
        sink, ref = self._sink, self.ref
        if sink is None or ref is None:
            return
        if self._at is not ref and self._at != ref and not self._move(sink, ref):
            return
        if self.metered:
            began = time.perf_counter()
            sink.save(part, tensors)
            self.spent_s += time.perf_counter() - began + _CALL_S
        else:
            sink.save(part, tensors)

    def save(self, sink: Sink[T], ref: StepRef, name: str, tensor: T, plan: TensorPlan) -> None:
        self._sink = sink
        if self._at != ref and not self._move(sink, ref):
            return
        sink.save(self.part(name, tensor, plan), (tensor,))

    def part(self, name: str, tensor: T, plan: TensorPlan) -> PartPlan:
        code, shape, nbytes = self._describe(tensor)
        key = (name, code, shape, plan)
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= _MAX_PARTS:
                self._parts.clear()
            part = self._parts[key] = plan_part([CaptureRequest(name, code, shape, nbytes, plan)])
        return part

    def offer_many(
        self, names: tuple[str, ...], tensors: Sequence[T]
    ) -> tuple[PartPlan, Sequence[T]] | None:
        """Record those of many tensors that the plan wants, in one part; return what was put, if any."""
        plan = self.plan
        if plan is None:
            return None
        chosen = self._chosen.get((plan, names))
        if chosen is None:
            found = [(i, w) for i, name in enumerate(names) if (w := plan.wants(name)) is not None]
            if len(self._chosen) >= _MAX_GROUPS:
                self._chosen.clear()
            chosen = self._chosen[plan, names] = tuple(found)
        if not chosen:
            return None
        picked = [tensors[i] for i, _ in chosen]
        described = tuple(map(self._describe, picked))
        key = (plan, names, described)
        part = self._groups.get(key)
        if part is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            part = self._groups[key] = plan_part(
                [
                    CaptureRequest(names[i], *facts, wanted)
                    for (i, wanted), facts in zip(chosen, described, strict=True)
                ]
            )
        self.put(part, picked)
        return part, picked

    def forget(self) -> None:
        """Forget what was derived from plans of the configuration before."""
        self._chosen.clear()
        self._groups.clear()
        self._parts.clear()

    def _move(self, sink: Sink[T], ref: StepRef) -> bool:
        """Switch the sink to step `ref`, after values of another step were saved."""
        self._at = None  # in case `begin` raises
        if sink.begin(ref, planned=ref == self.ref):
            self._at = ref
        return self._at is not None
