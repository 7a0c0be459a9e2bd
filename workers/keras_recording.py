"""What a Keras hook does with the models it sees: which step is which, and what is captured of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import tensorflow as tf

from smdist.collection import CollectionKeys
from smdist.config import CollectionManager
from smdist.identity import ModeKeys
from smdist.planning import Planner, StepPlan
from smdist.workers.keras_functions import StepFunction, build_by_tracing, only_says_built
from smdist.workers.keras_known import Models
from smdist.workers.keras_lanes import Lanes
from smdist.workers.keras_names import NamedVariable, Names
from smdist.workers.keras_phase import Phase
from smdist.workers.keras_random import OneFunction, draws, example, turn_after
from smdist.workers.keras_taps import (
    NOTHING,
    Anywhere,
    Taps,
    Wants,
    at_stage,
    of_stage,
    union,
    wants_of,
)
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
        self.lanes = Lanes(recorder, mishaps.trouble)
        self._recorder = recorder
        self.optimizers: list[Any] = []  # besides the model's own
        self._beside: Sequence[Recording] = ()  # of other hooks that look into the same step
        self.models = Models()
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

    def passed_at_once(self, steps: int, kind: str, result: Any) -> None:
        """One execution had so many steps and one result, which goes to the last that is due."""
        for left in reversed(range(steps)):
            self.begin()
            if self._recorder.recording and not self.due_within(left):
                self.save_results(kind, result)
                self.close()

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
            plan = self.coming_plan
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

    @property
    def coming_plan(self) -> StepPlan:
        """Of the coming step, which is due."""
        return self._planner.at(self._clock.mode, self._clock.mode_step + 1)

    def build(self, model: Any, batch: Any) -> None:
        """Make the weights of a model that gets them with its first batch: they are those that its
        first step starts with."""
        if model.built:
            self._complete(model, batch)
            return
        try:
            inputs = _inputs(batch)
            try:
                build_by_tracing(model, inputs)
            except Exception:  # noqa: BLE001 (there are models that can only be run)
                _run_once(model, inputs)
        except Exception as error:  # noqa: BLE001 (the step itself will tell)
            self._mishaps.trouble(f"the weights of {model.name} before its first step: {error}")

    def _complete(self, model: Any, like: Any) -> None:
        """The same for one that is only marked as built. It may as well be one that is never called,
        whose layers are: then they get their variables in its first step."""
        known = self.models.known(model)
        if known.completed:
            return
        known.completed = True
        with suppress(Exception):
            if not set(self._planner.active()) <= _RESULTS and only_says_built(model):
                build_by_tracing(model, _inputs(like))

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
        return (
            names.variables_of(_optimizers(names.model, self.optimizers)) if kind == "train" else []
        )

    # -- the inside of a step -----------------------------------------------------------------

    def run(self, phase: Phase, batch: Any, others: Sequence[Recording] = ()) -> Any:
        """The step that has begun, here and for `others`: once, as a function that tells what any of
        them wants of its inside."""
        everybody = [self, *others]
        wanted = [wants for one in everybody if any(wants := one._inside(phase.model))]
        self._beside = others
        result, seen = self._step(phase, batch, wanted)
        if wanted:
            for one in everybody:  # its plan says what of it is wanted
                one._save(of_stage(seen, one.synced))
        return result

    def _step(
        self, phase: Phase, batch: Any, wanted: list[Wants]
    ) -> tuple[Any, dict[str, tuple[Any, ...]]]:
        if isinstance(phase.original, OneFunction):
            return phase.original.step(batch)
        if not wanted:
            return self._own(phase, None)(batch)
        function = self._own(phase, union(wanted))
        try:
            return function(batch)
        except Exception as error:
            if function.traced or function.eager:
                raise
            # Nothing has run yet. Is it the step itself that cannot be traced, or our part in it?
            found = self._own(phase, None)(batch)
            self._cannot_look(error, phase)
            return found

    def _cannot_look(self, error: Exception, phase: Phase) -> None:
        for one in (self, *self._beside):
            one._mishaps.handle(error, f"looking into the {phase.kind} step of {phase.model.name}")

    def _inside(self, model: Any) -> Wants:
        plan = self._recorder.plan
        return NOTHING if plan is None else self.wants(plan, self.names(model))

    def _save(self, seen: dict[str, tuple[Any, ...]]) -> None:
        try:
            self.lanes.offer(tuple(seen), list(seen.values()), array_of)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, f"step {self._clock.step}")

    def _own(self, phase: Phase, wants: Wants | None) -> StepFunction:
        model, key = phase.model, (phase.kind, wants)
        functions = self.models.known(model).functions
        basis, function = functions.get(key, (None, None))
        # Keras makes its function anew when the model is compiled again, and so do we.
        if function is None or basis is not phase.original:
            taps = None
            if wants is not None:
                taps = Taps(self.names(model), wants, self._mishaps)
            function = StepFunction(
                model,
                phase.kind,
                taps,
                lambda: self.optimizers_of(model),
                turn_after(phase.original),
            )
            functions[key] = phase.original, function
        return function

    # -- random numbers -----------------------------------------------------------------------

    def keep_to_one(self, phase: Phase, source: Any, others: Sequence[Recording]) -> None:
        """Before the first step of a phase: if its step draws random numbers, all steps are to run
        through one function. Nothing is run to find out."""
        examined = self.models.known(phase.model).examined
        if examined.get(phase.kind) is phase.original:
            return
        try:
            self._examine(phase, source, others)
        except Exception as error:  # noqa: BLE001 (the step itself will tell)
            self._mishaps.trouble(
                f"whether {phase.model.name} draws random numbers is not known: {error}"
            )
        examined[phase.kind] = phase.original

    def _examine(self, phase: Phase, source: Any, others: Sequence[Recording]) -> None:
        model, kind, like = phase.model, phase.kind, example(source)
        if like is None:
            return
        if not model.built:
            if set(self._planner.active()) <= _RESULTS:
                return
            build_by_tracing(model, _inputs(like))
        else:
            self._complete(model, like)
        found = [one._may_want(model, kind) for one in (self, *others)]
        wanted = [wants for wants in found if wants is not None]
        if not wanted:
            return
        wants = union(wanted)
        if isinstance(phase.original, OneFunction) and phase.original.covers(wants):
            return
        self._beside = others
        function = self._own(phase, wants if any(wants) else None)
        if not draws(function.trace(like)):
            return

        def plain(error: Exception) -> StepFunction:
            self._cannot_look(error, phase)
            return self._own(phase, None)

        phase.original = OneFunction(model, kind, function, wants, plain)

    def wants_anywhere(self, names: Names, kind: str) -> Wants:
        """What any step may have to tell of its inside."""
        wants = at_stage(wants_of(Anywhere(self._planner), names), self.synced)
        if kind != "train":
            wants = wants._replace(gradients=frozenset(), synced=frozenset())
        return wants

    def may_want_gradients(self, model: Any) -> bool:
        if not model.built:
            return CollectionKeys.GRADIENTS in self._planner.active()
        wants = self.wants_anywhere(self.names(model), "train")
        return bool(wants.gradients or wants.synced)

    def _may_want(self, model: Any, kind: str) -> Wants | None:
        """The same; None if no step runs as a function of ours."""
        names = self.names(model)
        wants = self.wants_anywhere(names, kind)
        variables = [*names.variables, *self.optimizer_variables(names, kind)]
        if any(wants) or any(self._planner.wanted_anywhere(v.name) for v in variables):
            return wants
        return None

    def optimizers_of(self, model: Any) -> list[Any]:
        return _optimizers(model, (o for one in (self, *self._beside) for o in one.optimizers))

    @property
    def traces(self) -> int:
        """How often a function of ours was traced."""
        return sum(
            function.traces for known in self.models for _, function in known.functions.values()
        )

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
            self._mishaps.handle(error, f"step {self._clock.step}")

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

    def wants(self, plan: StepPlan, names: Names) -> Wants:
        wants = self.models.known(names.model).wants
        found = wants.get(plan)
        if found is None:
            found = wants[plan] = at_stage(wants_of(plan, names), self.synced)
        return found

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

    def forget(self) -> None:
        """The configuration changed."""
        for known in self.models:
            known.wants.clear()
            known.examined.clear()
        self.lanes.forget()

    def uninstall(self) -> None:
        self.models.clear()
        self.optimizers.clear()
        self._beside = ()
        self._model = self._registered = None


def _optimizers(model: Any, wrapped: Iterable[Any]) -> list[Any]:
    """The model's own comes first: it keeps its names, whatever is wrapped besides."""
    found = [getattr(model, "optimizer", None), *wrapped]
    return list({id(o): o for o in found if o is not None}.values())


def _inputs(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple) else batch


def _run_once(model: Any, inputs: Any) -> None:
    strategy = model.distribute_strategy
    one = tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0][:1], inputs
    )
    with strategy.scope():
        model(one)


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
