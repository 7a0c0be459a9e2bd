"""Loops of a script's own, by the `tf.GradientTape` of each step.

    with hook.wrap_tape(tf.GradientTape()) as tape:      a step of mode TRAIN begins
        loss = ...
    gradients = tape.gradient(loss, variables)           loss, weights and gradients are captured

A tape that is wrapped while another is open takes part in its step. Within `fit` a tape begins
nothing: its step is the batch, and what it computes is captured as it is applied.

Variables of a model that `register_model` was given are captured as the step begins, before a
layer can change them; others when their gradients show that they exist.

In a `tf.function` the same lines are traced once. There the graph asks at every step whether it is
due, and only on one that is hands its tensors over. Layers are seen in eager loops alone, those of
the model that `register_model` was given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from smdist.config import CollectionManager
from smdist.config.collection import CollectionKeys
from smdist.identity import ModeKeys
from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.hook.recorder import Recorder
from smdist.workers.hook.step_clock import StepClock
from smdist.workers.keras_adapter.recording import Recording
from smdist.workers.keras_adapter.taps import Taps
from smdist.workers.keras_adapter.variable_names import (
    LooseNames,
    NamedVariable,
    gradient_name,
    unique,
    weight_name,
)
from smdist.workers.tf_adapter.graph_callbacks import ask, compiled, tell_when
from smdist.workers.tf_adapter.tape_gradients import Save, watch
from smdist.workers.tf_adapter.tensor_access import (
    Array,
    array_of,
    is_variable,
    tf_variable,
    unconverted,
)

__all__ = ["Tapes"]

_Tapes = list[weakref.ref[Any]]  # a tape holds everything that it has recorded

_CUT = "an exception interrupted the capture of what its tape has seen"
_LOSS = "loss"
_COMPILED = (
    "a tape in a function that XLA compiles is not captured: XLA lets nothing out; make that "
    "tf.function with jit_compile=False"
)


class _Found(NamedTuple):
    """What a call of `gradient` shows, by name."""

    # Losses and gradients: tensors, others with every call. All losses have one name here.
    computed: list[tuple[str, Any]]
    variables: dict[str, Any]


class _Traced(NamedTuple):
    """A step that is traced into a graph."""

    graph: Any
    due: Any  # a tensor of it: whether the step is captured
    started: frozenset[str]  # names of variables whose values at its start are told
    loose: LooseNames
    tapes: _Tapes


class Tapes:
    def __init__(
        self,
        recording: Recording,
        clock: StepClock,
        recorder: Recorder[Array],
        manager: CollectionManager,
        errors: ErrorPolicy,
        in_fit: Callable[[], bool],
    ) -> None:
        """`in_fit`: is a step of `fit` running, which this hook counts and captures?"""
        self._recording, self._clock, self._manager = recording, clock, manager
        self._recorder, self._errors, self._in_fit = recorder, errors, in_fit
        self._taps: Taps | None = None
        self._tapped = ExitStack()
        self._tapes: _Tapes = []  # of the step, in an eager loop
        self._taken: set[str] = set()  # names that the step has values for
        self._loose = LooseNames()
        self._traced: _Traced | None = None  # the latest

    @unconverted
    def wrap(self, tape: Any) -> Any:
        try:
            if self._in_fit():
                return tape
            if _replicas() > 1:
                self._errors.warn_once(
                    "a loop of the script's own over several replicas is not captured"
                )
            elif tf.executing_eagerly():
                self._wrap_eager(tape)
            elif compiled():
                self._errors.warn_once(_COMPILED)
            else:
                self._wrap_traced(tape)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "wrapping a tape")
        return tape

    def uninstall(self) -> None:
        self._remove_taps()
        self._tapes, self._traced = [], None
        self._taken, self._loose = set(), LooseNames()

    def _remove_taps(self) -> None:
        self._tapped.close()
        self._taps = None

    def _begin(self) -> bool:
        """Where a tape is wrapped, in every run: a step begins, unless one goes on. Is the hook at
        work?"""
        if self._in_fit():
            return False
        if _any_open(self._tapes):
            return True
        self._remove_taps()
        self._tapes = []
        try:
            if not self._recording.enter(ModeKeys.TRAIN):
                return False
            before = self._clock.step
            self._recording.begin()
            if self._clock.step != before:  # `hook.step()` may not have ended the last one yet
                self._taken, self._loose = set(), LooseNames()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "beginning a step")
        return True

    # -- what is captured ---------------------------------------------------------------------

    def _at_start(self) -> list[NamedVariable]:
        """Variables that are known before the step shows them."""
        names = self._recording.registered_names()
        if names is None:
            return []
        return [*names.variables, *names.variables_of(self._recording.optimizers)]

    def _found(
        self, target: Any, sources: Any, result: Any, loose: LooseNames, known: Container[str]
    ) -> _Found:
        """Variables but those in `known`."""
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
            # Of a model that got them in this step. What is not trained may have changed since.
            variables.update((n.name, n.variable) for n in registered.variables if _trained(n))
        computed = [*losses, *found.items()]
        return _Found(computed, {n: v for n, v in variables.items() if n not in known})

    def _paths(self, variables: list[Any], loose: LooseNames) -> list[str]:
        names = self._recording.registered_names()
        known = [None if names is None else names.path_of(variable) for variable in variables]
        unknown = [v for v, path in zip(variables, known, strict=True) if path is None]
        taken = [] if names is None else [named.path for named in names.variables]
        given = iter(loose.paths(unknown, taken))
        if loose.numbered:
            self._errors.warn_once(
                "several variables of a step have the same name, and are numbered (one is saved as "
                f"{loose.numbered[0]}); give their layers different names"
            )
        return [next(given) if path is None else path for path in known]

    def _offer(self, names: Iterable[str], values: Iterable[Any]) -> None:
        """Values of the step; further ones of the same name are numbered."""
        names = list(names)
        numbered = tuple(unique(name, self._taken) for name in names)
        losses = self._manager.get(CollectionKeys.LOSSES)
        for name, found in zip(names, numbered, strict=True):
            if name == _LOSS and found != name and not losses.has_tensor_name(found):
                losses.add_tensor_name(found)
        self._recording.lanes.offer(numbered, [(value,) for value in values], array_of)

    def _offer_variables(self, names: Iterable[str], values: Iterable[Any]) -> None:
        """What they are first seen as in a step is what it starts with."""
        fresh = {n: v for n, v in zip(names, values, strict=True) if n not in self._taken}
        self._taken.update(fresh)
        self._recording.lanes.offer(tuple(fresh), [(v,) for v in fresh.values()], array_of)

    # -- eager --------------------------------------------------------------------------------

    def _wrap_eager(self, tape: Any) -> None:
        if not _any_open(self._tapes):
            if not self._begin():
                return
            if self._recorder.recording:
                self._save_start()
                self._tap()
        self._tapes.append(weakref.ref(tape))
        if self._recorder.recording:
            watch(tape, self._untap, self._save_eager, synced=self._recording.synced)

    def _save_start(self) -> None:
        cut = self._recorder.hold_incomplete(_CUT)
        variables = self._at_start()
        self._offer_variables([n.name for n in variables], [n.variable for n in variables])
        self._recorder.incomplete_reason = cut

    def _tap(self) -> None:
        names, plan = self._recording.registered_names(), self._recorder.plan
        if names is None or plan is None:
            return
        nothing = frozenset[str]()
        wants = self._recording.wants(plan, names)._replace(gradients=nothing, synced=nothing)
        if any(wants):
            self._taps = Taps(names, wants, self._errors)
            self._taps.begin(None)
            self._tapped.enter_context(self._taps.installed([]))

    def _untap(self) -> None:
        """The forward pass is over; gradients may be computed by running layers once more."""
        taps, self._taps = self._taps, None
        self._tapped.close()
        if taps is None:
            return
        cut = self._recorder.hold_incomplete(_CUT)
        try:
            seen = taps.end()
            if self._recorder.recording:
                self._offer(seen, seen.values())
            self._recorder.incomplete_reason = cut
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "capturing layers")

    def _save_eager(self, target: Any, sources: Any, gradients: Any) -> None:
        self._recorder.hold_incomplete(_CUT)
        try:
            if self._recorder.recording:
                found = self._found(target, sources, gradients, self._loose, self._taken)
                self._offer([n for n, _ in found.computed], [v for _, v in found.computed])
                self._offer_variables(found.variables, found.variables.values())
                self._recording.close()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "capturing gradients")

    # -- in a traced function -----------------------------------------------------------------

    def _wrap_traced(self, tape: Any) -> None:
        graph, step = tf.compat.v1.get_default_graph(), self._traced
        if step is None or step.graph is not graph:
            step = self._traced = self._trace(graph, LooseNames())
        elif not _any_open(step.tapes):
            step = self._traced = self._trace(graph, step.loose)
        step.tapes.append(weakref.ref(tape))
        watch(tape, lambda: None, self._saving(step), synced=self._recording.synced)

    def _trace(self, graph: Any, loose: LooseNames) -> _Traced:
        """Have a step begin at this place of every run."""
        variables = self._at_start()
        names = [named.name for named in variables]
        due, wanted = ask(lambda: self._begin_traced(names), 2)
        if variables:
            tell_when(
                wanted,
                lambda: _readings(named.variable for named in variables),
                lambda *arrays: self._save_traced([], names, arrays),
            )
        return _Traced(graph, due, frozenset(names), loose, [])

    def _saving(self, step: _Traced) -> Save:
        def save(target: Any, sources: Any, gradients: Any) -> None:
            try:
                if compiled():
                    self._errors.warn_once(_COMPILED)
                    return
                self._tell(step, self._found(target, sources, gradients, step.loose, step.started))
            except Exception as error:  # noqa: BLE001 (the policy decides)
                self._errors.on_exception(error, "tracing gradients")

        return save

    def _tell(self, step: _Traced, found: _Found) -> None:
        computed, variables = [name for name, _ in found.computed], list(found.variables)
        tell_when(
            step.due,
            lambda: _readings([*(v for _, v in found.computed), *found.variables.values()]),
            lambda *arrays: self._save_traced(computed, variables, arrays),
        )

    def _begin_traced(self, names: list[str]) -> Any:
        """Is the step captured, and any of these variables?"""
        plan = self._recorder.plan if self._begin() else None
        wanted = plan is not None and any(plan.wants(name) is not None for name in names)
        return np.bool_(plan is not None), np.bool_(wanted)

    def _save_traced(
        self, computed: list[str], variables: list[str], arrays: tuple[Array, ...]
    ) -> Any:
        cut = self._recorder.hold_incomplete(_CUT)
        try:
            self._offer(computed, arrays[: len(computed)])
            self._offer_variables(variables, arrays[len(computed) :])
            self._recorder.incomplete_reason = cut
            if computed:
                self._recording.close()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "capturing a step")
        return np.bool_(True)


def _any_open(tapes: _Tapes) -> bool:
    return any(getattr(reference(), "_recording", False) for reference in tapes)


def _is_loss(target: Any) -> bool:
    """Not: one that is sparse or ragged."""
    return isinstance(target, tf.Tensor) or is_variable(target)


def _trained(named: NamedVariable) -> bool:
    return bool(named.variable.trainable)


def _readings(values: Iterable[Any]) -> list[Any]:
    return [
        tf_variable(value).read_value() if is_variable(value) else tf.convert_to_tensor(value)
        for value in values
    ]


def _replicas() -> int:
    """How many of them this process runs side by side."""
    strategy = tf.distribute.get_strategy()
    return 1 if strategy.num_replicas_in_sync == 1 else len(strategy.extended.worker_devices)
