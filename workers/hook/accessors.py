"""What a hook is made of, and what it can be asked. Framework-neutral."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from typing_extensions import Self

from smdist.config import CollectionManager, HookConfig
from smdist.config.collection import Collection, CollectionKeys
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.identity import ModeKeys, worker_name
from smdist.planning import Planner
from smdist.workers.capture.capture import Usage
from smdist.workers.hook import lifecycle
from smdist.workers.hook.capture_session import CaptureSession, Sink
from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.hook.overhead_controller import OverheadController
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.hook.recorder import Recorder
from smdist.workers.hook.step_clock import StepClock
from smdist.workers.hook.user_values import TensorAdapter, UserValues
from smdist.workers.spool.logs import logger

__all__ = ["HookParts"]

T = TypeVar("T")

_REGISTER = "call hook.register_module(module) instead"
_PROFILING = "smdist does not profile; torch.profiler does"
# What hooks of the ancestor have and ours have not, and what to do about it.
_ABSENT: Final[Mapping[str, str]] = {
    "backward_hook": _REGISTER,
    "bhook": _REGISTER,
    "fhook": _REGISTER,
    "forward_hook": _REGISTER,
    "forward_pre_hook": _REGISTER,
    "export_collections": "they are stored by themselves, see trial.collections()",
    "last_saved_step": "steps are stored while training goes on, see hook.usage() and trial.steps()",
    "log_outstanding_backward_stats_and_reset": _PROFILING,
    "log_outstanding_forward_stats_and_reset": _PROFILING,
    "log_outstanding_timeline_metrics": _PROFILING,
    "log_trace_event": _PROFILING,
    "record_trace_events": _PROFILING,
    "reset_backward_module_profile_stats": _PROFILING,
    "reset_forward_module_profile_stats": _PROFILING,
    "should_save_dataloader_metrics": _PROFILING,
}


class HookParts(Generic[T]):
    def _put_together(
        self,
        config: HookConfig,
        reading: TensorAdapter[T],
        collection_type: type[Collection],
        where: ProcessSettings,
        silent: bool,
    ) -> None:
        self._config = config
        self._log = logger()
        self._active = (
            lifecycle.enabled() and not silent
        )  # False once nothing will be saved any more
        self._described = self._introduced = self._told_never_due = False
        self._manager = config.build_manager(collection_type)
        self._planner = Planner(config, self._manager)
        self._clock = StepClock()
        self._errors = ErrorPolicy(config.on_error, self._log)
        self._session: CaptureSession[T] = CaptureSession(
            config, where, reading.access, self._log, self._errors.warn_once
        )
        self._recorder: Recorder[T] = Recorder(reading.describe)
        self._overhead: OverheadController | None = None
        if config.overhead_budget is not None:
            self._recorder.metered = True
            self._overhead = OverheadController(
                config.overhead_budget, lambda: self._recorder.spent_s
            )
        self._values = UserValues(
            reading,
            self._clock,
            self._planner,
            self._recorder,
            self._sink,
            self._errors.warn_once,
        )

    def _sink(self) -> Sink[T] | None:
        raise NotImplementedError

    # A model that has the hook as an attribute may be copied (an average of its weights, a snapshot);
    # there is one hook in a process all the same.
    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    # -- collections --------------------------------------------------------------------------

    def get_collection(self, name: str, create: bool = True) -> Collection:
        """The collection of that name, created if it is missing; changes hold from the next step."""
        return self._manager.get(name, create)

    def get_collections(self) -> dict[str, Collection]:
        return self._manager.get_collections()

    def add_collection(self, collection: Collection | str) -> None:
        self._manager.add(collection)

    @property
    def collection_manager(self) -> CollectionManager:
        return self._manager

    # -- as it was configured -----------------------------------------------------------------

    @property
    def save_config(self) -> SaveConfig:
        return self._config.save_config

    @property
    def reduction_config(self) -> ReductionConfig:
        return self._config.reduction_config

    @property
    def include_collections(self) -> tuple[str, ...]:
        """The collections that are saved, those that always are among them."""
        return self._config.active_collections

    @property
    def include_regex(self) -> tuple[str, ...]:
        return self._config.include_regex

    @property
    def save_all(self) -> bool:
        return self._config.save_all

    @property
    def dry_run(self) -> bool:
        return self._config.dry_run

    @property
    def tensorboard_dir(self) -> str | None:
        return self._config.tensorboard_dir

    def has_default_hook_configuration(
        self, default_saved_collections: Iterable[str] | None = None
    ) -> bool:
        """Is nothing saved but the given collections, or those that always are?"""
        always = self._config.framework.always
        given = always if default_saved_collections is None else default_saved_collections
        return set(self._planner.active()) == set(given)

    def has_default_configuration(self) -> bool:
        return self.has_default_hook_configuration()

    # -- questions ----------------------------------------------------------------------------

    def should_save_tensor_or_collection(self, tensor_name: str, collection_name: str) -> bool:
        """Is a tensor of that name saved in the current step, because of that collection or another?

        A gradient may be asked for by the name of its parameter. False before the first step.
        """
        mode, step = self._clock.mode, self._clock.mode_steps[self._clock.mode]
        if step < 0 or not self._active:
            return False
        plan = self._planner.at(mode, step)
        names = [tensor_name]
        if collection_name == CollectionKeys.GRADIENTS:
            names.append(f"gradient/{tensor_name}")
        if any(plan.wants(name) is not None for name in names):
            return True
        # Tensors are put into it by hand: it says nothing of their names.
        return collection_name in plan.due and self._manager.get(collection_name).selects_nothing

    @property
    def out_dir(self) -> str:
        return self._config.out_dir

    @property
    def worker(self) -> str:
        """Which worker this process is; may change until something is saved."""
        return worker_name(self._session.identity.rank)

    @property
    def mode(self) -> ModeKeys:
        return self._clock.mode

    @property
    def mode_steps(self) -> dict[ModeKeys, int]:
        """The last step that began, by mode; -1 where none did."""
        return self._clock.mode_steps

    @property
    def global_step(self) -> int:
        return self._clock.step

    @property
    def logger(self) -> logging.Logger:
        return self._log

    if not TYPE_CHECKING:  # else a type checker would let any misspelt name pass

        def __getattr__(self, name: str) -> object:
            remedy = f"; {_ABSENT[name]}" if name in _ABSENT else ""
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{remedy}")

    @property
    def errors(self) -> int:
        """How many errors of smdist's own this job was not bothered with."""
        return self._errors.count

    def usage(self) -> Usage | None:
        """Bytes and steps captured, stored and dropped; None while nothing was saved."""
        capture = self._session.capture
        return None if capture is None else capture.usage()
