"""What a Keras hook does with the models it sees: which step is which, and what is captured of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from smdist.collection import CollectionKeys
from smdist.config import CollectionManager
from smdist.identity import ModeKeys
from smdist.planning import Planner, StepPlan
from smdist.workers.keras_functions import StepFunction
from smdist.workers.keras_lanes import Lanes
from smdist.workers.keras_names import NamedVariable, Names
from smdist.workers.keras_phase import Phase
from smdist.workers.keras_taps import Taps, Wants, wants_of
from smdist.workers.mishaps import Mishaps
from smdist.workers.recorder import Recorder
from smdist.workers.steps import StepClock
from smdist.workers.tf_host import Array, array_of, is_variable, tf_variable

__all__ = ["Recording"]

_RESULTS = {CollectionKeys.LOSSES, CollectionKeys.METRICS, CollectionKeys.SM_METRICS}
_LOSSES = ("loss", "val_loss")


class Recording:
    def __init__(
        self,
        clock: StepClock,
        planner: Planner,
        manager: CollectionManager,
        recorder: Recorder[Array],
        mishaps: Mishaps,
        attend: Callable[[], None],
        enter: Callable[[ModeKeys], bool],
        synced: bool,
    ) -> None:
        """`attend` and `enter` are the hook's: a step began; the coming ones are of a mode.
        `synced`: gradients are wanted as they are after their reduction."""
        self.synced = synced
        self._clock, self._planner, self._manager = clock, planner, manager
        self._mishaps, self._attend, self.enter = mishaps, attend, enter
        self.lanes = Lanes(recorder)
        self._recorder = recorder
        self.optimizers: list[Any] = []  # besides the model's own
        self._names: dict[int, Names] = {}
        self._functions: dict[tuple[int, str, Wants | None], tuple[Any, StepFunction]] = {}
        self._wants: dict[tuple[StepPlan, int], Wants] = {}
        self._model: Any = None  # of the phase that runs
        self._registered: Any = None

    # -- models -------------------------------------------------------------------------------

    def phase_begins(self, model: Any) -> None:
        self._model = model
        self.bind()

    def register(self, model: Any) -> None:
        """`model` is trained by a loop of the script's own."""
        self._model = self._registered = model

    def registered_names(self) -> Names | None:
        model = self._registered
        return self.names(model) if model is not None and model.built else None

    # -- steps --------------------------------------------------------------------------------

    def due_within(self, steps: int) -> bool:
        """Is any of the coming `steps` due?"""
        coming = self._clock.mode_step + 1
        try:
            return self._planner.next_due(self._clock.mode, coming) < coming + steps
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, "looking what is due")
            return False

    def passed(self, steps: int) -> None:
        for _ in range(steps):
            self.begin()

    def begin(self) -> None:
        """A step begins; on a due one that captures weights."""
        if self._clock.forward():
            self._attend()

    def close(self) -> None:
        if self._recorder.recording:
            self.lanes.close()

    def wants_results_only(self, model: Any) -> bool:
        """Can Keras run the coming step, which is due, by itself?"""
        try:
            plan = self._planner.at(self._clock.mode, self._clock.mode_step + 1)
            if not model.built:
                return set(plan.due) <= _RESULTS
            names = self.names(model)
            if any(self.wants(plan, names)):
                return False
            return not any(
                plan.wants(named.name) is not None for named in self._all_variables(names)
            )
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, "looking at the model")
            return True

    def build(self, model: Any, batch: Any) -> None:
        """Make the weights of a model that gets them with its first batch: they are those that its
        first step starts with."""
        if model.built:
            return
        strategy = model.distribute_strategy
        try:
            inputs = batch[0] if isinstance(batch, tuple) else batch
            one = tf.nest.map_structure(
                lambda value: strategy.experimental_local_results(value)[0][:1], inputs
            )
            with strategy.scope():
                model(one)
        except Exception as error:  # noqa: BLE001 (the step itself will tell)
            self._mishaps.trouble(f"the weights of {model.name} before its first step: {error}")

    @contextmanager
    def without_variables(self) -> Iterator[None]:
        model, self._model = self._model, None
        try:
            yield
        finally:
            self._model = model

    def save_variables(self) -> None:
        """The step has begun: what it starts with."""
        model = self._model
        plan = self._recorder.plan
        if model is None or plan is None or not model.built:
            return
        names = self.names(model)
        named = [n for n in self._all_variables(names) if plan.wants(n.name) is not None]
        strategy = model.distribute_strategy
        values = [strategy.experimental_local_results(tf_variable(n.variable)) for n in named]
        self.lanes.offer(tuple(n.name for n in named), values, array_of)

    def _all_variables(self, names: Names) -> list[NamedVariable]:
        kind = "train" if self._clock.mode is ModeKeys.TRAIN else "other"
        return [*names.variables, *self.optimizer_variables(names, kind)]

    def optimizer_variables(self, names: Names, kind: str) -> list[NamedVariable]:
        if kind != "train":
            return []
        optimizer = getattr(names.model, "optimizer", None)
        return [] if optimizer is None else names.optimizer_variables(optimizer)

    # -- the inside of a step -----------------------------------------------------------------

    def run(self, phase: Phase, batch: Any) -> Any:
        model, kind = phase.model, phase.kind
        plan = self._recorder.plan
        if plan is None:
            return self._function(phase, None)(batch)[0]
        wants: Wants | None = self.wants(plan, self.names(model))
        function = self._function(phase, wants if wants is not None and any(wants) else None)
        try:
            result, seen = function(batch)
        except Exception as error:
            if function.traced or function.eager:
                raise
            # Nothing has run yet. Is it the step itself that cannot be traced, or our part in it?
            result, seen = self._function(phase, None)(batch)
            self._mishaps.handle(error, f"looking into the {kind} step of {model.name}")
        self._save(seen)
        return result

    def _save(self, seen: dict[str, tuple[Any, ...]]) -> None:
        try:
            self.lanes.offer(tuple(seen), list(seen.values()), array_of)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, f"capturing step {self._clock.step}")

    def _function(self, phase: Phase, wants: Wants | None) -> StepFunction:
        model = phase.model
        key = (id(model), phase.kind, wants)
        basis, function = self._functions.get(key, (None, None))
        # Keras makes its function anew when the model is compiled again, and so do we.
        if function is None or basis is not phase.original:
            taps = None
            if wants is not None:
                taps = Taps(self.names(model), wants, self._mishaps, self.synced)
            function = StepFunction(model, phase.kind, taps, lambda: self.optimizers_of(model))
            self._functions[key] = phase.original, function
        return function

    def optimizers_of(self, model: Any) -> list[Any]:
        own = getattr(model, "optimizer", None)
        found = [own, *self.optimizers]
        return list({id(o): o for o in found if o is not None}.values())

    @property
    def traces(self) -> int:
        """How often a function of ours was traced."""
        return sum(function.traces for _, function in self._functions.values())

    # -- results ------------------------------------------------------------------------------

    def save_results(self, kind: str, result: Any) -> None:
        """Losses and metrics, as Keras returns them for a step."""
        plan = self._recorder.plan
        if plan is None or kind == "predict" or not isinstance(result, dict):
            return
        try:
            found = dict(_flat(result))
            self.know_metrics(found)
            self.lanes.offer(tuple(found), [(value,) for value in found.values()], array_of)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, f"capturing step {self._clock.step}")

    def know_metrics(self, names: Iterable[str]) -> None:
        metrics = self._manager.get(CollectionKeys.METRICS)
        for name in names:
            if name not in _LOSSES and not metrics.has_tensor_name(name):
                metrics.add_tensor_name(name)

    # -- names --------------------------------------------------------------------------------

    def names(self, model: Any) -> Names:
        names, now = self._names.get(id(model)), self._clock.step
        # To go through a model takes as long as a small step: once in a step is enough.
        if names is None or (names.looked_at != now and not names.current):
            names = self._names[id(model)] = Names(model)
            self._wants.clear()
            self._functions = {k: f for k, f in self._functions.items() if k[0] != id(model)}
            self.bind()
        names.looked_at = now
        return names

    def wants(self, plan: StepPlan, names: Names) -> Wants:
        key = (plan, id(names))
        found = self._wants.get(key)
        if found is None:
            found = self._wants[key] = wants_of(plan, names)
        return found

    def bind(self) -> None:
        """Answer collections that asked for a layer's tensors or for a variable."""
        for collection in self._manager.get_collections().values():
            for request in collection.unbound_requests:
                for names in self._names.values():
                    patterns = _patterns(names, request.target, request.inputs, request.outputs)
                    if patterns:
                        collection.bind(request, patterns)
                        break

    # -- changes and end ----------------------------------------------------------------------

    def forget(self) -> None:
        """The configuration changed."""
        self._wants.clear()
        self.lanes.forget()

    def uninstall(self) -> None:
        self._functions.clear()
        self._names.clear()
        self._wants.clear()
        self.optimizers.clear()
        self._model = self._registered = None


def _patterns(names: Names, target: Any, inputs: bool, outputs: bool) -> list[str]:
    if is_variable(target):
        path = names.path_of(target)
        found = [n.name for n in names.variables if n.path == path]
        return [f"^{re.escape(name)}$" for name in found]
    path = names.layer_path(target)
    if path is None:
        return []
    sides = [side for side, wanted in (("inputs", inputs), ("outputs", outputs)) if wanted]
    return [rf"^{re.escape(path)}/{side}(_\d+)?$" for side in sides]


def _flat(result: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in result.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}_")
        elif tf.is_tensor(value) or isinstance(value, (int, float)):
            yield f"{prefix}{key}", value
