"""Installs and removes the phases of one hook on the models that Keras runs with it.

`KerasHook` calls it from the callbacks of Keras, on the training thread: `begin` and `end` around
`fit`, `evaluate` and `predict`, `expect_call` before a batch, `uninstall` when the hook is closed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from smdist.identity import ModeKeys
from smdist.workers import horovod_support as horovod
from smdist.workers.keras_adapter.in_graph_step import InGraphStep
from smdist.workers.keras_adapter.model_cache import ModelCache
from smdist.workers.keras_adapter.phase import Phase
from smdist.workers.keras_adapter.recording import KerasRecording
from smdist.workers.keras_adapter.replicas import ReplicaLayout
from smdist.workers.keras_adapter.step_function import next_seed_offset, set_seed_offset
from smdist.workers.keras_adapter.step_runner import (
    ResultsOnly,
    StepRunner,
    is_autotuned,
    steps_per_execution,
)
from smdist.workers.keras_adapter.traced_step import TracedStep

__all__ = ["Phases"]


class Phases:
    """The phases of one hook, on all its models."""

    def __init__(self, recording: KerasRecording) -> None:
        self._recording = recording
        self._traced_step = TracedStep(recording)
        self._in_graph_steps: ModelCache[dict[str, InGraphStep]] = ModelCache(dict)
        self._phases: list[Phase] = []
        # Begun and not ended, the innermost last. One left by an exception stays until it is dropped.
        self._begun: list[tuple[str, weakref.ref[Any]]] = []

    @property
    def running(self) -> bool:
        """Whether a batch of `fit`, `evaluate` or `predict` is being processed."""
        return any(phase.running for phase in self._phases)

    # -- callbacks of Keras -------------------------------------------------------------------

    def begin(self, model: Any, kind: str, layout: ReplicaLayout, *, early: bool = False) -> None:
        """Install a phase at the beginning of `fit`, `evaluate` or `predict`.

        `early`: the phase may be about to begin, or not.
        """
        if not early:
            self._drop_begun(model, kind)
            self._begun.append((kind, weakref.ref(model)))
        if getattr(model, "_cluster_coordinator", None) is not None:
            self._recording.errors.warn_once(
                f"{model.name} is not captured: parameter servers run its steps in other processes"
            )
            return
        phase = self._installed(model, kind) or self._install(model, kind, layout)
        if not early:
            phase.begin()
        self._recording.use_model(model)

    def expect_call(self, model: Any, kind: str) -> None:
        """Note that Keras has announced a batch."""
        for phase in self._of(model):
            if phase.kind == kind:
                phase.expect_call()

    def end(self, model: Any, kind: str) -> Any:
        """Remove the phases of `model`, or suspend one that a callback of its `fit` has run.

        Return the model of the phase that goes on, None if there is none.
        """
        within_fit = kind != "train" and self._is_training(model)
        for phase in self._of(model):
            if not within_fit:
                self._remove(phase)
            elif phase.kind == kind:
                phase.suspend()  # a later epoch may validate again
        if within_fit:
            self._recording.enter(ModeKeys.TRAIN)
        self._drop_begun(model, kind)
        outer = self._begun[-1][1]() if self._begun else None
        if outer is not None:
            self._recording.use_model(outer)
        return outer

    def _drop_begun(self, model: Any, kind: str) -> None:
        """Forget phases of that model and kind, and those whose model is gone."""
        self._begun = [
            (k, reference)
            for k, reference in self._begun
            if reference() is not None and (k != kind or reference() is not model)
        ]

    def _on_foreign_call(self, phase: Phase) -> None:
        """Remove phases left behind by an exception: Keras runs the model without this hook."""
        if phase not in self._phases:
            return
        if phase.kind == "train":
            for other in self._of(phase.model):
                self._remove(other)
        elif phase.begun and not self._is_training(phase.model):
            for other in self._of(phase.model):
                if other is phase or not other.begun:
                    self._remove(other)

    # -- on the model -------------------------------------------------------------------------

    def _of(self, model: Any) -> list[Phase]:
        return [phase for phase in self._phases if phase.model is model]

    def _is_training(self, model: Any) -> bool:
        return any(phase.kind == "train" for phase in self._of(model))

    def _installed(self, model: Any, kind: str) -> Phase | None:
        return next((p for p in _stack(model, kind) if p in self._phases), None)

    def _install(self, model: Any, kind: str, layout: ReplicaLayout) -> Phase:
        if kind == "train" and max(layout) > 1:
            self._check_gradient_stage(model)
        runner: StepRunner = self._traced_step
        if layout.processes > 1 and not model.run_eagerly:
            runner = self._in_graph_step(model, kind, layout)
        if _keras_function(model, kind) is None:
            _make_function(model, kind)
        phase = Phase(self._recording, model, kind, runner, self._on_foreign_call)
        self._phases.append(phase)
        setattr(model, f"{kind}_function", phase)
        return phase

    def _check_gradient_stage(self, model: Any) -> None:
        """Warn where `stage_gradients` cannot be honoured."""
        if horovod.reducing(model.optimizer) is not None:
            return
        errors = self._recording.errors
        if horovod.is_running("tensorflow"):
            if self._recording.may_want_gradients(model):
                errors.warn_once(
                    f"gradients of {model.name} are captured as its optimizer gets them, so reduced "
                    "if train_step reduces them. Use hvd.DistributedOptimizer to choose the stage"
                )
        elif self._recording.synced:
            errors.warn_once(
                "stage_gradients='synced' is only supported with hvd.DistributedOptimizer; "
                f"capturing each worker's local gradients of {model.name} instead"
            )

    def _in_graph_step(self, model: Any, kind: str, layout: ReplicaLayout) -> StepRunner:
        why = ""
        if layout.replicas > 1:
            why = "each of several processes has several replicas"
        elif steps_per_execution(model) > 1 or is_autotuned(model):
            why = "steps_per_execution runs several steps as one in a job of several processes"
        elif model.jit_compile:
            why = "XLA lets nothing out; compile the model with jit_compile=False"
        if why:
            self._recording.errors.warn_once(
                f"only losses and metrics of {model.name} are captured: {why}"
            )
            return ResultsOnly()
        steps = self._in_graph_steps.of(model)
        step = steps.get(kind)
        if step is not None and step.function is _keras_function(model, kind):
            step.install()
            return step
        step = InGraphStep(self._recording, model, kind, lambda: _make_function(model, kind))
        step.install()
        steps[kind] = step
        _make_function(model, kind, step)  # what was traced before has no callbacks
        return step

    def _remove(self, phase: Phase) -> None:
        attribute = f"{phase.kind}_function"
        if getattr(phase.model, attribute, None) is phase:
            setattr(phase.model, attribute, phase.below)
        for above in _stack(phase.model, phase.kind):
            if above.below is phase:
                above.below = phase.below
        phase.runner.remove()
        phase.suspend()  # Keras 2 may go on calling it
        self._phases.remove(phase)

    def uninstall(self) -> None:
        """Leave all models as they were."""
        for phase in tuple(self._phases):
            self._remove(phase)
        for steps in self._in_graph_steps:
            for step in steps.values():
                step.release_hook()
        self._in_graph_steps.clear()
        self._traced_step.uninstall()


def _stack(model: Any, kind: str) -> Iterator[Phase]:
    """Yield the phases, of any hook, between the model and Keras' function, outermost first."""
    found = getattr(model, f"{kind}_function", None)
    while isinstance(found, Phase):
        yield found
        found = found.below


def _keras_function(model: Any, kind: str) -> Any:
    found = getattr(model, f"{kind}_function", None)
    return found.keras_function if isinstance(found, Phase) else found


def _make_function(model: Any, kind: str, *new_steps: InGraphStep) -> None:
    """Have Keras make its function again, below the phases that stand there."""
    attribute = f"{kind}_function"
    phases, seed_offset = list(_stack(model, kind)), next_seed_offset(_keras_function(model, kind))
    setattr(model, attribute, None)
    getattr(model, f"make_{attribute}")()
    function = getattr(model, attribute)
    set_seed_offset(function, seed_offset)
    for runner in (*new_steps, *(phase.runner for phase in phases)):
        if isinstance(runner, InGraphStep):
            runner.use_function(function, seed_offset)
    if phases:
        phases[-1].below = function
        setattr(model, attribute, phases[0])
