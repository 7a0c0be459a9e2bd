"""Captured steps of a job of several processes: Keras' own function hands over its tensors.

The processes meet in the collective operations of their steps. A process that ran another function
for a captured step would call collectives that the others do not know, and all would wait for ever.
So the function stays Keras' own. While it is traced, its step gets two conditional callbacks, one
before and one after it. Both test a variable that is true only in executions to be captured. No
collective is added, removed or reordered, whether the other processes capture or not.

What the graph can hand over is fixed when it is traced. Where more is wanted later, Keras makes and
traces its function again; that concerns this process only.

    arm, disarm, install, remove    training thread
    _before, _after                 training thread, while the step is traced
    _begin, _save                   a thread of TensorFlow, while the step runs
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from smdist.planning import StepPlan
from smdist.workers.keras_adapter.capture_set import CaptureSet, common, includes, select_stage
from smdist.workers.keras_adapter.model_building import is_built
from smdist.workers.keras_adapter.recording import KerasRecording
from smdist.workers.keras_adapter.step_function import reseed
from smdist.workers.keras_adapter.step_probes import StepProbes, dense
from smdist.workers.keras_adapter.step_runner import Execution, StepRunner
from smdist.workers.keras_adapter.variable_names import VariableNames, all_optimizers
from smdist.workers.tf_adapter.graph_callbacks import call_if
from smdist.workers.tf_adapter.tensor_access import (
    Array,
    array_of,
    flat_tensors,
    tf_variable,
    unconverted,
)

__all__ = ["InGraphStep"]

_RESEEDED = "_smdist_reseeded"
_PLANS = 16


class InGraphStep(StepRunner):
    """One for each model and kind of phase. It lives as long as Keras' function does."""

    def __init__(
        self, recording: KerasRecording, model: Any, kind: str, remake: Callable[[], None]
    ) -> None:
        """Make the step of `model`; `remake` has Keras make its function again."""
        self._recording: KerasRecording | None = recording  # None: the hook is closed
        self._model, self._kind, self._remake = model, kind, remake
        # Within the scope of a strategy a new variable concerns all processes. The scope belongs to
        # this thread, so the variable is made on another one.
        with ThreadPoolExecutor(1) as other_thread:
            self._flag = other_thread.submit(_make_flag).result()
        self.armed = False
        self._steps_seen = 0  # since `arm`
        self._was_unbuilt = False  # at the last trace
        self._step: Any = None  # as installed
        self._checked: deque[StepPlan] = deque(maxlen=_PLANS)  # nothing is missing for these
        self.use_function(None, 0)

    def use_function(self, function: Any, seed_offset: int) -> None:
        """Note that `function`, not traced yet, is Keras' function from now on."""
        self.function, self._seed_offset = function, seed_offset
        self._handed_over: CaptureSet | None = None  # by every trace of it
        self._omitted: set[str] = set()  # variables that a trace of it leaves out
        self._probed: list[Any] = []  # optimizers of its last trace

    # -- running ------------------------------------------------------------------------------

    def run_due(self, execution: Execution, source: Any, steps: int) -> Any:
        self._arm()
        try:
            result = execution.below(source)
        finally:
            self.disarm()
        recording = execution.recording
        if self._steps_seen:
            recording.save_results(self._kind, result)
            recording.close()
        else:
            if self._was_unbuilt:
                recording.errors.warn_once(
                    f"steps of {self._model.name} are not captured: it got its variables in its "
                    "first step. Build the model before fit (give it an input shape)"
                )
            recording.count_with_result(1, self._kind, result)
        return result

    def _arm(self) -> None:
        self._steps_seen = 0
        recording = self._recording
        if recording is not None and self._handed_over is not None:
            try:
                self._remake_if_needed(recording, self._handed_over)
            except Exception as error:  # noqa: BLE001 (the policy decides)
                recording.errors.on_exception(error, f"looking at {self._model.name}")
        self.armed = True
        self._flag.assign(value=True)

    def disarm(self) -> None:
        self._flag.assign(value=False)
        self.armed = False

    def _remake_if_needed(self, recording: KerasRecording, handed_over: CaptureSet) -> None:
        """Have the function made again if it cannot hand over what the next step wants."""
        optimizers = self._optimizers(recording)
        if list(map(id, optimizers)) != list(map(id, self._probed)):
            self._remake()
            return
        plan = recording.next_plan  # another object whenever the configuration has changed
        if plan in self._checked:
            return
        self._checked.append(plan)
        wanted = recording.wanted(plan, recording.names(self._model))
        omitted = any(plan.wants(name) is not None for name in self._omitted)
        if omitted or not includes(handed_over, wanted):
            self._remake()

    def _optimizers(self, recording: KerasRecording) -> list[Any]:
        if self._kind != "train":
            return []
        return all_optimizers(self._model, recording.optimizers)

    # -- on the model -------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap the step method of the model, on this instance only."""
        name, own = f"{self._kind}_step", vars(self._model)
        step: Any = self._around(getattr(self._model, name))
        step.before, step.removed = own.get(name), False
        self._step = own[name] = step

    def remove(self) -> None:
        """Restore the step method. Below the wrapper of another hook, wait until that is removed."""
        name, own = f"{self._kind}_step", vars(self._model)
        if self._step is not None:
            self._step.removed = True
        while getattr(own.get(name), "removed", False):
            before = own[name].before
            if before is None:
                del own[name]
            else:
                own[name] = before

    def release_hook(self) -> None:
        """Drop all references to the closed hook. Keras' function keeps its callbacks."""
        self._recording = None
        self._checked.clear()
        self._probed = []

    # -- tracing ------------------------------------------------------------------------------

    def _around(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            probes, optimizers, begun = self._before(data)
            if probes is None:
                return original(data)
            with probes.installed(optimizers):
                probes.begin(data)
                result = original(data)
            self._after(probes, begun)
            return result

        return step

    @unconverted
    def _before(self, data: Any) -> tuple[StepProbes | None, list[Any], Any]:
        self._reseed()
        recording = self._recording
        # A trace that makes variables of the model is followed by another one before it runs.
        self._was_unbuilt = not is_built(self._model)
        if self._was_unbuilt or recording is None:
            return None, [], None
        try:
            # The last trace, of the same step, may have made variables.
            names = recording.names(self._model, refresh=True)
            wanted = recording.wanted_on_any_step(names, self._kind)
            optimizers = self._optimizers(recording)
            begun = self._add_begin(recording, names, data)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            recording.errors.on_exception(
                error, f"tracing the {self._kind} step of {self._model.name}"
            )
            return None, [], None
        known = self._handed_over
        self._handed_over = wanted if known is None else common(wanted, known)
        self._probed = optimizers
        return StepProbes(names, wanted, recording.errors), optimizers, begun

    def _add_begin(self, recording: KerasRecording, names: VariableNames, data: Any) -> Any:
        """Add the callback that begins a captured step and hands over its variables."""
        found = recording.variables(names, self._kind)
        variables = [named for named in found if recording.wanted_anywhere(named.name)]
        described = [named.name for named in variables]
        self._omitted |= {named.name for named in found} - set(described)
        with tf.control_dependencies(flat_tensors(data)):  # without a batch there is no step
            return call_if(
                self._flag,
                lambda: [tf_variable(named.variable).read_value() for named in variables],
                _weak_callback(self._begin, described),
            )

    @unconverted
    def _after(self, probes: StepProbes, begun: Any) -> None:
        """Add the callback that hands over what the probes saw."""
        recording = self._recording
        if recording is None:
            return
        try:
            found = select_stage(probes.end(), recording.synced)
            if found:
                with tf.control_dependencies([begun]):
                    call_if(
                        self._flag,
                        lambda: [dense(value) for value in found.values()],
                        _weak_callback(self._save, list(found)),
                    )
        except Exception as error:  # noqa: BLE001 (the policy decides)
            recording.errors.on_exception(
                error, f"tracing the {self._kind} step of {self._model.name}"
            )

    def _reseed(self) -> None:
        graph = tf.compat.v1.get_default_graph()
        if not getattr(graph, _RESEEDED, False):  # the steps of several hooks share one graph
            setattr(graph, _RESEEDED, True)
            reseed(self._seed_offset)

    # -- while the step runs ------------------------------------------------------------------

    def _begin(self, names: list[str], arrays: tuple[Array, ...]) -> Any:
        recording = self._recording
        if recording is None:
            return np.bool_(True)
        try:
            self._steps_seen += 1
            recording.begin()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            recording.errors.on_exception(error, "beginning a step")
        return self._save(names, arrays)

    def _save(self, names: list[str], arrays: tuple[Array, ...]) -> Any:
        recording = self._recording
        if recording is None:
            return np.bool_(True)
        try:
            values = [(array,) for array in arrays]
            recording.replicas.offer(tuple(names), values, array_of)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            recording.errors.on_exception(error, "capturing a step")
        return np.bool_(True)


def _weak_callback(method: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Return a callback that does not keep the model alive.

    TensorFlow keeps a function that a graph calls, and all that it refers to, until the process ends.
    """
    reference = weakref.WeakMethod(method)

    def callback(*arrays: Array) -> Any:
        found = reference()
        return np.bool_(True) if found is None else found(names, arrays)

    return callback


def _make_flag() -> Any:
    with tf.device("CPU:0"):
        return tf.Variable(False, trainable=False, name="smdist_armed")
