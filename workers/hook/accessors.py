"""What a script can ask a hook: its settings, collections, steps and counts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from typing_extensions import Self

from smdist.config import CollectionManager
from smdist.config.collection import Collection, CollectionKeys
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.identity import ModeKeys
from smdist.workers.capture.capture import Usage
from smdist.workers.hook.core import HookCore

__all__ = ["HookAccessors"]

T = TypeVar("T")

_REGISTER = "call hook.register_module(module) instead"
_PROFILING = "smdist does not profile; use torch.profiler"
# What smdebug's hooks have and ours have not, and what to do instead.
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


class HookAccessors(Generic[T]):
    """What a hook can be asked, in smdebug's words where it had them. All answers are the core's."""

    _core: HookCore[T]

    # A model that has the hook as an attribute may be copied: its copies share the hook.
    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    # -- collections --------------------------------------------------------------------------

    def get_collection(self, name: str, create: bool = True) -> Collection:
        """Return the collection of that name; changes to it hold from the next step.

        A missing one is created, or with `create=False` an error.
        """
        return self._core.manager.get(name, create)

    def get_collections(self) -> dict[str, Collection]:
        return self._core.manager.get_collections()

    def add_collection(self, collection: Collection | str) -> None:
        self._core.manager.add(collection)

    @property
    def collection_manager(self) -> CollectionManager:
        return self._core.manager

    # -- as it was configured -----------------------------------------------------------------

    @property
    def save_config(self) -> SaveConfig:
        return self._core.config.save_config

    @property
    def reduction_config(self) -> ReductionConfig:
        return self._core.config.reduction_config

    @property
    def include_collections(self) -> tuple[str, ...]:
        """Return the collections that are saved, including those that always are."""
        return self._core.config.active_collections

    @property
    def include_regex(self) -> tuple[str, ...]:
        return self._core.config.include_regex

    @property
    def save_all(self) -> bool:
        return self._core.config.save_all

    @property
    def dry_run(self) -> bool:
        return self._core.config.dry_run

    @property
    def tensorboard_dir(self) -> str | None:
        return self._core.config.tensorboard_dir

    def has_default_hook_configuration(
        self, default_saved_collections: Iterable[str] | None = None
    ) -> bool:
        """Check whether only the given collections, or those that always are, are saved."""
        always = self._core.config.framework.always
        given = always if default_saved_collections is None else default_saved_collections
        return set(self._core.planner.active()) == set(given)

    def has_default_configuration(self) -> bool:
        return self.has_default_hook_configuration()

    # -- questions ----------------------------------------------------------------------------

    def should_save_tensor_or_collection(self, tensor_name: str, collection_name: str) -> bool:
        """Check whether a tensor of that name is saved in the current step, due to any collection.

        A gradient may be given by the name of its parameter. False before the first step.
        """
        core = self._core
        mode = core.clock.mode
        step = core.clock.mode_steps[mode]
        if step < 0 or not core.active:
            return False
        plan = core.planner.at(mode, step)
        names = [tensor_name]
        if collection_name == CollectionKeys.GRADIENTS:
            names.append(f"gradient/{tensor_name}")
        if any(plan.wants(name) is not None for name in names):
            return True
        # Tensors are put into such a collection by hand: no pattern says which.
        return collection_name in plan.due and core.manager.get(collection_name).selects_nothing

    @property
    def out_dir(self) -> str:
        return self._core.config.out_dir

    @property
    def worker(self) -> str:
        """Return the name of this worker; it may change until something is saved."""
        return self._core.worker

    @property
    def mode(self) -> ModeKeys:
        return self._core.clock.mode

    @property
    def mode_steps(self) -> dict[ModeKeys, int]:
        """Return the last step that began, by mode; -1 where none did."""
        return self._core.clock.mode_steps

    @property
    def global_step(self) -> int:
        return self._core.clock.step

    @property
    def logger(self) -> logging.Logger:
        return self._core.log

    if not TYPE_CHECKING:  # else a type checker would let any misspelt name pass

        def __getattr__(self, name: str) -> object:
            remedy = f"; {_ABSENT[name]}" if name in _ABSENT else ""
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{remedy}")

    @property
    def errors(self) -> int:
        """Return how many errors of smdist itself were counted instead of raised."""
        return self._core.errors.count

    def usage(self) -> Usage | None:
        """Return bytes and steps captured, stored and dropped; None while nothing was saved."""
        capture = self._core.session.capture
        return None if capture is None else capture.usage()
