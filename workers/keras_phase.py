"""A hook's place in `fit`, `evaluate` and `predict`.

From the phase's begin to its end a `Phase` stands where Keras keeps the function it calls for every
execution. On executions without a due step it calls that function and counts. A step is counted
once its batch is there: the end of a dataset whose size nobody knows is no step.

    nothing due             Keras' function
    only results wanted     Keras' function; losses and metrics are what it returns
    anything else           the batch is taken, weights are captured, and the step runs as a
                            function of ours that also returns what is wanted of its inside; in a
                            job of several processes it stays Keras' (see `Inline`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from smdist.identity import ModeKeys
from smdist.workers.steps import StepClock

if TYPE_CHECKING:
    from smdist.workers.keras_inline import Inline
    from smdist.workers.keras_recording import Recording

__all__ = ["MODES", "Phase", "steps_per_execution"]

MODES = {"train": ModeKeys.TRAIN, "test": ModeKeys.EVAL, "predict": ModeKeys.PREDICT}


class Phase:
    def __init__(
        self,
        recording: Recording,
        clock: StepClock,
        model: Any,
        kind: str,
        original: Callable[[Any], Any],
        inline: Inline | None = None,
        *,
        whole: bool = True,
    ) -> None:
        """`original` takes an iterator; that of Keras 3 for `predict` a list of batches.

        Not `whole`: the inside of a step is out of reach.
        """
        self.model, self.kind, self.original = model, kind, original
        self.inline, self._whole = inline, whole
        self._recording, self._clock, self._mode = recording, clock, MODES[kind]
        self._eager = bool(model.run_eagerly)
        self._single = not self._eager and steps_per_execution(self.model) == 1

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
        steps = steps_per_execution(self.model)
        due = recording.due_within(steps)
        if due and (self.inline is not None or not self._whole):
            return self._from_inside(source, steps)
        if self._eager or (due and steps > 1):
            return self._one_by_one(source, steps)
        if steps > 1:
            before = self._counted()
            result = self.original(source)
            recording.passed(self._since(before, source, steps))
            return result
        if not due:
            result = self.original(source)
            recording.passed(1)
            return result
        if recording.wants_results_only(self.model):
            return self._from_inside(source, 1)
        return self._recorded(next(_batches(source)))

    def _from_inside(self, source: Any, steps: int) -> Any:
        """An execution of Keras' function in which something is due."""
        recording, inline = self._recording, self.inline
        before = self._counted() if steps > 1 else None
        if inline is not None:
            inline.arm()
        try:
            result = self.original(source)
        finally:
            if inline is not None:
                inline.disarm()
        if inline is None or inline.seen == 0:
            with recording.without_variables():  # which are no longer what they were
                recording.passed(self._since(before, source, steps) if steps > 1 else 1)
        recording.save_results(self.kind, result)
        recording.close()
        return result

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


def steps_per_execution(model: Any) -> int:
    steps: Any = getattr(model, "_steps_per_execution", None)  # a variable in Keras 2
    if steps is None:
        steps = getattr(model, "steps_per_execution", None) or 1
    return int(steps.numpy() if hasattr(steps, "numpy") else steps)


def _batches(source: Any) -> Iterator[Any]:
    return iter(source) if isinstance(source, (list, tuple)) else source
