"""What a Keras hook captures of each step, and under which step it is saved.

`Phase` and the step strategies call it on the training thread, `InGraphStep` also on a thread of
TensorFlow while the training thread waits for the step. For each step:

    enter(mode)                 the mode of the next steps; False: the hook is closed
    begin(model)                the step begins; on a due step its variables are captured
    save_seen, save_results     what probes saw; losses and metrics that Keras returned
    close()                     the step is complete

Values go to `Replicas`, one recorder for each replica of this process. An error goes to the error
policy of the hook and never reaches the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from smdist.config.collection import CollectionKeys
from smdist.identity import ModeKeys
from smdist.planning import StepPlan
from smdist.workers.hook.core import HookCore
from smdist.workers.keras_adapter.capture_set import (
    NOTHING,
    AnyStep,
    CaptureSet,
    capture_set_of,
    select_stage,
    with_stage,
)
from smdist.workers.keras_adapter.model_building import is_built, is_only_marked_built
from smdist.workers.keras_adapter.model_cache import ModelCache
from smdist.workers.keras_adapter.replicas import Replicas
from smdist.workers.keras_adapter.variable_names import NamedVariable, VariableNames, all_optimizers
from smdist.workers.tf_adapter.tensor_access import Array, array_of, is_variable, tf_variable

__all__ = ["KerasRecording"]

_RESULTS = {CollectionKeys.LOSSES, CollectionKeys.METRICS, CollectionKeys.SM_METRICS}
_LOSSES = ("loss", "val_loss")


class _ModelFacts:
    def __init__(self) -> None:
        self.names: VariableNames | None = None
        self.wanted: dict[StepPlan, CaptureSet] = {}


class KerasRecording:
    """The steps of one hook, over all its models."""

    def __init__(self, core: HookCore[Array]) -> None:
        self.core, self.errors = core, core.errors
        self._clock, self._planner, self._recorder = core.clock, core.planner, core.recorder
        self.synced = core.config.stage_gradients == "synced"  # gradients after their reduction
        self.replicas = Replicas(core.recorder, core.errors.warn_once)
        self.optimizers: list[Any] = []  # wrapped by the script, besides those of models
        self._models = ModelCache(_ModelFacts)
        self._model: Any = None  # whose variables are captured as the script begins a step
        self._registered: Any = None

    # -- models -------------------------------------------------------------------------------

    def use_model(self, model: Any) -> None:
        """Capture the variables of `model` with steps that the script begins itself."""
        self._model = model
        self.bind_requests()

    def register(self, model: Any) -> None:
        """Note that a loop of the script trains `model`."""
        self._model = self._registered = model

    def registered_names(self) -> VariableNames | None:
        model = self._registered
        return self.names(model) if model is not None and is_built(model) else None

    # -- steps --------------------------------------------------------------------------------

    def enter(self, mode: ModeKeys) -> bool:
        """Set the mode of the next steps; return False if the hook is closed."""
        if self.core.active:
            self.core.set_mode(mode)
        return self.core.active

    def due_within(self, steps: int) -> bool:
        """Check whether any of the next `steps` is due."""
        first = self._clock.mode_step + 1
        try:
            return self._planner.next_due(self._clock.mode, first) < first + steps
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self.errors.on_exception(error, "looking what is due")
            return False

    def count(self, steps: int) -> None:
        """Count steps that have run; the variables they started with are not known any more."""
        for _ in range(steps):
            self.begin()

    def count_with_result(self, steps: int, kind: str, result: Any) -> None:
        """Count the steps of one execution; save its one result at the last of them that is due."""
        for left in reversed(range(steps)):
            self.begin()
            if self._recorder.recording and not self.due_within(left):
                self.save_results(kind, result)
                self.close()

    def begin(self, model: Any = None) -> None:
        """Begin a step. On a due one, capture the variables of `model`, if it is given."""
        before, self._model = self._model, model
        try:
            if self._clock.forward():
                self.core.on_step_start()
        finally:
            self._model = before

    def close(self) -> None:
        if self._recorder.recording:
            self.replicas.close()

    def wants_results_only(self, model: Any) -> bool:
        """Check whether Keras' own function gives all that the next step, which is due, wants."""
        try:
            plan = self.next_plan
            if not is_built(model) or is_only_marked_built(model):
                return set(plan.due) <= _RESULTS
            names = self.names(model)
            if any(self.wanted(plan, names)):
                return False
            variables = self.variables(names, self._kind)
            return not any(plan.wants(named.name) is not None for named in variables)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self.errors.on_exception(error, "looking at the model")
            return True

    @property
    def next_plan(self) -> StepPlan:
        """The plan of the next step, which is due."""
        return self._planner.at(self._clock.mode, self._clock.mode_step + 1)

    # -- variables ----------------------------------------------------------------------------

    def save_variables(self) -> None:
        """Save the values that the step which has begun starts with."""
        model = self._model
        plan = self._recorder.plan
        if model is None or plan is None or not is_built(model):
            return
        variables = self.variables(self.names(model), self._kind)
        named = [n for n in variables if plan.wants(n.name) is not None]
        strategy = model.distribute_strategy
        values = [strategy.experimental_local_results(tf_variable(n.variable)) for n in named]
        self.replicas.offer(tuple(n.name for n in named), values, array_of)

    def variables(self, names: VariableNames, kind: str) -> list[NamedVariable]:
        """Return the variables of a model and, in training steps, those of its optimizers."""
        if kind != "train":
            return names.variables
        kept = names.variables_of(all_optimizers(names.model, self.optimizers))
        return [*names.variables, *kept]

    @property
    def _kind(self) -> str:
        return "train" if self._clock.mode is ModeKeys.TRAIN else "other"

    # -- what is wanted -----------------------------------------------------------------------

    @property
    def only_results(self) -> bool:
        """Whether no step wants more than Keras' own function returns."""
        return set(self._planner.active()) <= _RESULTS

    def wanted_now(self, model: Any) -> CaptureSet:
        """Return what the step that has begun wants of its inside."""
        plan = self._recorder.plan
        if plan is None:
            return NOTHING
        try:
            return self.wanted(plan, self.names(model))
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self.errors.on_exception(error, "looking at the model")
            return NOTHING

    def wanted(self, plan: StepPlan, names: VariableNames) -> CaptureSet:
        cached = self._models.of(names.model).wanted
        found = cached.get(plan)
        if found is None:
            found = cached[plan] = with_stage(capture_set_of(plan, names), self.synced)
        return found

    def wanted_on_any_step(self, names: VariableNames, kind: str) -> CaptureSet:
        wanted = with_stage(capture_set_of(AnyStep(self._planner), names), self.synced)
        if kind != "train":
            wanted = wanted._replace(gradients=frozenset(), synced=frozenset())
        return wanted

    def wanted_anywhere(self, name: str) -> bool:
        """Check whether any step wants the tensor of that name."""
        return self._planner.wanted_anywhere(name)

    def may_want_gradients(self, model: Any) -> bool:
        if not is_built(model):
            return CollectionKeys.GRADIENTS in self._planner.active()
        wanted = self.wanted_on_any_step(self.names(model), "train")
        return bool(wanted.gradients or wanted.synced)

    # -- results ------------------------------------------------------------------------------

    def save_seen(self, seen: dict[str, tuple[Any, ...]]) -> None:
        """Save what this hook wants of what probes saw, which may be more."""
        try:
            found = select_stage(seen, self.synced)
            self.replicas.offer(tuple(found), list(found.values()), array_of)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self.errors.on_exception(error, f"step {self._clock.step}")

    def save_results(self, kind: str, result: Any) -> None:
        """Save losses and metrics, as Keras returns them for a step."""
        plan = self._recorder.plan
        if plan is None or kind == "predict" or not isinstance(result, dict):
            return
        try:
            found = dict(_flat(result))
            self.add_metrics(found)
            self.replicas.offer(tuple(found), [(value,) for value in found.values()], array_of)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self.errors.on_exception(error, f"step {self._clock.step}")

    def add_metrics(self, names: Iterable[str]) -> None:
        """Add `names`, except losses, to the collection of metrics."""
        metrics = self.core.manager.get(CollectionKeys.METRICS)
        for name in names:
            if name not in _LOSSES and not metrics.has_tensor_name(name):
                metrics.add_tensor_name(name)

    # -- names --------------------------------------------------------------------------------

    def names(self, model: Any, *, refresh: bool = False) -> VariableNames:
        """Return the names of `model`, checked once in a step or when `refresh` asks for it.

        Going through a model takes as long as a small step.
        """
        facts, now = self._models.of(model), self._clock.step
        names = facts.names
        if names is None or ((refresh or names.checked_at != now) and not names.current):
            names = facts.names = VariableNames(model)
            facts.wanted.clear()
            self.bind_requests()
        names.checked_at = now
        return names

    def all_names(self) -> list[VariableNames]:
        return [facts.names for facts in self._models if facts.names is not None]

    def bind_requests(self) -> None:
        """Bind collections that asked for a layer or a variable to the names it has in a model."""
        for collection in self.core.manager.get_collections().values():
            for request in collection.unbound_requests:
                for names in self.all_names():
                    patterns = _patterns(names, request.target, request.inputs, request.outputs)
                    if patterns:
                        collection.bind(request, patterns)
                        break

    # -- changes and end ----------------------------------------------------------------------

    def wrap(self, optimizer: Any) -> None:
        if all(known is not optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)

    def on_config_change(self) -> None:
        for facts in self._models:
            facts.wanted.clear()
        self.replicas.on_config_change()

    def uninstall(self) -> None:
        self.replicas.abandon()
        self._recorder.abandon()  # the step may go on, but nothing more is wanted of it
        self._models.clear()
        self.optimizers.clear()
        self._model = self._registered = None


def _patterns(names: VariableNames, target: Any, inputs: bool, outputs: bool) -> list[str]:
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
        elif tf.is_tensor(value) or isinstance(value, (int, float, np.generic, np.ndarray)):
            yield f"{prefix}{key}", value
