"""Steps of training loops that a script writes itself, by the `tf.GradientTape` of each step.

    with hook.wrap_tape(tf.GradientTape()) as tape:      a step of mode TRAIN begins
        loss = ...
    gradients = tape.gradient(loss, variables)           loss, weights and gradients are captured

A tape that is wrapped while another is open belongs to the same step. Within `fit` a tape begins no
step: the step is the batch, and gradients are captured as an optimizer applies them.

Variables of a model given to `register_model` are captured as the step begins, before a layer can
change them. Other variables are captured when their gradients are computed.

In a `tf.function` the same lines are traced once. There the graph asks at every step whether it is
due, and hands over its tensors only if it is. Layers are seen in eager loops only, and only those of
the model given to `register_model`.

All methods run on the training thread, except `_begin_traced` and `_save_traced`, which TensorFlow
calls while the step runs. Errors go to the error policy of the hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from smdist.config.collection import CollectionKeys
from smdist.identity import ModeKeys
from smdist.workers.keras_adapter.recording import KerasRecording
from smdist.workers.keras_adapter.step_probes import StepProbes
from smdist.workers.keras_adapter.variable_names import (
    LooseNames,
    NamedVariable,
    gradient_name,
    unique,
    weight_name,
)
from smdist.workers.tf_adapter.graph_callbacks import call_for_flags, call_if, in_xla_graph
from smdist.workers.tf_adapter.tape_gradients import SaveGradients, observe_tape
from smdist.workers.tf_adapter.tensor_access import (
    Array,
    array_of,
    is_variable,
    tf_variable,
    unconverted,
)

__all__ = ["TapeLoops"]

_TapeRefs = list[weakref.ref[Any]]  # weak: a tape holds everything that it has recorded

_INTERRUPTED = "an exception interrupted the capture of what its tape has seen"
_LOSS = "loss"
_COMPILED = (
    "a tape in a function compiled by XLA is not captured: use tf.function(jit_compile=False)"
)


class _Found(NamedTuple):
    """What one call of `gradient` computes, and the variables it uses."""

    computed: list[tuple[str, Any]]  # losses, all under one name here, and gradients
    variables: dict[str, Any]


class _TracedLoopStep(NamedTuple):
    """A step that is traced into a graph."""

    graph: Any
    due: Any  # a boolean tensor: the step is captured
    started: frozenset[str]  # variables captured at its start
    loose: LooseNames
    tapes: _TapeRefs


class TapeLoops:
    """The wrapped tapes of one hook."""

    def __init__(self, recording: KerasRecording, in_fit: Callable[[], bool]) -> None:
        """Make it for the hook of `recording`; `in_fit` checks whether a step of `fit` runs."""
        core = recording.core
        self._recording, self._clock, self._manager = recording, core.clock, core.manager
        self._recorder, self._errors, self._in_fit = core.recorder, core.errors, in_fit
        self._probes: StepProbes | None = None
        self._installed = ExitStack()
        self._tapes: _TapeRefs = []  # of the step, in an eager loop
        self._taken: set[str] = set()  # names that the step has values for already
        self._loose = LooseNames()
        self._traced: _TracedLoopStep | None = None  # the latest

    @unconverted
    def wrap(self, tape: Any) -> Any:
        try:
            if self._in_fit():
                return tape
            if _replica_count() > 1:
                self._errors.warn_once(
                    "a training loop over several replicas is not captured; use model.fit"
                )
            elif tf.executing_eagerly():
                self._wrap_eager(tape)
            elif in_xla_graph():
                self._errors.warn_once(_COMPILED)
            else:
                self._wrap_traced(tape)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "wrapping a tape")
        return tape

    def uninstall(self) -> None:
        self._remove_probes()
        self._tapes, self._traced = [], None
        self._taken, self._loose = set(), LooseNames()

    def _remove_probes(self) -> None:
        self._installed.close()
        self._probes = None

    def _begin(self) -> bool:
        """Begin a step unless one goes on; return whether the hook captures this loop."""
        if self._in_fit():
            return False
        if _any_open(self._tapes):
            return True
        self._remove_probes()
        self._tapes = []
        try:
            if not self._recording.enter(ModeKeys.TRAIN):
                return False
            before = self._clock.step
            self._recording.begin()
            if self._clock.step != before:  # else `hook.step()` has not ended the last one yet
                self._taken, self._loose = set(), LooseNames()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "beginning a step")
        return True

    # -- naming and saving --------------------------------------------------------------------

    def _known_variables(self) -> list[NamedVariable]:
        """Return the variables of the registered model and of wrapped optimizers."""
        names = self._recording.registered_names()
        if names is None:
            return []
        return [*names.variables, *names.variables_of(self._recording.optimizers)]

    def _name_all(
        self, target: Any, sources: Any, result: Any, loose: LooseNames, skip: Container[str]
    ) -> _Found:
        """Name what `gradient(target, sources)` returned; leave out variables in `skip`."""
        pairs = [
            (variable, gradient)
            for variable, gradient in zip(
                tf.nest.flatten(sources), tf.nest.flatten(result), strict=False
            )
            if is_variable(variable)
        ]
        losses = [(_LOSS, loss) for loss in tf.nest.flatten(target) if _is_loss(loss)]
        found: dict[str, Any] = {}
        variables: dict[str, Any] = {}
        paths = self._paths([variable for variable, _ in pairs], loose)
        for (variable, gradient), path in zip(pairs, paths, strict=True):
            if gradient is not None:
                found[gradient_name(path)] = gradient
            variables[weight_name(path)] = variable
        registered = self._recording.registered_names()
        if registered is not None:
            # The model may have got its variables in this step. Untrained ones may have changed since.
            variables.update((n.name, n.variable) for n in registered.variables if _trained(n))
        computed = [*losses, *found.items()]
        return _Found(computed, {n: v for n, v in variables.items() if n not in skip})

    def _paths(self, variables: list[Any], loose: LooseNames) -> list[str]:
        names = self._recording.registered_names()
        known = [None if names is None else names.path_of(variable) for variable in variables]
        unknown = [v for v, path in zip(variables, known, strict=True) if path is None]
        taken = [] if names is None else [named.path for named in names.variables]
        given = iter(loose.paths(unknown, taken))
        if loose.numbered:
            self._errors.warn_once(
                "several variables of a step have the same name and are saved with numbers (such as "
                f"{loose.numbered[0]}). Give their layers different names"
            )
        return [next(given) if path is None else path for path in known]

    def _offer(self, names: Iterable[str], values: Iterable[Any]) -> None:
        """Save computed values; number those whose name the step has already."""
        names = list(names)
        numbered = tuple(unique(name, self._taken) for name in names)
        losses = self._manager.get(CollectionKeys.LOSSES)
        for name, found in zip(names, numbered, strict=True):
            if name == _LOSS and found != name and not losses.has_tensor_name(found):
                losses.add_tensor_name(found)
        self._recording.replicas.offer(numbered, [(value,) for value in values], array_of)

    def _offer_variables(self, names: Iterable[str], values: Iterable[Any]) -> None:
        """Save variables that the step has no value for: the first one is what it starts with."""
        fresh = {n: v for n, v in zip(names, values, strict=True) if n not in self._taken}
        self._taken.update(fresh)
        self._recording.replicas.offer(tuple(fresh), [(v,) for v in fresh.values()], array_of)

    # -- eager loops ---------------------------------------------------------------------------

    def _wrap_eager(self, tape: Any) -> None:
        if not _any_open(self._tapes):
            if not self._begin():
                return
            if self._recorder.recording:
                self._save_variables_at_start()
                self._install_probes()
        self._tapes.append(weakref.ref(tape))
        if self._recorder.recording:
            observe_tape(tape, self._save_layers, self._save_eager, synced=self._recording.synced)

    def _save_variables_at_start(self) -> None:
        before = self._recorder.hold_incomplete(_INTERRUPTED)
        variables = self._known_variables()
        self._offer_variables([n.name for n in variables], [n.variable for n in variables])
        self._recorder.incomplete_reason = before

    def _install_probes(self) -> None:
        names, plan = self._recording.registered_names(), self._recorder.plan
        if names is None or plan is None:
            return
        nothing = frozenset[str]()
        wanted = self._recording.wanted(plan, names)._replace(gradients=nothing, synced=nothing)
        if any(wanted):
            self._probes = StepProbes(names, wanted, self._errors)
            self._probes.begin(None)
            self._installed.enter_context(self._probes.installed([]))

    def _save_layers(self) -> None:
        """Save what probes saw of the forward pass; computing gradients may run layers again."""
        probes, self._probes = self._probes, None
        self._installed.close()
        if probes is None:
            return
        before = self._recorder.hold_incomplete(_INTERRUPTED)
        try:
            seen = probes.end()
            if self._recorder.recording:
                self._offer(seen, seen.values())
            self._recorder.incomplete_reason = before
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "capturing layers")

    def _save_eager(self, target: Any, sources: Any, gradients: Any) -> None:
        self._recorder.hold_incomplete(_INTERRUPTED)
        try:
            if self._recorder.recording:
                found = self._name_all(target, sources, gradients, self._loose, self._taken)
                self._offer([n for n, _ in found.computed], [v for _, v in found.computed])
                self._offer_variables(found.variables, found.variables.values())
                self._recording.close()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "capturing gradients")

    # -- traced functions ---------------------------------------------------------------------

    def _wrap_traced(self, tape: Any) -> None:
        graph, step = tf.compat.v1.get_default_graph(), self._traced
        if step is None or step.graph is not graph:
            step = self._traced = self._trace(graph, LooseNames())
        elif not _any_open(step.tapes):
            step = self._traced = self._trace(graph, step.loose)
        step.tapes.append(weakref.ref(tape))
        observe_tape(tape, lambda: None, self._saving(step), synced=self._recording.synced)

    def _trace(self, graph: Any, loose: LooseNames) -> _TracedLoopStep:
        """Add callbacks that begin a step at this place of every run and save its variables."""
        variables = self._known_variables()
        names = [named.name for named in variables]
        due, wanted = call_for_flags(lambda: self._begin_traced(names), 2)
        if variables:
            call_if(
                wanted,
                lambda: _readings(named.variable for named in variables),
                lambda *arrays: self._save_traced([], names, arrays),
            )
        return _TracedLoopStep(graph, due, frozenset(names), loose, [])

    def _saving(self, step: _TracedLoopStep) -> SaveGradients:
        def save(target: Any, sources: Any, gradients: Any) -> None:
            try:
                if in_xla_graph():
                    self._errors.warn_once(_COMPILED)
                    return
                self._add_save(
                    step, self._name_all(target, sources, gradients, step.loose, step.started)
                )
            except Exception as error:  # noqa: BLE001 (the policy decides)
                self._errors.on_exception(error, "tracing gradients")

        return save

    def _add_save(self, step: _TracedLoopStep, found: _Found) -> None:
        computed, variables = [name for name, _ in found.computed], list(found.variables)
        call_if(
            step.due,
            lambda: _readings([*(v for _, v in found.computed), *found.variables.values()]),
            lambda *arrays: self._save_traced(computed, variables, arrays),
        )

    def _begin_traced(self, names: list[str]) -> Any:
        """Begin a step; return whether it is captured, and whether any of `names` is."""
        plan = self._recorder.plan if self._begin() else None
        wanted = plan is not None and any(plan.wants(name) is not None for name in names)
        return np.bool_(plan is not None), np.bool_(wanted)

    def _save_traced(
        self, computed: list[str], variables: list[str], arrays: tuple[Array, ...]
    ) -> Any:
        before = self._recorder.hold_incomplete(_INTERRUPTED)
        try:
            self._offer(computed, arrays[: len(computed)])
            self._offer_variables(variables, arrays[len(computed) :])
            self._recorder.incomplete_reason = before
            if computed:
                self._recording.close()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "capturing a step")
        return np.bool_(True)


def _any_open(tapes: _TapeRefs) -> bool:
    return any(getattr(reference(), "_recording", False) for reference in tapes)


def _is_loss(target: Any) -> bool:
    # Sparse and ragged tensors are not saved.
    return isinstance(target, tf.Tensor) or is_variable(target)


def _trained(named: NamedVariable) -> bool:
    return bool(named.variable.trainable)


def _readings(values: Iterable[Any]) -> list[Any]:
    return [
        tf_variable(value).read_value() if is_variable(value) else tf.convert_to_tensor(value)
        for value in values
    ]


def _replica_count() -> int:
    strategy = tf.distribute.get_strategy()
    return 1 if strategy.num_replicas_in_sync == 1 else len(strategy.extended.worker_devices)
