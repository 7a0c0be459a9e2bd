"""A hook's place in `fit`, `evaluate` and `predict`.

From the phase's begin to its end a `Phase` stands where Keras keeps the function it calls for every
execution. On executions without a due step it calls that function and counts. A step is counted
once its batch is there: the end of a dataset whose size nobody knows is no step.

    nothing due             Keras' function
    only results wanted     Keras' function; losses and metrics are what it returns
    anything else           the batch is taken, weights are captured, and the step runs as a
                            function of ours that also returns what is wanted of its inside; in a
                            job of several processes it stays Keras' (see `Inline`)

What stands below a phase may be that of another hook. Whoever takes a batch takes it for all of them:
the step runs once.

Nobody says that a phase ended if `fit` was left by an exception. Whether a call still is of the `fit`
that the hook is part of shows in what Keras does for everybody:

    model.history           is new in every `fit`; in Keras 2 also for `evaluate` and `predict`
    batches                 Keras 3 tells its callbacks of each before it calls, Keras 2 if any of
                            them asks for it; asked of `evaluate` and `predict` alone

Where a step draws random numbers `original` may come to be a function of ours for all steps (see
`keep_to_one`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from smdist.identity import ModeKeys
from smdist.workers.hook.step_clock import StepClock

if TYPE_CHECKING:
    from smdist.workers.keras_adapter.in_graph_capture import Inline
    from smdist.workers.keras_adapter.step_runner import Inside

__all__ = ["MODES", "Phase", "is_tuned", "one_by_one", "steps_per_execution"]

MODES = {"train": ModeKeys.TRAIN, "test": ModeKeys.EVAL, "predict": ModeKeys.PREDICT}


class Phase:
    def __init__(
        self,
        inside: Inside,
        clock: StepClock,
        model: Any,
        kind: str,
        below: Callable[[Any], Any],
        strange: Callable[[Phase], None],
        inline: Inline | None = None,
        *,
        whole: bool = True,
    ) -> None:
        """`below` takes an iterator; that of Keras 3 for `predict` a list of batches. `strange` is
        told of a call that is none of this hook's business.

        Not `whole`: the inside of a step is out of reach.
        """
        self.model, self.kind, self.below = model, kind, below
        self.inline, self._whole = inline, whole
        self.running = False  # tapes within it begin no steps
        self.inside, self.recording = inside, inside.recording
        self._clock, self._mode = clock, MODES[kind]
        self._strange = strange
        self._eager = bool(model.run_eagerly)
        self._tuned = is_tuned(model)
        self._single = not self._eager and not self._tuned and steps_per_execution(model) == 1
        self._quick = False  # until its function is settled
        self.begun = self._on = False
        self._told = self._tells = False
        self._history: Any = None

    @property
    def original(self) -> Callable[[Any], Any]:
        """Keras' own function, or that in its place."""
        return [self, *self._lower()][-1].below

    @original.setter
    def original(self, function: Callable[[Any], Any]) -> None:
        [self, *self._lower()][-1].below = function

    def _lower(self) -> Iterator[Phase]:
        """Those of other hooks that stand below this one."""
        below = self.below
        while isinstance(below, Phase):
            yield below
            below = below.below

    # -- whose call it is ---------------------------------------------------------------------

    def begin(self) -> None:
        """The coming calls are of a `fit`, `evaluate` or `predict` with this hook."""
        self.begun = self._on = True
        self._told = self._tells = False
        self._history = getattr(self.model, "history", None)

    def rest(self) -> None:
        """The coming calls, if any, are of somebody else."""
        self._on = False

    def expect(self) -> None:
        """Keras says that it is about to call."""
        self._told = self._tells = True

    def _is_ours(self) -> bool:
        if not self._on:
            return False
        if self._tells:
            told, self._told = self._told, False
            return told
        history = getattr(self.model, "history", None)
        if history is self._history:
            return True
        # A callback may evaluate the model while it is trained; that history has no epochs.
        return self.kind == "train" and not hasattr(history, "epoch")

    # -- calls --------------------------------------------------------------------------------

    def __call__(self, source: Any) -> Any:
        if not self._is_ours():
            self._strange(self)
            return self.below(source)
        clock = self._clock
        if self.inline is not None and self.inline.armed:  # an exception came before it was not
            self.inline.disarm()
        self.running = True
        try:
            if self._quick and clock.idle_forwards_left > 0 and clock.mode is self._mode:
                result = self.below(source)
                clock.idle_forwards_left -= 1  # now that there was a batch
                return result
            result = self._attentive(source)
            self.inside.step_ran()
            return result
        finally:
            self.running = False

    def _attentive(self, source: Any) -> Any:
        recording = self.recording
        if not recording.enter(self._mode):
            return self.below(source)
        steps = steps_per_execution(self.model)
        self._quick = self._single
        due = recording.due_within(steps)
        if due and (self.inline is not None or not self._whole):
            return self._from_inside(source, steps)
        if not self._eager and self.inline is None and self._whole:
            self.inside.keep_to_one(self, source, [phase.inside for phase in self._lower()])
        several = steps > 1 or self._tuned
        if self._eager or (due and several):
            others = self._others()
            return one_by_one(self.kind, source, steps, lambda batch: self._recorded(batch, others))
        if several:
            before = self._counted()
            result = self.below(source)
            recording.passed(self._since(before, source, steps))
            return result
        if not due:
            result = self.below(source)
            recording.passed(1)
            return result
        if recording.wants_results_only(self.model):
            return self._from_inside(source, 1)
        return self._recorded(next(_batches(source)), self._others())

    def _from_inside(self, source: Any, steps: int) -> Any:
        """An execution of Keras' function in which something is due."""
        recording, inline = self.recording, self.inline
        several = steps > 1 or self._tuned
        before = self._counted() if several else None
        if inline is not None:
            inline.arm()
        try:
            result = self.below(source)
        finally:
            if inline is not None:
                inline.disarm()
        if inline is not None and inline.seen:
            recording.save_results(self.kind, result)
            recording.close()
            return result
        if inline is not None:
            inline.missed()
        count = self._since(before, source, steps) if several else 1
        recording.passed_at_once(count, self.kind, result)
        return result

    def _recorded(self, batch: Any, others: list[Phase]) -> Any:
        """One step, due or not, on a batch that is there."""
        phases = [self, *others]
        try:
            for phase in phases:
                phase.running = True
                phase.inside.build(self.model, batch)
                phase.recording.begin(self.model)
            result = self.inside.run(self, batch, [other.inside for other in others])
            for phase in phases:
                phase.recording.save_results(self.kind, result)
                phase.recording.close()
        finally:
            for other in others:
                other.running = False
        return result

    def _others(self) -> list[Phase]:
        """Phases of other hooks that wait for the execution that this one takes for itself."""
        found: list[Phase] = []
        for phase in list(self._lower()):
            if not phase._is_ours():
                phase._strange(phase)
            elif phase.recording.enter(phase._mode):
                found.append(phase)
        return found

    # -- steps_per_execution ------------------------------------------------------------------

    def _counted(self) -> int | None:
        """How many steps there were, where Keras itself counts them."""
        counter: Any = getattr(self.model, f"_{self.kind}_counter", None)
        if counter is None and self.kind == "train" and self.model.optimizer is not None:
            counter = _updates(self.model.optimizer)
        return None if counter is None else int(counter.numpy())

    def _since(self, before: int | None, source: Any, steps: int) -> int:
        now = self._counted()
        counted = 0 if before is None or now is None else now - before
        if counted > 0:
            # A step may update several times. How many steps were asked for may have changed.
            return counted if self._tuned else min(counted, steps)
        return len(source) if isinstance(source, list) else steps


def _updates(optimizer: Any) -> Any:
    """Counts all of them: `iterations` leaves out those that only accumulate gradients. It stands
    still where a model has optimizers of its own."""
    inner = getattr(optimizer, "inner_optimizer", None)
    optimizer = optimizer if inner is None else inner
    counter = getattr(optimizer, "_iterations", None)
    return optimizer.iterations if counter is None else counter


def one_by_one(kind: str, source: Any, steps: int, run: Callable[[Any], Any]) -> Any:
    """Take up to `steps` batches and `run` each: the result of an execution of so many."""
    results: list[Any] = []
    batches = _batches(source)
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


def is_tuned(model: Any) -> bool:
    """`steps_per_execution="auto"` of Keras 2: another thread changes it while the model is trained."""
    return bool(getattr(model, "autotune_steps_per_execution", False))


def _batches(source: Any) -> Iterator[Any]:
    return iter(source) if isinstance(source, (list, tuple)) else source
