"""The inside of a step: the functions of ours that run it, and what they are made from.

A step whose inside is wanted runs as a function of ours, which tells of it. That is traced once for
everything that is wanted of it; where a step draws random numbers, all steps run through one (see
`OneFunction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.keras_adapter.recording import Recording
from smdist.workers.keras_adapter.stateful_random import (
    OneFunction,
    cannot_look,
    draws,
    example,
    note_turn,
    turn_after,
)
from smdist.workers.keras_adapter.step_function import (
    Outcome,
    StepFunction,
    build_by_tracing,
    can_be_called,
    is_built,
    only_says_built,
    run_or_plain,
)
from smdist.workers.keras_adapter.taps import Taps, Wants, union
from smdist.workers.keras_adapter.variable_names import all_optimizers

if TYPE_CHECKING:
    from smdist.workers.keras_adapter.phase import Phase

__all__ = ["Inside"]


class Inside:
    def __init__(self, recording: Recording, errors: ErrorPolicy) -> None:
        self.recording, self._errors = recording, errors
        self._doubt = ""  # to be told if the step runs: if it does not, the script is told why

    # -- steps --------------------------------------------------------------------------------

    def run(self, phase: Phase, batch: Any, others: Sequence[Inside]) -> Any:
        """The step that has begun, here and for `others`: once, as a function that tells what any of
        them wants of its inside."""
        recordings = [one.recording for one in (self, *others)]
        wanted = [wants for one in recordings if any(wants := one.wants_now(phase.model))]
        result, seen = self._step(phase, batch, wanted, others)
        if wanted:
            for one in recordings:
                one.save_seen(seen)
        return result

    def _step(
        self, phase: Phase, batch: Any, wanted: list[Wants], others: Sequence[Inside]
    ) -> Outcome:
        if isinstance(phase.original, OneFunction):
            return phase.original.step(batch)
        function = self._own(phase, union(wanted) if wanted else None, others)
        found, ran, error = run_or_plain(function, batch, lambda: self._own(phase, None, others))
        if error is not None:
            cannot_look(self._hearers(others), error, phase.kind, phase.model)
        examined = self.recording.models.known(phase.model).examined
        if not ran.eager and phase.kind not in examined:
            note_turn(phase.original, ran.turn + 1)  # what it drew is not to be drawn again
        return found

    def _hearers(self, others: Sequence[Inside]) -> list[ErrorPolicy]:
        return [one._errors for one in (self, *others)]

    def _own(self, phase: Phase, wants: Wants | None, others: Sequence[Inside]) -> StepFunction:
        model, optimizers = phase.model, self._looked_at(phase.model, wants, others)
        key = phase.kind, wants, tuple(map(id, optimizers))
        functions = self.recording.models.known(model).functions
        basis, function = functions.get(key, (None, None))
        # Keras makes its function anew when the model is compiled again, and so do we.
        if function is None or basis is not phase.original:
            taps = None
            if wants is not None:
                taps = Taps(self.recording.names(model), wants, self._errors)
            turn = turn_after(phase.original)
            function = StepFunction(model, phase.kind, taps, optimizers, turn)
            functions[key] = phase.original, function
        return function

    def _looked_at(self, model: Any, wants: Wants | None, others: Sequence[Inside]) -> list[Any]:
        """Optimizers whose gradients are wanted."""
        if wants is None or not (wants.gradients or wants.synced):
            return []
        wrapped = (o for one in (self, *others) for o in one.recording.optimizers)
        return all_optimizers(model, wrapped)

    # -- random numbers -----------------------------------------------------------------------

    def keep_to_one(self, phase: Phase, source: Any, others: Sequence[Inside]) -> None:
        """Before the first step of a phase: if its step draws random numbers, all steps are to run
        through one function. Nothing is run to find out."""
        examined = self.recording.models.known(phase.model).examined
        states = tuple(one.recording.state for one in (self, *others))
        if self._doubt:  # the step did not run, and may be another one now
            self._doubt = ""
            examined.pop(phase.kind, None)
        if examined.get(phase.kind) != (phase.original, states):
            if not is_built(phase.model) and not can_be_called(phase.model):
                return  # its first step makes its variables, and then there is more to see
            try:
                self._examine(phase, source, others)
            except Exception as error:  # noqa: BLE001 (the step itself will tell)
                name, why = phase.model.name, _in_brief(error)
                self._doubt = f"whether {name} draws random numbers is not known: {why}"
            examined[phase.kind] = phase.original, states
        if isinstance(phase.original, OneFunction):
            phase.original.heard_by(self._hearers(others))

    def step_ran(self) -> None:
        if self._doubt:
            doubt, self._doubt = self._doubt, ""
            self._errors.warn_once(doubt)

    def _examine(self, phase: Phase, source: Any, others: Sequence[Inside]) -> None:
        model, kind, like = phase.model, phase.kind, example(source)
        if like is None:
            return
        if is_built(model):
            self._complete(model, like)
        elif self.recording.only_results:
            return
        else:
            build_by_tracing(model, _inputs(like))
        found = [one.recording.may_want(model, kind) for one in (self, *others)]
        wanted = [wants for wants in found if wants is not None]
        if not wanted:
            return
        wants = union(wanted)
        looked_at = self._looked_at(model, wants, others)
        if isinstance(phase.original, OneFunction) and phase.original.covers(wants, looked_at):
            return
        function = self._own(phase, wants if any(wants) else None, others)
        if draws(function.trace(like)):
            phase.original = OneFunction(model, kind, function, wants)

    # -- models without variables -------------------------------------------------------------

    def build(self, model: Any, batch: Any) -> None:
        """Make the weights of a model that gets them with its first batch: they are those that its
        first step starts with."""
        if is_built(model):
            self._complete(model, batch)
            return
        if not can_be_called(model):
            return
        try:
            inputs = _inputs(batch)
            try:
                build_by_tracing(model, inputs)
            except Exception:  # noqa: BLE001 (there are models that can only be run)
                _run_once(model, inputs)
        except Exception as error:  # noqa: BLE001 (the step itself will tell)
            why = _in_brief(error)
            self._errors.warn_once(f"the weights of {model.name} before its first step: {why}")

    def _complete(self, model: Any, like: Any) -> None:
        """The same for one that is only marked as built. It may as well be one that is never called,
        whose layers are: then they get their variables in its first step."""
        known = self.recording.models.known(model)
        if known.completed:
            return
        known.completed = True
        with suppress(Exception):
            if not self.recording.only_results and only_says_built(model):
                build_by_tracing(model, _inputs(like))


def _in_brief(error: Exception) -> str:
    """What TensorFlow says of code that it has rewritten ends with the error, after a page of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if lines[0] == "in user code:" else lines[0]


def _inputs(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple) else batch


def _run_once(model: Any, inputs: Any) -> None:
    strategy = model.distribute_strategy
    one = tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0][:1], inputs
    )
    with strategy.scope():
        model(one)
