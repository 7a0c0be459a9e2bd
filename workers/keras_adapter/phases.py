"""Where a Keras hook puts itself between a model and the functions that Keras calls for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from smdist.identity import ModeKeys
from smdist.planning import Planner
from smdist.workers import horovod_support as horovod
from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.hook.step_clock import StepClock
from smdist.workers.keras_adapter.in_graph_capture import Inline, Owner
from smdist.workers.keras_adapter.phase import Phase, is_tuned, steps_per_execution
from smdist.workers.keras_adapter.recording import Recording
from smdist.workers.keras_adapter.stateful_random import OneFunction, note_turn, turn_after
from smdist.workers.keras_adapter.step_runner import Inside

__all__ = ["Phases", "Place"]


class Place(NamedTuple):
    """This process in its job."""

    processes: int = 1
    replicas: int = 1  # of each process


class Phases:
    def __init__(
        self, recording: Recording, clock: StepClock, planner: Planner, errors: ErrorPolicy
    ) -> None:
        self._recording, self._clock = recording, clock
        self._inside = Inside(recording, errors)
        self._planner, self._errors = planner, errors
        self._phases: list[Phase] = []
        # What has begun and not ended, unless it was left by an exception: the innermost last.
        self._begun: list[tuple[str, weakref.ref[Any]]] = []

    @property
    def running(self) -> bool:
        """Is a batch of `fit`, `evaluate` or `predict` on its way?"""
        return any(phase.running for phase in self._phases)

    # -- what Keras says ----------------------------------------------------------------------

    def begin(self, model: Any, kind: str, place: Place, *, early: bool = False) -> None:
        """`fit`, `evaluate` or `predict` begins; `early`: or may be about to."""
        if not early:
            self._forget(model, kind)
            self._begun.append((kind, weakref.ref(model)))
        if getattr(model, "_cluster_coordinator", None) is not None:
            self._errors.warn_once(f"{model.name} runs in other processes and is not captured")
            return
        phase = self._own(model, kind) or self._install(model, kind, place)
        if not early:
            phase.begin()
        self._recording.phase_begins(model)

    def expect(self, model: Any, kind: str) -> None:
        """A batch is about to be there."""
        for phase in self._phases:
            if phase.kind == kind and phase.model is model:
                phase.expect()

    def end(self, model: Any, kind: str) -> Any:
        """The model that goes on, if a callback of its `fit` has run this; else None."""
        within = kind != "train" and self._trains(model)
        for phase in self._of(model):
            if not within:
                self._take_out(phase)
            elif phase.kind == kind:
                phase.rest()  # there may be more to validate
        if within:
            self._recording.enter(ModeKeys.TRAIN)
        return self._resume(model, kind)

    def _resume(self, model: Any, kind: str) -> Any:
        self._forget(model, kind)
        outer = self._begun[-1][1]() if self._begun else None
        if outer is not None:
            self._recording.phase_begins(outer)
        return outer

    def _forget(self, model: Any, kind: str) -> None:
        """That has ended, or was left; and models that are gone."""
        self._begun = [
            (k, seen)
            for k, seen in self._begun
            if seen() is not None and (k != kind or seen() is not model)
        ]

    def _step_aside(self, phase: Phase) -> None:
        """`phase` was called by somebody who did not tell this hook."""
        if phase not in self._phases:
            return
        if phase.kind == "train":  # `fit` was left by an exception, and this is another one
            for other in self._of(phase.model):
                self._take_out(other)
        elif phase.begun and not self._trains(phase.model):
            for other in self._of(phase.model):
                if other is phase or not other.begun:
                    self._take_out(other)

    # -- on the model -------------------------------------------------------------------------

    def _of(self, model: Any) -> list[Phase]:
        return [phase for phase in self._phases if phase.model is model]

    def _trains(self, model: Any) -> bool:
        return any(phase.kind == "train" for phase in self._of(model))

    def _own(self, model: Any, kind: str) -> Phase | None:
        return next((p for p in _standing(model, kind) if p in self._phases), None)

    def _install(self, model: Any, kind: str, place: Place) -> Phase:
        if kind == "train" and max(place) > 1:
            self._check_stage(model)
        inline, whole = None, True
        if place.processes > 1 and not model.run_eagerly:
            inline = self._inline(model, kind, place)
            whole = inline is not None
        attribute = f"{kind}_function"
        if _function(model, kind) is None:
            _make(model, kind)
        phase = Phase(
            self._inside,
            self._clock,
            model,
            kind,
            getattr(model, attribute),
            self._step_aside,
            inline,
            whole=whole,
        )
        self._phases.append(phase)
        setattr(model, attribute, phase)
        return phase

    def _check_stage(self, model: Any) -> None:
        if horovod.reducing(model.optimizer) is not None:
            return
        if horovod.is_running("tensorflow"):
            if self._recording.may_want_gradients(model):
                self._errors.warn_once(
                    f"the gradients of {model.name} are captured as its optimizer is given them: "
                    "reduced, if its train_step does that itself (hvd.DistributedGradientTape); with "
                    "hvd.DistributedOptimizer stage_gradients chooses"
                )
        elif self._recording.synced:
            self._errors.warn_once(
                f"the gradients of {model.name} are those that each worker computed: "
                "stage_gradients='synced' knows the reduction of hvd.DistributedOptimizer alone"
            )

    def _inline(self, model: Any, kind: str, place: Place) -> Inline | None:
        """In a job of several processes the function must stay Keras'."""
        why = ""
        if place.replicas > 1:
            why = "each of its processes has several replicas"
        elif steps_per_execution(model) > 1 or is_tuned(model):
            why = (
                "steps_per_execution runs several steps as one; what their last one gives is saved "
                "at the last of them that is due"
            )
        elif model.jit_compile:
            why = "XLA lets nothing out; compile the model with jit_compile=False"
        if why:
            self._errors.warn_once(f"only losses and metrics of {model.name} are captured: {why}")
            return None
        inlines = self._recording.models.known(model).inlines
        inline = inlines.get(kind)
        if inline is not None and inline.function is _function(model, kind):
            inline.install()
            return inline
        hook = Owner(self._recording, self._planner, self._errors, lambda: _make(model, kind))
        inline = Inline(hook, model, kind)
        inline.install()
        inlines[kind] = inline
        _make(model, kind, inline)  # what was traced before does not tell
        return inline

    def _take_out(self, phase: Phase) -> None:
        attribute = f"{phase.kind}_function"
        if getattr(phase.model, attribute, None) is phase:
            setattr(phase.model, attribute, phase.below)
        for above in _standing(phase.model, phase.kind):
            if above.below is phase:
                above.below = phase.below
        if isinstance(phase.original, OneFunction):
            phase.original.let_go(self._errors)
        if phase.inline is not None:
            phase.inline.remove()
        phase.rest()  # Keras 2 may go on calling it
        self._phases.remove(phase)

    def uninstall(self) -> None:
        for phase in tuple(self._phases):
            self._take_out(phase)
        for known in self._recording.models:
            for inline in known.inlines.values():
                inline.let_go()


def _standing(model: Any, kind: str) -> Iterator[Phase]:
    """The phases, of any hook, between the model and Keras' function: the outermost first."""
    found = getattr(model, f"{kind}_function", None)
    while isinstance(found, Phase):
        yield found
        found = found.below


def _function(model: Any, kind: str) -> Any:
    """Keras' own, if there is one."""
    found = getattr(model, f"{kind}_function", None)
    return found.original if isinstance(found, Phase) else found


def _make(model: Any, kind: str, *coming: Inline) -> None:
    """Let Keras make its function anew, below whatever phases stand there."""
    attribute = f"{kind}_function"
    phases, turn = list(_standing(model, kind)), turn_after(_function(model, kind))
    setattr(model, attribute, None)
    getattr(model, f"make_{attribute}")()
    note_turn(getattr(model, attribute), turn)
    for inline in (*coming, *(phase.inline for phase in phases)):
        if inline is not None:
            inline.stands_in(getattr(model, attribute), turn)
    if phases:
        phases[-1].below = getattr(model, attribute)
        setattr(model, attribute, phases[0])
