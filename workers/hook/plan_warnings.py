"""Warnings about collections and patterns that save nothing."""

from __future__ import annotations

import logging

from smdist.planning import Planner
from smdist.workers.hook.error_policy import ErrorPolicy

__all__ = ["PlanWarnings"]


class PlanWarnings:
    """Called by `HookCore` on the training thread; each kind is reported at most once."""

    def __init__(self, planner: Planner, errors: ErrorPolicy, log: logging.Logger) -> None:
        self._planner, self._errors, self._log = planner, errors, log
        self._checked_collections = self._checked_schedules = False

    def warn_of_empty_collections(self, framework: str) -> None:
        """Warn of collections without tensors, and of those that are configured but not saved."""
        if self._checked_collections:
            return
        self._checked_collections = True
        for name in self._planner.idle():
            self._log.warning(
                "Collection %r will stay empty: %s has no tensors for it. Select some with include(), "
                "or save them with save_tensor().",
                name,
                framework,
            )
        for name in self._planner.unsaved():
            self._log.warning(
                "Collection %r is not in include_collections: nothing is saved because of it.", name
            )

    def warn_of_idle_schedules(self) -> None:
        """Warn of schedules that are never due.

        Only the schedules of the first step count: later a script may change one to stop saving.
        """
        if self._checked_schedules:
            return
        self._checked_schedules = True
        for schedule, names in self._planner.never_due().items():
            self._errors.warn_once(
                f"Collections {', '.join(names)} will never be saved: no multiple of save_interval="
                f"{schedule.save_interval} lies in [start_step={schedule.start_step}, "
                f"end_step={schedule.end_step}). Raise end_step or lower save_interval."
            )

    def warn_of_unmatched_patterns(self) -> None:
        for name, patterns in self._planner.unmatched().items():
            for pattern in patterns:
                self._errors.warn_once(
                    f"include_regex {pattern!r} of collection {name!r} matched no tensor and saved "
                    "nothing. Compare it with trial.tensor_names()."
                )
