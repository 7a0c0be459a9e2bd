"""Loops of a script's own, by the `tf.GradientTape` of each step.

    with hook.wrap_tape(tf.GradientTape()) as tape:      a step of mode TRAIN begins
        loss = ...
    gradients = tape.gradient(loss, variables)           loss, weights and gradients are captured

In a `tf.function` the same lines are traced once. There the graph asks at every step whether it is
due, and only on one that is hands its tensors over. Layers are seen in eager loops alone, those of
the model that `register_model` was given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from smdist.identity import ModeKeys
from smdist.workers import horovod
from smdist.workers.keras_names import Names, gradient_name, loose_names, weight_name
from smdist.workers.keras_recording import Recording
from smdist.workers.keras_taps import Taps
from smdist.workers.mishaps import Mishaps
from smdist.workers.recorder import Recorder
from smdist.workers.steps import StepClock
from smdist.workers.tf_aside import ask, tell_when
from smdist.workers.tf_host import Array, array_of, is_variable, tf_variable, unconverted

__all__ = ["Tapes"]

_Save = Callable[[Any, Any, Any], None]  # of a target, variables and their gradients


class Tapes:
    def __init__(
        self,
        recording: Recording,
        clock: StepClock,
        recorder: Recorder[Array],
        mishaps: Mishaps,
    ) -> None:
        self._recording, self._clock = recording, clock
        self._recorder, self._mishaps = recorder, mishaps
        self._taps: Taps | None = None
        self._tapped = ExitStack()

    def wrap(self, tape: Any) -> Any:
        if _replicas() > 1:
            self._mishaps.trouble(
                "a loop of the script's own over several replicas is not captured"
            )
        elif not tf.executing_eagerly():
            self._wrap_traced(tape)
        elif self._begin() and self._recorder.recording:
            self._tap()
            self._watch(tape, self._untap, self._save_eager)
        return tape

    def uninstall(self) -> None:
        self._tapped.close()
        self._taps = None

    def _begin(self) -> bool:
        self.uninstall()
        try:
            if not self._recording.enter(ModeKeys.TRAIN):
                return False
            # Weights come with the gradients: in a graph nothing else is sure to be in order.
            with self._recording.without_variables():
                self._recording.begin()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, "beginning a step")
        return True

    # -- the tape -----------------------------------------------------------------------------

    def _watch(self, tape: Any, before: Callable[[], None], save: _Save) -> None:
        if horovod.reducer_of(tape) is not None:
            vars(tape)["gradient"] = unconverted(self._around_reduction(tape, before, save))
            return
        kind, synced = type(tape), self._recording.synced

        def gradient(own: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            before()
            result = kind.gradient(own, target, sources, *args, **kwargs)
            if synced and horovod.reducer_of(own) is not None:
                _after_reduction(own, lambda variables, found: save(target, variables, found))
            else:
                save(target, sources, result)
            return result

        # Horovod makes another tape, of a class of its own that is derived from this one's.
        tape.__class__ = type(kind.__name__, (kind,), {"gradient": unconverted(gradient)})

    def _around_reduction(self, tape: Any, before: Callable[[], None], save: _Save) -> Any:
        original, reducer = tape.gradient, horovod.reducer_of(tape)
        synced = self._recording.synced

        def gradient(target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            local: dict[int, Any] = {}

            def reduce(gradients: Any, variables: Any, *more: Any) -> Any:
                local.update(zip(map(id, variables), gradients, strict=True))
                return reducer(gradients, variables, *more)

            before()
            vars(tape)["_allreduce_grads"] = reduce
            try:
                result = original(target, sources, *args, **kwargs)
            finally:
                vars(tape)["_allreduce_grads"] = reducer
            pairs = zip(sources, result, strict=True)
            save(target, sources, result if synced else [local.get(id(v), g) for v, g in pairs])
            return result

        return gradient

    # -- eager --------------------------------------------------------------------------------

    def _tap(self) -> None:
        names, plan = self._recording.registered_names(), self._recorder.plan
        if names is None or plan is None:
            return
        wants = self._recording.wants(plan, names)._replace(gradients=frozenset())
        if any(wants):
            self._taps = Taps(names, wants, self._mishaps)
            self._taps.begin(None)
            self._tapped.enter_context(self._taps.installed([]))

    def _untap(self) -> None:
        """The forward pass is over; gradients may be computed by running layers once more."""
        taps, self._taps = self._taps, None
        self._tapped.close()
        if taps is None:
            return
        try:
            seen = taps.end()
            if self._recorder.recording:
                self._offer(list(seen), list(seen.values()))
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, "capturing layers")

    def _save_eager(self, target: Any, sources: Any, gradients: Any) -> None:
        try:
            if self._recorder.recording:
                self._offer(*self._found(target, sources, gradients))
                self._offer(*self._kept_by_optimizers())
                self._recording.close()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, "capturing gradients")

    def _found(self, target: Any, sources: Any, result: Any) -> tuple[list[str], list[Any]]:
        """Names, and the tensors or variables that go with them."""
        pairs = [
            (variable, gradient)
            for variable, gradient in zip(
                tf.nest.flatten(sources), tf.nest.flatten(result), strict=False
            )
            if is_variable(variable)
        ]
        registered = self._recording.registered_names()
        paths = _paths(registered, [variable for variable, _ in pairs])
        found: dict[str, Any] = {}
        losses = tf.nest.flatten(target)
        if len(losses) == 1 and tf.is_tensor(losses[0]):
            found["loss"] = losses[0]
        for (variable, gradient), path in zip(pairs, paths, strict=True):
            if gradient is not None:
                found[gradient_name(path)] = gradient
            found[weight_name(path)] = variable
        if registered is not None:
            found.update((named.name, named.variable) for named in registered.variables)
        return list(found), list(found.values())

    def _kept_by_optimizers(self) -> tuple[list[str], list[Any]]:
        names = self._recording.registered_names()
        kept = [
            named
            for optimizer in self._recording.optimizers
            if names is not None
            for named in names.optimizer_variables(optimizer)
        ]
        return [named.name for named in kept], [named.variable for named in kept]

    def _offer(self, names: list[str], values: list[Any]) -> None:
        self._recording.lanes.offer(tuple(names), [(value,) for value in values], array_of)

    # -- in a traced function -----------------------------------------------------------------

    def _wrap_traced(self, tape: Any) -> None:
        due = ask(self._begin_traced)

        def save(target: Any, sources: Any, gradients: Any) -> None:
            names, values = self._found(target, sources, gradients)
            tell_when(
                due,
                lambda: [
                    tf_variable(value).read_value()
                    if is_variable(value)
                    else tf.convert_to_tensor(value)
                    for value in values
                ],
                lambda *arrays: self._save_traced(names, arrays),
            )

        self._watch(tape, lambda: None, save)

    def _begin_traced(self) -> Any:
        return np.bool_(self._begin() and self._recorder.recording)

    def _save_traced(self, names: list[str], arrays: tuple[Array, ...]) -> Any:
        try:
            self._offer(names, list(arrays))
            self._recording.close()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, "capturing gradients")
        return np.bool_(True)


def _after_reduction(tape: Any, save: Callable[[Any, Any], None]) -> None:
    """Show `save` what the reduction that `tape` is about to do gives."""
    reducer = horovod.reducer_of(tape)

    def reduce(gradients: Any, variables: Any, *more: Any) -> Any:
        vars(tape)["_allreduce_grads"] = reducer
        found = reducer(gradients, variables, *more)
        save(variables, found)
        return found

    vars(tape)["_allreduce_grads"] = unconverted(reduce)


def _replicas() -> int:
    """How many of them this process runs side by side."""
    strategy = tf.distribute.get_strategy()
    return 1 if strategy.num_replicas_in_sync == 1 else len(strategy.extended.worker_devices)


def _paths(names: Names | None, variables: list[Any]) -> list[str]:
    known = [None if names is None else names.path_of(variable) for variable in variables]
    loose = loose_names(variables)
    return [path or loose[id(variable)] for path, variable in zip(known, variables, strict=True)]
