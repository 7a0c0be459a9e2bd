"""What hooks of all frameworks have in common: the public face, and the course of a step.

A hook decides nothing and writes nothing. When a step begins the framework's part calls `_on_step_start`,
unless the clock says that nobody needs to know; the planner says what is due; the recorder feeds
the capture.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from typing_extensions import Self

from smdist.config import HookConfig
from smdist.config.collection import Collection, CollectionKeys
from smdist.config.readers import read_text, read_texts, read_timestamp
from smdist.errors import ConfigurationError, DrainTimeout, NoRank
from smdist.format.manifest import CollectionInfo, Collections, collections_key
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys
from smdist.planning import NEVER, StepPlan
from smdist.workers.hook import lifecycle
from smdist.workers.hook.accessors import HookParts
from smdist.workers.hook.capture_session import Sink
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.hook.step_clock import NEXT_STEP
from smdist.workers.hook.user_values import TensorAdapter

__all__ = ["CLOSE_TIMEOUT_S", "BaseHook"]

T = TypeVar("T")
H = TypeVar("H", bound="BaseHook[Any]")

CLOSE_TIMEOUT_S = 600.0


class BaseHook(HookParts[T]):
    """See the framework's own class for construction and registering."""

    _postponed: tuple[str, float | None] | None = None
    _closed_in = 0  # the process whose script closed it, until it is told what that means

    def _set_up(
        self,
        config: HookConfig,
        reading: TensorAdapter[T],
        collection_type: type[Collection],
        where: ProcessSettings,
        close_timeout_s: float,
        silent: bool = False,
    ) -> None:
        self._close_timeout_s = close_timeout_s
        self._put_together(config, reading, collection_type, where, silent)
        if not self._active:
            return
        try:
            self._session.check()
        except NoRank as error:  # the same script runs in all tasks of a cluster
            self._log.warning("nothing is saved by this process: %s", error)
            self._active = False
            return
        if config.export_tensorboard:
            self._log.warning("export_tensorboard is not available yet; everything else is saved")
        self._planner.subscribe(self._changed)
        lifecycle.enter(self)

    # -- what a framework adds ----------------------------------------------------------------

    def _on_reported_step(self) -> None:
        """Whatever becomes of it."""

    def _on_capture_step(self) -> None:
        """The recorder has begun a step: capture and arm what its plan wants."""

    def _incomplete_reason(self) -> str:
        """Why the step that has begun is not whole should nothing more come; empty: it is."""
        return ""

    def _on_idle_step(self, next_due: int) -> None:
        """A step began on which nothing is due."""

    def _awaits_gradients(self) -> bool:
        """Is a step being recorded of which much is missing yet?"""
        return False

    def _on_config_change(self) -> None:
        """The configuration changed."""

    def _on_close(self) -> None:
        """The job comes to its end, in good order."""

    def _uninstall(self) -> None:
        """Leave everything as it was before registering."""

    # -- steps --------------------------------------------------------------------------------

    def set_mode(self, mode: ModeKeys) -> None:
        """Steps that begin from now on are of this mode."""
        if not isinstance(mode, ModeKeys):
            raise ConfigurationError(f"mode={mode!r} is not one of smdist.modes")
        if mode is not self._clock.mode:
            self._clock.set_mode(mode)
            self._settle_due()

    def step(self) -> None:
        """Everything since the last call was one step; forwards no longer count by themselves."""
        clock = self._clock
        clock.step_on = "manual"
        if not clock.in_step and (clock.step >= 0 or self._values.any_held) and clock.begin():
            self._on_step_start()
        clock.end()
        self._recorder.finish()
        self._settle_due()

    def _on_step_start(self) -> None:
        """A step began, and the clock was told to say so."""
        if self._postponed is not None:
            self._end("")
        if not self._active:
            return
        clock, planner = self._clock, self._planner
        self._on_reported_step()
        try:
            self._tell_what_is_never_due()
            self._tell_what_was_lost()
            self._recorder.finish()
            self._values.release()
            due = planner.next_due(clock.mode, clock.mode_step)
            if due == clock.mode_step:
                clock.due = NEXT_STEP  # the next step has to close this one
                sink = self._sink()
                plan = None if sink is None else self._plan_within_budget(sink)
                if sink is not None and plan is not None:
                    self._recorder.begin(sink, clock.ref, plan)
                    self._on_capture_step()
                    self._recorder.incomplete_reason = self._incomplete_reason()
                elif sink is not None:
                    clock.due = due = planner.next_due(clock.mode, clock.mode_step + 1)
                    self._on_idle_step(due)
            else:
                clock.due = due
                self._on_idle_step(due)
            clock.unreported = ()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            clock.due = NEXT_STEP
            self._errors.on_exception(error, f"step {clock.step}")
        finally:
            if not self._session.saves_on_this_rank():
                self._deactivate()

    def _tell_what_was_lost(self) -> None:
        """Steps that began, and of which an exception kept this from being told."""
        clock = self._clock
        while len(clock.unreported) > 1:
            ref = clock.unreported[0]
            if ref != self._recorder.ref and self._planner.next_due(*ref[:2]) == ref.mode_step:
                sink = self._sink()
                if sink is not None:
                    sink.mark_incomplete(
                        ref, "an exception interrupted it before its capture had begun"
                    )
            clock.unreported = clock.unreported[
                1:
            ]  # each as it is told: this may be interrupted, too

    def _plan_within_budget(self, sink: Sink[T]) -> StepPlan | None:
        """What of the step that is due is captured; None: the budget has no room for it."""
        clock, overhead = self._clock, self._overhead
        plan = self._planner.at(clock.mode, clock.mode_step)
        if overhead is None:
            return plan
        capture = self._session.capture
        uploader = 0 if capture is None else capture.uploader_pid
        kept = overhead.select_plan(plan, clock.ref, self._planner.period(clock.mode), uploader)
        overhead.record_changes(sink, self._session.record)
        return kept

    def _sink(self) -> Sink[T] | None:
        """Where to save; None on a rank that does not."""
        sink = self._session.open()
        if sink is None or self._described:
            return sink
        if not self._introduced:
            self._errors.attach_journal(sink.record_error)
            self._tell_what_saves_nothing()
            self._introduced = True
        infos = tuple(CollectionInfo(**facts) for facts in self._planner.description())
        described = Collections(self.worker, infos)
        key = collections_key(self.worker)
        sink.describe(key, encode(described, key))
        self._described = True
        return sink

    def _tell_what_saves_nothing(self) -> None:
        for name in self._planner.idle():
            self._log.warning(
                "collection %r is to be saved, but %s has no tensors for it; save_tensor() can put "
                "some there, include() can say which are meant",
                name,
                self._config.framework.name,
            )
        for name in self._planner.unsaved():
            self._log.warning(
                "collection %r is not in include_collections: nothing is saved because of it", name
            )

    def _tell_what_is_never_due(self) -> None:
        """Once, when a script has said everything: later on it may be how it ends what it saved."""
        told, self._told_never_due = self._told_never_due, True
        if told or not self._session.saves_on_this_rank():
            return
        for schedule, names in self._planner.never_due().items():
            self._errors.warn_once(
                f"collections {', '.join(names)} are never saved: no multiple of save_interval="
                f"{schedule.save_interval} is from start_step={schedule.start_step} on and before "
                f"end_step={schedule.end_step}; give a later end_step, or none"
            )

    def _tell_what_matched_nothing(self) -> None:
        for name, patterns in self._planner.unmatched().items():
            for pattern in patterns:
                self._errors.warn_once(
                    f"include_regex {pattern!r} of collection {name!r} matched no tensor: it saved "
                    "nothing; compare it with trial.tensor_names()"
                )

    def _changed(self) -> None:
        self._described = False
        self._recorder.forget()
        self._on_config_change()
        self._settle_due()

    def _settle_due(self) -> None:
        self._clock.due = NEXT_STEP if self._active else NEVER

    # -- values of the script's own -----------------------------------------------------------

    def save_scalar(
        self, name: str, value: Any, sm_metric: bool = False, timestamp: float | None = None
    ) -> None:
        """Store a number as `scalar/<name>` at the current step, whatever the interval.

        `timestamp`: the time of the number in seconds since 1970, stored as `timestamp/<name>`.
        """
        name = read_text("name", name)
        collections = (CollectionKeys.SM_METRICS,) if sm_metric else ()
        when = None if timestamp is None else np.float64(read_timestamp("timestamp", timestamp))
        self._save(f"scalar/{name}", value, collections, scalar=True)
        if when is not None:
            self._save(f"timestamp/{name}", when, (), scalar=True)

    def save_tensor(
        self,
        tensor_name: str,
        tensor_value: Any,
        collections_to_write: str | Iterable[str] = CollectionKeys.DEFAULT,
    ) -> None:
        """Store a tensor or array at the current step, as a member of every collection given."""
        collections = read_texts("collections_to_write", collections_to_write)
        self._save(read_text("tensor_name", tensor_name), tensor_value, collections)

    def _save(
        self, name: str, value: object, collections: Iterable[str], *, scalar: bool = False
    ) -> None:
        if not self._saves():
            return
        if self._session.is_reentrant_call:
            self._log.warning("%s is not saved: a signal handler interrupted another save", name)
            return
        clock = self._clock
        try:
            if clock.step_on == "manual" and not clock.in_step and clock.begin():
                self._on_step_start()
            self._values.save(name, value, collections, scalar)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, f"saving {name}")

    # -- across processes ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The step counters, to be kept in a checkpoint."""
        return self._clock.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where `state_dict()` was taken."""
        self._clock.restore(state)
        self._settle_due()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything saved so far is stored; False if `timeout` seconds were too few."""
        capture = self._session.capture
        if capture is None:
            return True
        if (
            capture.is_reentrant_call
        ):  # asked by a signal handler: what it interrupted cannot be waited for
            return False
        capture.flush()
        return capture.drain(self._close_timeout_s if timeout is None else timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything is stored (`timeout` seconds at most) and let go of the model.

        A signal handler that interrupts a save cannot wait for it: the hook is closed as soon as the
        next step begins, or when the process exits, whichever is first.
        """
        self._end("", timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._end("" if error is None else f"{type(error).__name__}: {error}")

    def at_exit(self, reason: str) -> None:
        try:
            if not reason and self._active and self._awaits_gradients():
                # sys.exit() in the middle of a step looks like an orderly end from here.
                reason = f"the process ended within step {self._clock.step}"
            self._end(reason)
        except Exception as error:  # noqa: BLE001 (nobody is left to hear it)
            self._log.warning("closing the hook at exit: %r", error)
        self._closed_in = 0  # not by the script

    def after_fork(self) -> None:
        """In a child of this process: everything here is the parent's."""
        self._active = False
        self._clock.due = NEVER
        self._recorder.abandon()
        self._session.abandon()
        self._uninstall()

    def _end(self, reason: str, timeout: float | None = None) -> None:
        if not self._active and not self._session.is_open:  # open: the end was interrupted
            return
        if self._session.is_reentrant_call:
            self._postponed, self._clock.due = (reason, timeout), NEXT_STEP
            return
        if self._postponed is not None:
            reason, patience = self._postponed
            timeout = patience if timeout is None else timeout
        left = ""
        try:
            if self._session.saves_on_this_rank():
                self._closed_in = os.getpid()
            self._values.release_all()
            if not reason:
                self._recorder.finish()
                self._tell_what_matched_nothing()
                self._on_close()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "closing")
        finally:
            self._deactivate()
            left = self._close_session(
                reason, self._close_timeout_s if timeout is None else timeout
            )
            lifecycle.leave(self)
        if left:
            self._errors.report_not_drained(DrainTimeout(left))

    def _saves(self) -> bool:
        """Whether this process still saves anything; a script that closed the hook is told."""
        saves = self._active and self._session.saves_on_this_rank()
        if not saves:
            self._warn_if_closed()
        return saves

    def _warn_if_closed(self) -> None:
        """Once: a script goes on with a hook that it has closed. In a fork it is the parent's."""
        if self._closed_in == os.getpid() and not sys.is_finalizing():
            self._closed_in = 0
            self._log.warning(
                "the hook of %s is closed: nothing more is captured by it; close it after the last "
                "step",
                self.out_dir,
            )

    def _close_session(self, reason: str, timeout_s: float) -> str:
        try:
            return self._session.close(reason, timeout_s)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "closing")
            return ""

    def _deactivate(self) -> None:
        """Nothing will be saved any more: cost nothing from here on."""
        self._active = False
        self._clock.due = NEVER
        self._values.clear()
        self._uninstall()
        if not self._session.is_open:  # else it is about to be closed
            lifecycle.leave(self)
