"""The part of a hook that is the same for all frameworks: the course of a step, and the hook's end.

A hook decides nothing and writes nothing itself. The planner decides what is due, the recorder feeds the
capture. All calls are on the training thread, in this order:

    start()             the hook is built: check settings and places
    on_step_start()     the clock has reported a step; an adapter calls this
    save_value()        the script saves a value of its own
    close()             the end; also called at exit, and by the next step if a save was under way

Failures go to the error policy. Only wrong settings, and `on_error="raise"`, stop the training script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Generic, TypeVar

from smdist.config import HookConfig
from smdist.config.collection import Collection
from smdist.errors import DrainTimeout, NoRank
from smdist.format.manifest import CollectionInfo, Collections, collections_key
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys, worker_name
from smdist.planning import NEVER, Planner, StepPlan
from smdist.workers.hook import lifecycle
from smdist.workers.hook.capture_session import CaptureSession, Sink
from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.hook.overhead_budget import OverheadController
from smdist.workers.hook.plan_warnings import PlanWarnings
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.hook.recorder import Recorder
from smdist.workers.hook.step_clock import NEXT_STEP, StepClock
from smdist.workers.hook.step_listener import StepListener
from smdist.workers.hook.user_values import TensorAdapter, UserValues
from smdist.workers.spool.logs import logger

__all__ = ["HookCore"]

T = TypeVar("T")


class HookCore(Generic[T]):
    """`active` is False once nothing will be saved any more."""

    def __init__(
        self,
        config: HookConfig,
        tensors: TensorAdapter[T],
        collection_type: type[Collection],
        process: ProcessSettings,
        close_timeout_s: float,
        *,
        silent: bool = False,
    ) -> None:
        self.config, self.process, self.close_timeout_s = config, process, close_timeout_s
        self.log = logger()
        self.active = lifecycle.enabled() and not silent
        self.listener = StepListener()
        self.manager = config.build_manager(collection_type)
        self.planner = Planner(config, self.manager)
        self.clock = StepClock()
        self.errors = ErrorPolicy(config.on_error, self.log)
        self.session: CaptureSession[T] = CaptureSession(
            config, process, tensors.access, self.log, self.errors.warn_once
        )
        # Sessions of the further ranks of this process; closed together with the first one.
        self.replica_sessions: list[CaptureSession[T]] = []
        self.recorder: Recorder[T] = Recorder(tensors.describe)
        self.values = UserValues(
            tensors, self.clock, self.planner, self.recorder, self.sink, self.errors.warn_once
        )
        self._overhead: OverheadController | None = None
        if config.overhead_budget is not None:
            self.recorder.metered = True
            self._overhead = OverheadController(
                config.overhead_budget, lambda: self.recorder.spent_s
            )
        self._warnings = PlanWarnings(self.planner, self.errors, self.log)
        self._described = False
        self._postponed: tuple[str, float | None] | None = None
        self._closed_in = 0  # the process whose script closed the hook, until it was warned

    def start(self) -> None:
        """Check the places that were given, and watch for the end of the process."""
        if not self.active:
            return
        try:
            self.session.check()
        except NoRank as error:  # the same script runs in all tasks of a cluster
            self.log.warning("nothing is saved by this process: %s", error)
            self.active = False
            return
        if self.config.export_tensorboard:
            self.log.warning("export_tensorboard is not available yet; everything else is saved")
        self.planner.subscribe(self._on_config_change)
        lifecycle.register(self)

    @property
    def worker(self) -> str:
        return worker_name(self.session.identity.rank)

    @property
    def out_dir(self) -> str:
        return self.config.out_dir

    # -- steps --------------------------------------------------------------------------------

    def set_mode(self, mode: ModeKeys) -> None:
        if mode is not self.clock.mode:
            self.clock.set_mode(mode)
            self.report_next_step()

    def end_step(self) -> None:
        """End the current step by hand; forwards no longer begin steps by themselves."""
        clock = self.clock
        clock.step_on = "manual"
        if not clock.in_step and (clock.step >= 0 or self.values.any_held) and clock.begin():
            self.on_step_start()
        clock.end()
        self.recorder.finish()
        self.report_next_step()

    def report_next_step(self) -> None:
        """Have the clock report the next step, whether something is due at it or not."""
        self.clock.due = NEXT_STEP if self.active else NEVER

    def on_step_start(self) -> None:
        """Close the step before, and capture the one that the clock has just reported if it is due."""
        if self._postponed is not None:
            self.close()
        if not self.active:
            return
        self.listener.on_reported_step()
        try:
            if self.session.saves_on_this_rank():
                self._warnings.warn_of_idle_schedules()
            self._report_interrupted_steps()
            self.recorder.finish()
            self.values.release()
            self._begin_step()
            self.clock.unreported = ()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self.clock.due = NEXT_STEP
            self.errors.on_exception(error, f"step {self.clock.step}")
        finally:
            if not self.session.saves_on_this_rank():
                self._deactivate()

    def _begin_step(self) -> None:
        clock = self.clock
        next_due = self.planner.next_due(clock.mode, clock.mode_step)
        if next_due == clock.mode_step:
            clock.due = NEXT_STEP  # the next step has to close this one
            sink = self.sink()
            if sink is None:
                return
            plan = self._plan_within_budget(sink)
            if plan is not None:
                self.recorder.begin(sink, clock.ref, plan)
                self.listener.on_capture_step()
                self.recorder.incomplete_reason = self.listener.incomplete_reason()
                return
            next_due = self.planner.next_due(clock.mode, clock.mode_step + 1)
        clock.due = next_due
        self.listener.on_idle_step(next_due)

    def _report_interrupted_steps(self) -> None:
        """Mark due steps as incomplete whose report was cut off by an exception."""
        clock = self.clock
        while len(clock.unreported) > 1:
            ref = clock.unreported[0]
            if ref != self.recorder.ref and self.planner.next_due(*ref[:2]) == ref.mode_step:
                sink = self.sink()
                if sink is not None:
                    reason = "an exception interrupted it before its capture had begun"
                    sink.mark_incomplete(ref, reason)
            # One at a time: this, too, may be interrupted.
            clock.unreported = clock.unreported[1:]

    def _plan_within_budget(self, sink: Sink[T]) -> StepPlan | None:
        """Return what to capture of the due step; None if the overhead budget has no room for it."""
        clock, overhead = self.clock, self._overhead
        plan = self.planner.at(clock.mode, clock.mode_step)
        if overhead is None:
            return plan
        capture = self.session.capture
        uploader = 0 if capture is None else capture.uploader_pid
        kept = overhead.select_plan(plan, clock.ref, self.planner.period(clock.mode), uploader)
        overhead.record_changes(sink, self.session.record)
        return kept

    # -- saving -------------------------------------------------------------------------------

    def sink(self) -> Sink[T] | None:
        """Return where to save, opened and described; None on a rank that does not save."""
        sink = self.session.open()
        if sink is None or self._described:
            return sink
        self.errors.attach_journal(sink.record_error)
        self._warnings.warn_of_empty_collections(self.config.framework.name)
        key = collections_key(self.worker)
        sink.describe(key, encode(self.describe_collections(self.worker), key))
        self._described = True
        return sink

    def describe_collections(self, worker: str) -> Collections:
        infos = tuple(CollectionInfo(**facts) for facts in self.planner.description())
        return Collections(worker, infos)

    def save_value(
        self, name: str, value: object, collections: Iterable[str], *, scalar: bool
    ) -> None:
        """Save a value of the script at the current step, whether the step is due or not."""
        if not self.can_save():
            return
        if self.session.is_reentrant_call:
            self.log.warning("%s is not saved: a signal handler interrupted another save", name)
            return
        with self.errors.guard(f"saving {name}"):
            clock = self.clock
            if clock.step_on == "manual" and not clock.in_step and clock.begin():
                self.on_step_start()
            self.values.save(name, value, collections, scalar)

    def can_save(self) -> bool:
        """Check whether this process still saves anything; warn a script that has closed the hook."""
        saves = self.active and self.session.saves_on_this_rank()
        if not saves:
            self.warn_if_closed()
        return saves

    def _on_config_change(self) -> None:
        self._described = False
        self.recorder.forget()
        self.listener.on_config_change()
        self.report_next_step()

    # -- end ----------------------------------------------------------------------------------

    @property
    def _sessions(self) -> list[CaptureSession[T]]:
        return [self.session, *self.replica_sessions]

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything saved so far is stored; False after `timeout_s` seconds.

        Returns False at once in a signal handler: it cannot wait for the save that it interrupted.
        """
        sessions = self._sessions
        if any(session.is_reentrant_call for session in sessions):
            return False
        limit_s = self.close_timeout_s if timeout_s is None else timeout_s
        stored = True
        for capture in [session.capture for session in sessions if session.capture is not None]:
            capture.flush()
            stored = capture.drain(limit_s) and stored
        return stored

    def close(self, reason: str = "", timeout_s: float | None = None) -> None:
        """Store everything and uninstall; `reason` says why the job failed, if it did.

        Within a save that a signal handler interrupted this is postponed: to the next step, or to
        the exit of the process.
        """
        if not self.active and not self._any_open:  # open: closing was interrupted
            return
        if any(session.is_reentrant_call for session in self._sessions):
            self._postponed, self.clock.due = (reason, timeout_s), NEXT_STEP
            return
        if self._postponed is not None:
            reason, postponed_s = self._postponed
            timeout_s = postponed_s if timeout_s is None else timeout_s
        not_stored: list[str] = []
        try:
            with self.errors.guard("closing"):
                if self.session.saves_on_this_rank():
                    self._closed_in = os.getpid()
                self.values.release_all()
                if not reason:
                    self.recorder.finish()
                    self._warnings.warn_of_unmatched_patterns()
                    self.listener.on_close()
        finally:
            self._deactivate()
            limit_s = self.close_timeout_s if timeout_s is None else timeout_s
            with ExitStack() as stack:  # each is closed even if another one fails
                for session in reversed(self._sessions):
                    stack.callback(self._close_session, session, reason, limit_s, not_stored)
            lifecycle.unregister(self)
        if not_stored:
            self.errors.report_not_drained(DrainTimeout("; ".join(not_stored)))

    def _close_session(
        self, session: CaptureSession[T], reason: str, limit_s: float, not_stored: list[str]
    ) -> None:
        with self.errors.guard("closing"):
            not_stored += filter(None, [session.close(reason, limit_s)])

    def _deactivate(self) -> None:
        """Save nothing more, and cost nothing from here on."""
        self.active = False
        self.clock.due = NEVER
        self.values.clear()
        self.listener.uninstall()
        if not self._any_open:  # else `close` goes on
            lifecycle.unregister(self)

    @property
    def _any_open(self) -> bool:
        return any(session.is_open for session in self._sessions)

    def warn_if_closed(self) -> None:
        """Warn once of a script that goes on with a hook that it has closed."""
        # A fork has its own number: there the hook is the parent's.
        if self._closed_in == os.getpid() and not sys.is_finalizing():
            self._closed_in = 0
            self.log.warning(
                "the hook of %s is closed: nothing more is captured by it; close it after the last "
                "step",
                self.out_dir,
            )

    def at_exit(self, reason: str) -> None:
        try:
            if not reason and self.active and self.listener.awaits_gradients():
                # sys.exit() in the middle of a step looks like an orderly end from here.
                reason = f"the process ended within step {self.clock.step}"
            self.close(reason)
        except Exception as error:  # noqa: BLE001 (the interpreter is about to exit)
            self.log.warning("closing the hook at exit: %r", error)
        self._closed_in = 0  # not by the script

    def after_fork(self) -> None:
        """Release everything in a forked child, as it belongs to the parent."""
        self.active = False
        self.clock.due = NEVER
        self.recorder.abandon()
        for session in self._sessions:
            session.abandon()
        self.listener.uninstall()
