"""Where a Keras hook puts itself between a model and the functions that Keras calls for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from smdist.planning import Planner
from smdist.workers import horovod
from smdist.workers.keras_inline import Inline
from smdist.workers.keras_phase import Phase, steps_per_execution
from smdist.workers.keras_recording import Recording
from smdist.workers.mishaps import Mishaps
from smdist.workers.steps import StepClock

__all__ = ["Phases", "Place"]


class Place(NamedTuple):
    """This process in its job."""

    processes: int = 1
    replicas: int = 1  # of each process


class Phases:
    def __init__(
        self, recording: Recording, clock: StepClock, planner: Planner, mishaps: Mishaps
    ) -> None:
        self._recording, self._clock = recording, clock
        self._planner, self._mishaps = planner, mishaps
        self._phases: list[Phase] = []
        self._inlines: dict[tuple[int, str], tuple[Any, Inline]] = {}

    def begin(self, model: Any, kind: str, place: Place) -> None:
        """`fit`, `evaluate` or `predict` begins, or may be about to."""
        attribute = f"{kind}_function"
        if isinstance(getattr(model, attribute, None), Phase):
            self._recording.phase_begins(model)
            return
        if getattr(model, "_cluster_coordinator", None) is not None:
            self._mishaps.trouble(f"{model.name} runs in other processes and is not captured")
            return
        if kind == "train":
            self._check_stage(model, place)
        inline, whole = None, True
        if place.processes > 1 and not model.run_eagerly:
            inline = self._inline(model, kind, place)
            whole = inline is not None
        if getattr(model, attribute, None) is None:
            getattr(model, f"make_{attribute}")()
        function = getattr(model, attribute)
        if inline is not None:
            self._inlines[id(model), kind] = function, inline
        phase = Phase(self._recording, self._clock, model, kind, function, inline, whole=whole)
        self._phases.append(phase)
        setattr(model, attribute, phase)
        self._recording.phase_begins(model)

    def _check_stage(self, model: Any, place: Place) -> None:
        if self._recording.synced and max(place) > 1 and not horovod.reduces(model.optimizer):
            self._mishaps.trouble(
                f"the gradients of {model.name} are those that each worker computed: "
                "stage_gradients='synced' knows the reduction of hvd.DistributedOptimizer alone"
            )

    def _inline(self, model: Any, kind: str, place: Place) -> Inline | None:
        """In a job of several processes the function must stay Keras'."""
        why = ""
        if place.replicas > 1:
            why = "each of its processes has several replicas"
        elif steps_per_execution(model) > 1:
            why = "steps_per_execution runs several steps as one"
        elif model.jit_compile:
            why = "XLA lets nothing out; compile the model with jit_compile=False"
        if why:
            self._mishaps.trouble(f"only losses and metrics of {model.name} are captured: {why}")
            return None
        attribute = f"{kind}_function"
        function, inline = self._inlines.get((id(model), kind), (None, None))
        if inline is None or function is not getattr(model, attribute, None):
            inline = Inline(self._recording, self._planner, self._mishaps, model, kind)
            setattr(model, attribute, None)  # what was traced before does not tell
        inline.install()
        return inline

    def end(self, model: Any, kind: str) -> None:
        mine = [phase for phase in self._phases if phase.model is model]
        if kind == "test" and any(phase.kind == "train" for phase in mine):
            return  # there may be more to validate
        for phase in mine:
            self._take_out(phase)

    def _take_out(self, phase: Phase) -> None:
        attribute = f"{phase.kind}_function"
        if getattr(phase.model, attribute, None) is phase:
            setattr(phase.model, attribute, phase.original)
        if phase.inline is not None:
            phase.inline.remove()
        self._phases.remove(phase)

    def uninstall(self) -> None:
        for phase in tuple(self._phases):
            self._take_out(phase)
        self._inlines.clear()
