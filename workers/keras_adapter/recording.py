"""What a Keras hook does with the models it sees: which step is which, and what is captured of it.

The functions that let the inside of a step be seen are those of `Inside`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from smdist.config import CollectionManager
from smdist.config.collection import CollectionKeys
from smdist.identity import ModeKeys
from smdist.planning import Planner, StepPlan
from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.hook.recorder import Recorder
from smdist.workers.hook.step_clock import StepClock
from smdist.workers.keras_adapter.model_cache import Models
from smdist.workers.keras_adapter.replicas import Lanes
from smdist.workers.keras_adapter.step_function import is_built
from smdist.workers.keras_adapter.taps import NOTHING, Anywhere, Wants, at_stage, of_stage, wants_of
from smdist.workers.keras_adapter.variable_names import NamedVariable, Names, all_optimizers
from smdist.workers.tf_adapter.tensor_access import Array, array_of, is_variable, tf_variable

__all__ = ["Recording"]

_RESULTS = {CollectionKeys.LOSSES, CollectionKeys.METRICS, CollectionKeys.SM_METRICS}
_LOSSES = ("loss", "val_loss")
_states = count()


class Recording:
    def __init__(
        self,
        clock: StepClock,
        planner: Planner,
        manager: CollectionManager,
        recorder: Recorder[Array],
        errors: ErrorPolicy,
        on_step_start: Callable[[], None],
        enter: Callable[[ModeKeys], bool],
        synced: bool,
    ) -> None:
        """`on_step_start` and `enter` are the hook's: a step began; the coming ones are of a mode.
        `synced`: gradients are wanted as they are after their reduction."""
        self.synced = synced
        self._clock, self._planner, self._manager = clock, planner, manager
        self._errors, self._on_step_start, self.enter = errors, on_step_start, enter
        self.lanes = Lanes(recorder, errors.warn_once)
        self._recorder = recorder
        self.optimizers: list[Any] = []  # besides the model's own
        self.state = next(_states)  # changes with what may be wanted; no other hook ever has it
        self.models = Models()
        self._model: Any = None  # of steps that the script begins itself: that of the phase
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
        return self.names(model) if model is not None and is_built(model) else None

    # -- steps --------------------------------------------------------------------------------

    def due_within(self, steps: int) -> bool:
        """Is any of the coming `steps` due?"""
        coming = self._clock.mode_step + 1
        try:
            return self._planner.next_due(self._clock.mode, coming) < coming + steps
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "looking what is due")
            return False

    def passed(self, steps: int) -> None:
        """They have run: what variables they started with is not known any more."""
        for _ in range(steps):
            self.begin()

    def passed_at_once(self, steps: int, kind: str, result: Any) -> None:
        """One execution had so many steps and one result, which goes to the last that is due."""
        for left in reversed(range(steps)):
            self.begin()
            if self._recorder.recording and not self.due_within(left):
                self.save_results(kind, result)
                self.close()

    def begin(self, model: Any = None) -> None:
        """A step begins; on a due one that captures variables of `model`, if it is given: they are
        what the step starts with."""
        before, self._model = self._model, model
        try:
            if self._clock.forward():
                self._on_step_start()
        finally:
            self._model = before

    def close(self) -> None:
        if self._recorder.recording:
            self.lanes.close()

    def wants_results_only(self, model: Any) -> bool:
        """Can Keras run the coming step, which is due, by itself?"""
        try:
            plan = self.coming_plan
            if not is_built(model):
                return set(plan.due) <= _RESULTS
            names = self.names(model)
            if any(self.wants(plan, names)):
                return False
            variables = self.variables(names, self._kind)
            return not any(plan.wants(named.name) is not None for named in variables)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "looking at the model")
            return True

    @property
    def coming_plan(self) -> StepPlan:
        """Of the coming step, which is due."""
        return self._planner.at(self._clock.mode, self._clock.mode_step + 1)

    # -- variables ----------------------------------------------------------------------------

    def save_variables(self) -> None:
        """The step has begun: what it starts with."""
        model = self._model
        plan = self._recorder.plan
        if model is None or plan is None or not is_built(model):
            return
        variables = self.variables(self.names(model), self._kind)
        named = [n for n in variables if plan.wants(n.name) is not None]
        strategy = model.distribute_strategy
        values = [strategy.experimental_local_results(tf_variable(n.variable)) for n in named]
        self.lanes.offer(tuple(n.name for n in named), values, array_of)

    def variables(self, names: Names, kind: str) -> list[NamedVariable]:
        """Of the model, and in steps of training of its optimizers."""
        if kind != "train":
            return names.variables
        kept = names.variables_of(all_optimizers(names.model, self.optimizers))
        return [*names.variables, *kept]

    @property
    def _kind(self) -> str:
        return "train" if self._clock.mode is ModeKeys.TRAIN else "other"

    # -- wants --------------------------------------------------------------------------------

    @property
    def only_results(self) -> bool:
        """Is nothing wanted but what Keras returns?"""
        return set(self._planner.active()) <= _RESULTS

    def wants_now(self, model: Any) -> Wants:
        """What the step that has begun is to tell of its inside."""
        plan = self._recorder.plan
        if plan is None:
            return NOTHING
        try:
            return self.wants(plan, self.names(model))
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "looking at the model")
            return NOTHING

    def wants(self, plan: StepPlan, names: Names) -> Wants:
        wants = self.models.known(names.model).wants
        found = wants.get(plan)
        if found is None:
            found = wants[plan] = at_stage(wants_of(plan, names), self.synced)
        return found

    def wants_anywhere(self, names: Names, kind: str) -> Wants:
        """What any step may have to tell of its inside."""
        wants = at_stage(wants_of(Anywhere(self._planner), names), self.synced)
        if kind != "train":
            wants = wants._replace(gradients=frozenset(), synced=frozenset())
        return wants

    def may_want(self, model: Any, kind: str) -> Wants | None:
        """The same; None if no step runs as a function of ours."""
        names = self.names(model, anew=True)  # the last step may have made variables
        wants = self.wants_anywhere(names, kind)
        variables = self.variables(names, kind)
        if any(wants) or any(self._planner.wanted_anywhere(v.name) for v in variables):
            return wants
        return None

    def may_want_gradients(self, model: Any) -> bool:
        if not is_built(model):
            return CollectionKeys.GRADIENTS in self._planner.active()
        wants = self.wants_anywhere(self.names(model), "train")
        return bool(wants.gradients or wants.synced)

    @property
    def traces(self) -> int:
        """How often a function of ours was traced."""
        return sum(
            function.traces for known in self.models for _, function in known.functions.values()
        )

    # -- results ------------------------------------------------------------------------------

    def save_seen(self, seen: dict[str, tuple[Any, ...]]) -> None:
        """What taps saw of the step, for all hooks; the plan says what of it is wanted."""
        try:
            found = of_stage(seen, self.synced)
            self.lanes.offer(tuple(found), list(found.values()), array_of)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, f"step {self._clock.step}")

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
            self._errors.on_exception(error, f"step {self._clock.step}")

    def know_metrics(self, names: Iterable[str]) -> None:
        metrics = self._manager.get(CollectionKeys.METRICS)
        for name in names:
            if name not in _LOSSES and not metrics.has_tensor_name(name):
                metrics.add_tensor_name(name)

    # -- names --------------------------------------------------------------------------------

    def names(self, model: Any, *, anew: bool = False) -> Names:
        known, now = self.models.known(model), self._clock.step
        names = known.names
        # To go through a model takes as long as a small step: once in a step is enough.
        if names is None or ((anew or names.looked_at != now) and not names.current):
            names = known.names = Names(model)
            known.wants.clear()
            known.functions.clear()
            self.bind()
        names.looked_at = now
        return names

    def bind(self) -> None:
        """Answer collections that asked for a layer's tensors or for a variable."""
        for collection in self._manager.get_collections().values():
            for request in collection.unbound_requests:
                for names in [known.names for known in self.models if known.names is not None]:
                    patterns = _patterns(names, request.target, request.inputs, request.outputs)
                    if patterns:
                        collection.bind(request, patterns)
                        break

    # -- changes and end ----------------------------------------------------------------------

    def wrap(self, optimizer: Any) -> None:
        if all(known is not optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)
            self.state = next(_states)

    def forget(self) -> None:
        """The configuration changed."""
        for known in self.models:
            known.wants.clear()
        self.state = next(_states)
        self.lanes.forget()

    def uninstall(self) -> None:
        self._recorder.abandon()  # the step may go on, and wants nothing more
        self.lanes.abandon()
        self.models.clear()
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
        elif tf.is_tensor(value) or isinstance(value, (int, float, np.generic, np.ndarray)):
            yield f"{prefix}{key}", value
