"""A hook's place in `fit`, `evaluate` and `predict`.

From the phase's begin to its end a `Phase` stands where Keras keeps the function it calls for every
execution. On executions without a due step it calls that function and counts. A step is counted
once its batch is there: the end of a dataset whose size nobody knows is no step.

    nothing due             Keras' function
    only results wanted     Keras' function; losses and metrics are what it returns
    anything else           the batch is taken, weights are captured, and the step runs as a
                            function of ours that also returns what is wanted of its inside
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from smdist.identity import ModeKeys
from smdist.workers.steps import StepClock

if TYPE_CHECKING:
    from smdist.workers.keras_recording import Recording

__all__ = ["MODES", "Phase"]

MODES = {"train": ModeKeys.TRAIN, "test": ModeKeys.EVAL, "predict": ModeKeys.PREDICT}


class Phase:
    def __init__(
        self,
        recording: Recording,
        clock: StepClock,
        model: Any,
        kind: str,
        original: Callable[[Any], Any],
    ) -> None:
        """`original` takes an iterator; that of Keras 3 for `predict` a list of batches."""
        self.model, self.kind, self.original = model, kind, original
        self._recording, self._clock, self._mode = recording, clock, MODES[kind]
        self._eager = bool(model.run_eagerly)
        self._single = not self._eager and self._steps_per_execution() == 1

    def __call__(self, source: Any) -> Any:
        clock = self._clock
        if self._single and clock.quiet > 0 and clock.mode is self._mode:
            result = self.original(source)
            clock.quiet -= 1  # now that there was a batch
            return result
        return self._attentive(source)

    def _attentive(self, source: Any) -> Any:
        recording = self._recording
        if not recording.enter(self._mode):
            return self.original(source)
        steps = self._steps_per_execution()
        if self._eager or (steps > 1 and recording.due_within(steps)):
            return self._one_by_one(source, steps)
        if steps > 1:
            before = self._counted()
            result = self.original(source)
            recording.passed(self._since(before, source, steps))
            return result
        if not recording.due_within(1):
            result = self.original(source)
            recording.passed(1)
            return result
        if recording.wants_results_only(self.model):
            result = self.original(source)
            recording.begin()
            recording.save_results(self.kind, result)
            recording.close()
            return result
        return self._recorded(next(_batches(source)))

    def _one_by_one(self, source: Any, steps: int) -> Any:
        results: list[Any] = []
        batches = _batches(source)
        while len(results) < steps:
            try:
                batch = next(batches)
            except (StopIteration, tf.errors.OutOfRangeError):
                if not results:
                    raise
                break
            results.append(self._recorded(batch))
        if self.kind != "predict" or len(results) == 1:
            return results[-1]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *results)

    def _recorded(self, batch: Any) -> Any:
        """One step, due or not, on a batch that is there."""
        recording = self._recording
        recording.build(self.model, batch)
        recording.begin()
        result = recording.run(self, batch)
        recording.save_results(self.kind, result)
        recording.close()
        return result

    # -- steps_per_execution ------------------------------------------------------------------

    def _steps_per_execution(self) -> int:
        steps: Any = getattr(self.model, "_steps_per_execution", None)  # a variable in Keras 2
        if steps is None:
            steps = getattr(self.model, "steps_per_execution", None) or 1
        return int(steps.numpy() if hasattr(steps, "numpy") else steps)

    def _counted(self) -> int | None:
        """How many steps there were, where Keras itself counts them."""
        counter: Any = getattr(self.model, f"_{self.kind}_counter", None)
        if counter is None and self.kind == "train" and self.model.optimizer is not None:
            counter = self.model.optimizer.iterations
        return None if counter is None else int(counter.numpy())

    def _since(self, before: int | None, source: Any, steps: int) -> int:
        now = self._counted()
        if before is None or now is None:
            return len(source) if isinstance(source, list) else steps
        return max(now - before, 0)


def _batches(source: Any) -> Iterator[Any]:
    return iter(source) if isinstance(source, (list, tuple)) else source
