"""Captured steps of a single-process job: they run as a function with probes.

The function is the model's own step, traced so that it also returns what is wanted of its inside.
It is traced once per set of wanted tensors, and again where Keras would trace again. All calls come
from the training thread.

Several hooks may share one model. The hook that takes the batch runs the step once, for all.
"""

from __future__ import annotations

from typing import Any

from smdist.workers.keras_adapter.capture_set import CaptureSet, union
from smdist.workers.keras_adapter.model_building import build_model, complete_model, is_built
from smdist.workers.keras_adapter.model_cache import ModelCache
from smdist.workers.keras_adapter.recording import KerasRecording
from smdist.workers.keras_adapter.step_function import Outcome, StepFunction
from smdist.workers.keras_adapter.step_probes import StepProbes
from smdist.workers.keras_adapter.step_runner import (
    Execution,
    StepRunner,
    is_autotuned,
    run_for_results,
    run_one_by_one,
)
from smdist.workers.keras_adapter.variable_names import VariableNames, all_optimizers

__all__ = ["TracedStep"]

_Key = tuple[str, CaptureSet | None, tuple[int, ...]]  # kind, wanted tensors, ids of optimizers


class _Functions:
    """The functions of one model for the names it has now.

    Each stands beside Keras' function that it was made for: Keras makes a new one when the model is
    compiled again. Ids of optimizers are valid because the functions hold them.
    """

    def __init__(self) -> None:
        self.names: VariableNames | None = None
        self.completed = False
        self.by_key: dict[_Key, tuple[Any, StepFunction]] = {}


class TracedStep(StepRunner):
    """One for each hook, for all its models."""

    def __init__(self, recording: KerasRecording) -> None:
        self._recording = recording
        self._functions = ModelCache(_Functions)

    def uninstall(self) -> None:
        self._functions.clear()

    def run_due(self, execution: Execution, source: Any, steps: int) -> Any:
        model = execution.model
        one_step = steps == 1 and not is_autotuned(model) and not model.run_eagerly
        if one_step and self._recording.wants_results_only(model):
            return run_for_results(execution, source, steps)
        recordings = [self._recording, *execution.join_waiting()]
        return run_one_by_one(
            execution.kind,
            source,
            steps,
            lambda batch: self._run_step(execution, batch, recordings),
        )

    def _run_step(self, execution: Execution, batch: Any, recordings: list[KerasRecording]) -> Any:
        """Run one step, due or not, on a batch that is there."""
        model, kind = execution.model, execution.kind
        for recording in recordings:
            self._prepare(model, batch, recording)
            recording.begin(model)
        found = [recording.wanted_now(model) for recording in recordings]
        wanted = [one for one in found if any(one)]
        together = union(wanted) if wanted else None
        result, seen = self._call(execution, batch, together, recordings)
        for recording in recordings:
            if wanted:
                recording.save_seen(seen)
            recording.save_results(kind, result)
            recording.close()
        return result

    def _prepare(self, model: Any, batch: Any, recording: KerasRecording) -> None:
        if not is_built(model):
            build_model(model, batch, recording.errors)
            return
        functions = self._functions.of(model)
        if not functions.completed and not recording.only_results:
            functions.completed = True
            complete_model(model, batch)

    def _call(
        self,
        execution: Execution,
        batch: Any,
        wanted: CaptureSet | None,
        recordings: list[KerasRecording],
    ) -> Outcome:
        function = self._function(execution, wanted, recordings)
        try:
            return function(batch)
        except Exception as error:
            if not function.may_fail_to_trace:
                raise
            # The step has not run. If the script's own part is wrong, this raises its error.
            outcome = self._function(execution, None, recordings)(batch)
            for recording in recordings:
                doing = f"tracing the {execution.kind} step of {execution.model.name} with probes"
                recording.errors.on_exception(error, doing)
            return outcome

    def _function(
        self, execution: Execution, wanted: CaptureSet | None, recordings: list[KerasRecording]
    ) -> StepFunction:
        model, kind = execution.model, execution.kind
        optimizers = []
        if wanted is not None and (wanted.gradients or wanted.synced):
            wrapped = (optimizer for one in recordings for optimizer in one.optimizers)
            optimizers = all_optimizers(model, wrapped)
        cached = self._functions.of(model)
        names = None if wanted is None else self._recording.names(model)
        if names is not None and names is not cached.names:
            cached.names = names
            cached.by_key.clear()
        key = kind, wanted, tuple(map(id, optimizers))
        basis, function = cached.by_key.get(key, (None, None))
        if function is None or basis is not execution.keras_function:
            probes = None
            if wanted is not None and names is not None:
                probes = StepProbes(names, wanted, self._recording.errors)
            function = StepFunction(model, kind, probes, optimizers)
            cached.by_key[key] = execution.keras_function, function
        return function
