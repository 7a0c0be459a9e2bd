"""The interface of the strategies that run captured steps, and how executions are counted.

Keras calls one function per *execution*: one batch, or `steps_per_execution` batches. `Phase` counts
executions in which nothing is due and calls Keras' function for them. It hands the others to its
`StepRunner`:

    TracedStep          takes the batch itself and runs the step as a function with probes
    InGraphStep         calls Keras' function, which was traced so that it hands over its tensors
    ResultsOnly         calls Keras' function; only its losses and metrics are saved

All of it runs on the training thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from smdist.workers.keras_adapter.recording import KerasRecording

__all__ = [
    "Execution",
    "ResultsOnly",
    "StepCounter",
    "StepRunner",
    "is_autotuned",
    "run_for_results",
    "run_one_by_one",
    "steps_per_execution",
]


class Execution(Protocol):
    """What a strategy may use of the `Phase` that Keras called."""

    model: Any
    kind: str  # "train", "test" or "predict"
    recording: KerasRecording
    below: Callable[[Any], Any]  # the next phase, or Keras' function

    @property
    def keras_function(self) -> Callable[[Any], Any]: ...

    def join_waiting(self) -> list[KerasRecording]:
        """Return the recordings of other hooks whose phases wait below, and mark those running."""


class StepRunner(ABC):
    """Runs the executions of a phase in which a step is due, and records them."""

    armed = False  # whether Keras' function hands over its tensors

    @abstractmethod
    def run_due(self, execution: Execution, source: Any, steps: int) -> Any:
        """Run up to `steps` steps on the batches of `source`; return what Keras' function would."""

    def disarm(self) -> None:  # noqa: B027 (optional)
        """Undo what an exception left behind in the middle of `run_due`."""

    def remove(self) -> None:  # noqa: B027 (optional)
        """Remove what this strategy has put on the model."""


class ResultsOnly(StepRunner):
    """For functions whose inside is out of reach."""

    def run_due(self, execution: Execution, source: Any, steps: int) -> Any:
        return run_for_results(execution, source, steps)


def run_for_results(execution: Execution, source: Any, steps: int) -> Any:
    """Run Keras' function; save its losses and metrics at the last due step of the execution."""
    counter = StepCounter(execution.model, execution.kind, steps)
    result = execution.below(source)
    execution.recording.count_with_result(counter.passed(source), execution.kind, result)
    return result


class StepCounter:
    """Counts the steps of one execution; made before it, asked after it."""

    def __init__(self, model: Any, kind: str, steps: int) -> None:
        self._model, self._kind, self._steps = model, kind, steps
        self._several = steps > 1 or is_autotuned(model)
        self._before = self._read() if self._several else None

    def passed(self, source: Any) -> int:
        if not self._several:
            return 1
        now = self._read()
        counted = 0 if self._before is None or now is None else now - self._before
        if counted > 0:
            # A step may update several times; an autotuned number may have changed meanwhile.
            return counted if is_autotuned(self._model) else min(counted, self._steps)
        return len(source) if isinstance(source, list) else self._steps

    def _read(self) -> int | None:
        counter: Any = getattr(self._model, f"_{self._kind}_counter", None)
        if counter is None and self._kind == "train" and self._model.optimizer is not None:
            counter = _update_counter(self._model.optimizer)
        return None if counter is None else int(counter.numpy())


def _update_counter(optimizer: Any) -> Any:
    """Return the variable that counts all updates.

    `iterations` leaves out those that only accumulate gradients. It never changes where a
    `train_step` applies other optimizers.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    optimizer = optimizer if inner is None else inner
    counter = getattr(optimizer, "_iterations", None)
    return optimizer.iterations if counter is None else counter


def run_one_by_one(kind: str, source: Any, steps: int, run: Callable[[Any], Any]) -> Any:
    """Take up to `steps` batches, `run` each, and join the results as one execution would."""
    results: list[Any] = []
    batches: Iterator[Any] = iter(source) if isinstance(source, (list, tuple)) else source
    while len(results) < steps:
        try:
            batch = next(batches)
        except (StopIteration, tf.errors.OutOfRangeError):
            if not results:
                raise
            break
        results.append(run(batch))
    if kind != "predict" or len(results) == 1:
        return results[-1]
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *results)


def steps_per_execution(model: Any) -> int:
    steps: Any = getattr(model, "_steps_per_execution", None)  # a variable in Keras 2
    if steps is None:
        steps = getattr(model, "steps_per_execution", None) or 1
    return int(steps.numpy() if hasattr(steps, "numpy") else steps)


def is_autotuned(model: Any) -> bool:
    """Check for `steps_per_execution="auto"` of Keras 2, which another thread changes any time."""
    return bool(getattr(model, "autotune_steps_per_execution", False))
