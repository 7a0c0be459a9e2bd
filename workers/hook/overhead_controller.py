"""A hook's budget at work: measures what captures cost, and tells the run what was thinned."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from smdist.format.manifest import SamplingChange, SamplingChanges, Session, sampling_changes_key
from smdist.format.stored_json import encode
from smdist.identity import StepRef, worker_name
from smdist.planning import StepPlan
from smdist.processes import cpu_seconds
from smdist.workers.hook.capture_session import Sink
from smdist.workers.hook.overhead_budget import Budget, Spent

__all__ = ["OverheadController"]


class OverheadController:
    """Used on the training thread by one hook."""

    def __init__(self, share: float, training_s: Callable[[], float]) -> None:
        """`training_s`: what captures have taken from training so far."""
        self._share, self._training_s = share, training_s
        self._budget = Budget(share, len(os.sched_getaffinity(0)))
        self._setting = (self._budget.stride, self._budget.reduced)
        self._uploaders: dict[int, tuple[float, float]] = {}  # pid -> when first seen, by now
        self._changes: list[SamplingChange] = []
        self._recorded = 0  # how many of them are on record

    def select_plan(
        self, plan: StepPlan, ref: StepRef, period: int, uploader: int
    ) -> StepPlan | None:
        """What of `plan` to capture at the due step `ref`; None: nothing.

        `uploader` is the process at work, 0 before it has stored anything.
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
        """Put on record what has changed since the last call."""
        if self._recorded < len(self._changes) and session is not None:
            self._recorded = len(self._changes)
            worker = worker_name(session.rank)
            thinned = SamplingChanges(worker, session.attempt, self._share, tuple(self._changes))
            key = sampling_changes_key(worker, session.attempt)
            sink.describe(key, encode(thinned, key))

    def _uploader_s(self, pid: int) -> float:
        """Processor time of uploaders at work; not that of starting them."""
        if pid:
            used = cpu_seconds(pid)
            first, _ = self._uploaders.get(pid, (used, used))
            self._uploaders[pid] = (first, max(first, used))
        return sum(last - first for first, last in self._uploaders.values())
