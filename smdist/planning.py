"""Decide which steps are due, and which tensors to save in which form. Pure: no I/O, no framework.

The hook makes these calls, all on the training thread:

    subscribe(callback)          once; `callback()` runs after every change of the configuration
    wanted_anywhere(name)        when it installs framework hooks
    next_due(mode, mode_step)    kept as one integer per mode until the callback runs
    at(mode, mode_step)          on a due step; steps with the same due collections get the same
                                 StepPlan object, so it is a key for caches
    plan.wants(name)             per tensor: a dictionary lookup after the first time

A tensor is saved when any active collection that contains it is due. It is saved raw if one of these
saves raw, and with the reductions of all of them. Scalar collections are always saved raw. In EVAL and
PREDICT, gradients and optimizer variables are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from smdist.config import CollectionManager, HookConfig
from smdist.config.collection import SCALAR_COLLECTIONS, Collection, CollectionKeys, compile_regex
from smdist.config.schedule import NEVER, Schedule
from smdist.errors import InvalidCollectionConfiguration
from smdist.identity import ModeKeys
from smdist.messages import encodable

__all__ = ["NEVER", "Planner", "StepPlan", "TensorPlan"]

_INFERENCE_MODES: Final = (ModeKeys.EVAL, ModeKeys.PREDICT)
_REDUCTIONS_FOR_RAW: Final = frozenset({"min", "max", "mean", "std", "l2"})
_BUILT_IN_NAMES: Final = frozenset(
    value for key, value in vars(CollectionKeys).items() if not key.startswith("_")
)


class TensorPlan(msgspec.Struct, frozen=True):
    """What to save of a tensor. Neither raw nor reductions: only its shape.

    `collections` are all collections that contain it, due or not, sorted.
    """

    raw: bool
    reductions: frozenset[str]
    collections: tuple[str, ...]


class StepPlan:
    """The tensors to save on steps of `mode` on which exactly the collections `due` are due."""

    __slots__ = ("_plans", "_reduced", "_resolve", "due", "mode")

    def __init__(
        self,
        mode: ModeKeys,
        due: tuple[str, ...],
        resolve: Callable[[str, ModeKeys, tuple[str, ...]], TensorPlan | None],
    ) -> None:
        self.mode, self.due = mode, due
        self._resolve = resolve
        self._plans: dict[str, TensorPlan | None] = {}
        self._reduced: StepPlan | None = None

    @property
    def reduced(self) -> StepPlan:
        """Return the plan that saves statistics instead of raw tensors, except for scalars."""
        if self._reduced is None:
            self._reduced = StepPlan(self.mode, self.due, self._without_raw)
        return self._reduced

    def _without_raw(self, name: str, mode: ModeKeys, due: tuple[str, ...]) -> TensorPlan | None:
        plan = self.wants(name)
        if plan is None or not plan.raw or not SCALAR_COLLECTIONS.isdisjoint(plan.collections):
            return plan
        return TensorPlan(False, plan.reductions | _REDUCTIONS_FOR_RAW, plan.collections)

    def wants(self, name: str) -> TensorPlan | None:
        try:
            return self._plans[name]
        except KeyError:
            plan = self._plans[name] = self._resolve(name, self.mode, self.due)
            return plan


class Planner:
    """The decisions for one hook, cached until the configuration changes."""

    def __init__(self, config: HookConfig, manager: CollectionManager) -> None:
        self._config, self._manager = config, manager
        self._callbacks: list[Callable[[], None]] = []
        self._validated = False
        self._were_due: set[str] = set()  # collections that were due when a tensor was looked up
        self._looked_up: set[str] = set()  # tensors that were looked up before the last change
        self._members: dict[str, tuple[str, ...]] = {}
        built_in = manager.framework.collections
        training_only = sorted(manager.framework.training_only & built_in.keys())
        self._training_only = [compile_regex(p) for name in training_only for p in built_in[name]]
        self._reset()
        manager.watch(self)

    # -- changes -----------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` after every change of the configuration; return a function that stops it."""
        self._callbacks.append(callback)

        def end() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return end

    def changed(self) -> None:
        self._reset()
        for callback in tuple(self._callbacks):
            callback()

    def _reset(self) -> None:
        self._active: dict[str, Collection] | None = None
        self._schedules: dict[ModeKeys, tuple[tuple[str, Schedule], ...]] = {}
        self._due_spans: dict[ModeKeys, tuple[int, int]] = {}
        self._step_plans: dict[tuple[ModeKeys, tuple[str, ...]], StepPlan] = {}
        self._last: tuple[ModeKeys, int, StepPlan] | None = None
        self._looked_up.update(self._members)
        self._members = {}
        self._anywhere: dict[str, bool] = {}
        self._explicit: dict[tuple[str, tuple[str, ...]], TensorPlan] = {}

    # -- which collections -------------------------------------------------------------------

    def prepare(self) -> None:
        """Check the collections once the script has configured them.

        Raises InvalidCollectionConfiguration for a custom collection that selects nothing. Also
        called by the first `next_due`.
        """
        collections = self._manager.get_collections()
        included = self._config.active_collections
        for name in (*collections, *included):
            if name in _BUILT_IN_NAMES or self._manager.is_manual(name):
                continue
            if name not in collections or collections[name].selects_nothing:
                raise InvalidCollectionConfiguration(
                    name, name in included, _BUILT_IN_NAMES | collections.keys() - {name}
                )
        self._validated = True

    def active(self) -> dict[str, Collection]:
        """Return the collections that are saved."""
        if self._active is None:
            names = self._config.active_collections
            everything = CollectionKeys.ALL in names
            self._active = {
                name: collection
                for name, collection in self._manager.get_collections().items()
                if everything or name in names
            }
        return self._active

    def idle(self) -> tuple[str, ...]:
        """Return requested collections that have no tensors in this framework, for a warning.

        Collections that were switched off or not requested are not included.
        """
        due = {
            name
            for mode in ModeKeys
            for name, schedule in self._in_mode(mode)
            if schedule.next_due(0) != NEVER
        }
        collections = self._manager.get_collections()
        return tuple(
            name
            for name in self._config.active_collections
            if name not in collections or (name in due and collections[name].selects_nothing)
            if name not in self._manager.framework.always
        )

    def never_due(self) -> dict[Schedule, tuple[str, ...]]:
        """Return schedules without any step, and their collections, for a warning.

        Schedules that were switched off with `end_step=0` are not included.
        """
        found: dict[Schedule, dict[str, None]] = {}
        for mode in ModeKeys:
            for name, schedule in self._in_mode(mode):
                if schedule.end_step and schedule.next_due(0) == NEVER:
                    found.setdefault(schedule, {})[name] = None
        return {schedule: tuple(names) for schedule, names in found.items()}

    def unsaved(self) -> tuple[str, ...]:
        """Return custom collections that select tensors but are not saved, for a warning."""
        return tuple(
            name
            for name, collection in self._manager.get_collections().items()
            if name not in self.active()
            and name not in _BUILT_IN_NAMES
            and not collection.selects_nothing
        )

    def unmatched(self) -> dict[str, tuple[str, ...]]:
        """Return custom patterns that matched no tensor, by due collection, for a final warning."""
        asked, built_in = (
            self._looked_up | self._members.keys(),
            self._manager.framework.collections,
        )
        found = {
            name: tuple(
                pattern
                for pattern in dict.fromkeys(collection.include_regex)
                if pattern not in built_in.get(name, ())
                and not any(map(compile_regex(pattern).search, asked))
            )
            for name, collection in self.active().items()
            if name in self._were_due
        }
        return {name: patterns for name, patterns in sorted(found.items()) if patterns}

    def _in_mode(self, mode: ModeKeys) -> tuple[tuple[str, Schedule], ...]:
        """Return name and schedule of each collection that can be due in `mode`."""
        found = self._schedules.get(mode)
        if found is None:
            skipped = self._manager.framework.training_only if mode in _INFERENCE_MODES else ()
            found = self._schedules[mode] = tuple(
                (name, collection.save_config.schedule(mode))
                for name, collection in self.active().items()
                if name not in skipped and collection.save_config is not None
            )
        return found

    # -- when --------------------------------------------------------------------------------

    def next_due(self, mode: ModeKeys, mode_step: int) -> int:
        """Return the first step of `mode`, from `mode_step` on, on which anything is due, or NEVER."""
        since, due = self._due_spans.get(mode, (NEVER, -1))
        if since <= mode_step <= due:
            return due
        if not self._validated:
            self.prepare()
        due = min((s.next_due(mode_step) for _, s in self._in_mode(mode)), default=NEVER)
        self._due_spans[mode] = (mode_step, due)
        return due

    def period(self, mode: ModeKeys) -> int:
        """Return the smallest `save_interval` of the collections in `mode`."""
        return min((s.save_interval for _, s in self._in_mode(mode)), default=1)

    def at(self, mode: ModeKeys, mode_step: int) -> StepPlan:
        last = self._last
        if last is not None and last[1] == mode_step and last[0] is mode:
            return last[2]
        due = tuple(name for name, s in self._in_mode(mode) if s.should_save(mode_step))
        plan = self._step_plans.get((mode, due))
        if plan is None:
            plan = self._step_plans[mode, due] = StepPlan(mode, due, self._resolve)
        self._last = (mode, mode_step, plan)
        return plan

    # -- which tensors, and how --------------------------------------------------------------

    def wants(self, name: str, mode: ModeKeys, mode_step: int) -> TensorPlan | None:
        """Return what to save of the tensor on that step; None if nothing."""
        return self.at(mode, mode_step).wants(name)

    def wanted_anywhere(self, name: str) -> bool:
        """Check whether any step of any mode saves this tensor, by the current configuration."""
        found = self._anywhere.get(name)
        if found is None:
            members = self.membership(name)
            found = self._anywhere[name] = any(
                collection in members and schedule.next_due(0) != NEVER
                for mode in ModeKeys
                if not self._skipped(name, mode)
                for collection, schedule in self._in_mode(mode)
            )
        return found

    def membership(self, name: str) -> tuple[str, ...]:
        """Return all collections that contain the tensor, saved or not; `all` only if it is saved."""
        found = self._members.get(name)
        if found is None:
            found = self._members[name] = tuple(sorted(self._matching(name)))
        return found

    def _matching(self, name: str) -> set[str]:
        framework = self._manager.framework
        found = {n for n, c in self._manager.get_collections().items() if c.matches(name)}
        if CollectionKeys.ALL not in self.active():
            found.discard(CollectionKeys.ALL)
        if found & framework.separate:
            kept = framework.separate | {CollectionKeys.ALL, CollectionKeys.DEFAULT}
            # An exact tensor name of a built-in collection overrides the separation.
            found = {
                n
                for n in found
                if n in kept
                or n not in framework.collections
                or self._manager.get(n).has_tensor_name(name)
            }
        return found

    def _skipped(self, name: str, mode: ModeKeys) -> bool:
        return mode in _INFERENCE_MODES and any(p.search(name) for p in self._training_only)

    def _resolve(self, name: str, mode: ModeKeys, due: tuple[str, ...]) -> TensorPlan | None:
        self._were_due.update(due)
        members = self.membership(name)
        asking = [n for n in due if n in members]
        if not asking or self._skipped(name, mode):
            return None
        return self._combined(asking, members)

    def _combined(self, asking: Iterable[str], members: tuple[str, ...]) -> TensorPlan:
        raw, reductions = False, frozenset[str]()
        for name in asking:
            config = self._manager.get(name).reduction_config
            if name in SCALAR_COLLECTIONS or config is None:
                raw = True
                continue
            raw = raw or config.keeps_raw
            reductions |= config.names
        return TensorPlan(raw, reductions, members)

    def explicit(self, name: str, collections: Iterable[str]) -> TensorPlan:
        """Return the plan of a tensor that the script saves itself: raw, and in `collections`.

        Creates collections that do not exist yet.
        """
        asked = tuple(dict.fromkeys(collections))
        known = self._explicit.get((name, asked))
        if known is not None:
            return known
        for collection in asked:
            if collection not in self._manager:
                self._manager.get_manual(collection)
        members = tuple(sorted({*asked, *self.membership(name)}))
        plan = TensorPlan(True, self._combined(asked, members).reductions, members)
        self._explicit[name, asked] = plan
        return plan

    def description(self) -> tuple[dict[str, Any], ...]:
        """Return the current collections as dicts with the fields of `CollectionInfo`."""
        return tuple(
            {
                "name": encodable(name),
                "include_regex": tuple(
                    map(encodable, (*collection.include_regex, *collection.bound_regex))
                ),
                "tensor_names": tuple(sorted(map(encodable, collection.tensor_names))),
                "save_config": collection.save_config.to_dict() if collection.save_config else {},
                "reduction_config": (
                    collection.reduction_config.to_dict() if collection.reduction_config else {}
                ),
            }
            for name, collection in sorted(self._manager.get_collections().items())
        )
