"""`overhead_budget`: capture less when captures cost more than their share of training time.

A capture costs the training thread what it spends in it, and all processes the uploader's processor time.
That time is taken from all processors alike, so it is an upper estimate where one is idle. Costs per
capture and time per due step give the *stride*, a power of two: the due positions that it divides are kept.
Ranks choose their strides without talking to each other. As strides divide each other, the steps that the
slowest rank keeps are kept by all.

When even one in `MAX_STRIDE` positions costs too much, raw tensors become statistics for the rest of the
session, and the stride is found again.

`Budget` is pure: costs and times are passed to it. `OverheadController` measures them on the training
thread and records each change of the stride in the run.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from smdist.format.manifest import SamplingChange, SamplingChanges, Session, sampling_changes_key
from smdist.format.stored_json import encode
from smdist.identity import StepRef, worker_name
from smdist.planning import StepPlan
from smdist.processes import cpu_seconds
from smdist.workers.hook.capture_session import Sink

__all__ = ["MAX_STRIDE", "Budget", "OverheadController", "Spent"]

MAX_STRIDE = 64
_START_STRIDE = 4
_WARM_UP = 2  # first captures, whose cost is memory and processes
_MIN_SAMPLES, _MAX_SAMPLES = 4, 32  # captures that an estimate is made of
_TARGET = 0.75  # of the budget: the rest is for costs that are not measured (caches, torch's calls)
_HALVE_BELOW = 0.9  # a stride is halved when the half would cost less than this share of the target


class Spent(NamedTuple):
    """Totals so far: the clock, seconds that captures took from training, the uploader's CPU seconds."""

    now: float
    training_s: float
    uploader_s: float


class _Sample(NamedTuple):
    positions: int
    captures: int
    spent: Spent


class Budget:
    """Decides for every due step, in order, whether it is captured."""

    def __init__(self, share: float, processors: int) -> None:
        self._share, self._processors = share, max(1, processors)
        self.stride, self.reduced = _START_STRIDE, False
        self._positions = self._captures = 0
        self._samples: deque[_Sample] = deque(maxlen=_MAX_SAMPLES + 1)
        self.expected = 0.0  # share of time that the current stride should cost, 0 while unknown

    def keeps(self, position: int, spent: Spent) -> bool:
        """Check whether to capture the due step at `position` (its step divided by the interval)."""
        self._positions += 1
        if position % self.stride:
            return False
        if self._captures >= _WARM_UP:
            self._samples.append(_Sample(self._positions, self._captures, spent))
            self._adapt()
        if position % self.stride:
            return False
        self._captures += 1
        return True

    def _adapt(self) -> None:
        first, last = self._samples[0], self._samples[-1]
        captures = last.captures - first.captures
        if captures < _MIN_SAMPLES:
            return
        training_s = last.spent.training_s - first.spent.training_s
        uploader_s = last.spent.uploader_s - first.spent.uploader_s
        wall_s = last.spent.now - first.spent.now
        cost_s = (training_s + uploader_s / self._processors) / captures
        per_position_s = max(wall_s - training_s, 1e-9) / (last.positions - first.positions)
        needed = cost_s / (per_position_s * self._share * _TARGET)
        self.expected = cost_s / (per_position_s * self.stride)
        if needed > MAX_STRIDE and not self.reduced:
            self.reduced = True
            self._set_stride(MAX_STRIDE)
        elif needed > self.stride:
            self._set_stride(1 << math.ceil(math.log2(needed)))
        elif self.stride > 1 and needed <= _HALVE_BELOW * self.stride / 2:
            self._set_stride(self.stride // 2)

    def _set_stride(self, stride: int) -> None:
        """Change the stride, and forget measurements that were made under the one before."""
        self.expected *= self.stride / stride
        self.stride = stride
        self._samples.clear()


class OverheadController:
    """Applies the budget of one hook, on the training thread."""

    def __init__(self, share: float, training_s: Callable[[], float]) -> None:
        """`training_s` returns the seconds that captures have taken from training so far."""
        self._share, self._training_s = share, training_s
        self._budget = Budget(share, len(os.sched_getaffinity(0)))
        self._setting = (self._budget.stride, self._budget.reduced)
        self._uploaders: dict[
            int, tuple[float, float]
        ] = {}  # pid -> CPU seconds when first seen, and now
        self._changes: list[SamplingChange] = []
        self._recorded = 0  # how many of the changes are in the run

    def select_plan(
        self, plan: StepPlan, ref: StepRef, period: int, uploader: int
    ) -> StepPlan | None:
        """Return what of `plan` to capture at the due step `ref`, or None for nothing.

        `uploader` is the process id of the uploader, 0 before it has stored anything.
        """
        position = ref.mode_step // period
        spent = Spent(time.perf_counter(), self._training_s(), self._uploader_s(uploader))
        keeps = self._budget.keeps(position, spent)
        setting = (self._budget.stride, self._budget.reduced)
        if setting != self._setting:
            self._setting = setting
            self._changes.append(
                SamplingChange(
                    ref.mode.name,
                    ref.mode_step,
                    ref.step,
                    *setting,
                    self._budget.expected,
                    time.time(),
                )
            )
        if not keeps:
            return None
        return plan.reduced if self._budget.reduced else plan

    def record_changes(self, sink: Sink[Any], session: Session | None) -> None:
        """Write the changes since the last call into the run."""
        if self._recorded < len(self._changes) and session is not None:
            self._recorded = len(self._changes)
            worker = worker_name(session.rank)
            record = SamplingChanges(worker, session.attempt, self._share, tuple(self._changes))
            key = sampling_changes_key(worker, session.attempt)
            sink.describe(key, encode(record, key))

    def _uploader_s(self, pid: int) -> float:
        """Return the CPU seconds of all uploaders, without those of starting them."""
        if pid:
            used = cpu_seconds(pid)
            first, _ = self._uploaders.get(pid, (used, used))
            self._uploaders[pid] = (first, max(first, used))
        return sum(last - first for first, last in self._uploaders.values())
