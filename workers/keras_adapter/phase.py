"""The object that takes the place of Keras' function during `fit`, `evaluate` or `predict`.

Keras keeps one function per model and kind of phase and calls it for every execution. From the
beginning of a phase to its end a `Phase` stands in its place. All calls come from the training
thread. For each execution it does one of these:

    nothing due             call Keras' function and count
    anything due            hand the execution to the strategy (see `step_runner`)

A step is counted once its batch is there: the end of a dataset of unknown size is no step.

What stands below a phase may be the phase of another hook. The hook that takes a batch takes it for
all of them, and the step runs once.

Keras does not report the end of a `fit` that was left by an exception. Whether a call still belongs
to the `fit` with this hook follows from two things:

    model.history           is new in every `fit`; in Keras 2 also for `evaluate` and `predict`
    batch callbacks         Keras 3 calls them before each execution, Keras 2 only if a callback asks
                            for them; used for `evaluate` and `predict` only
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from smdist.identity import ModeKeys
from smdist.workers.keras_adapter.recording import KerasRecording
from smdist.workers.keras_adapter.step_runner import (
    StepCounter,
    StepRunner,
    is_autotuned,
    steps_per_execution,
)

__all__ = ["MODES", "Phase"]

MODES = {"train": ModeKeys.TRAIN, "test": ModeKeys.EVAL, "predict": ModeKeys.PREDICT}


class Phase:
    """One hook in one kind of phase of one model."""

    def __init__(
        self,
        recording: KerasRecording,
        model: Any,
        kind: str,
        runner: StepRunner,
        on_foreign_call: Callable[[Phase], None],
    ) -> None:
        """Prepare to replace the current function of `model`.

        `on_foreign_call` is called when Keras calls for a `fit`, `evaluate` or `predict` that this
        hook does not take part in.
        """
        self.model, self.kind, self.recording, self.runner = model, kind, recording, runner
        # Takes an iterator; in `predict` of Keras 3 a list of batches.
        self.below: Callable[[Any], Any] = getattr(model, f"{kind}_function")
        self.running = False  # tapes within it begin no steps
        self.begun = False
        self._mode, self._on_foreign_call = MODES[kind], on_foreign_call
        self._clock = recording.core.clock
        self._eager = bool(model.run_eagerly)
        self._single = (
            not self._eager and not is_autotuned(model) and steps_per_execution(model) == 1
        )
        self._active = self._expected = self._expects_calls = False
        self._history: Any = None
        self._joined: list[Phase] = []  # phases of other hooks that share the execution

    @property
    def keras_function(self) -> Callable[[Any], Any]:
        """Keras' own function, below the phases of all hooks."""
        return [self, *self._lower()][-1].below

    def _lower(self) -> Iterator[Phase]:
        below = self.below
        while isinstance(below, Phase):
            yield below
            below = below.below

    # -- whose call it is ---------------------------------------------------------------------

    def begin(self) -> None:
        """Treat the next calls as those of a phase with this hook."""
        self.begun = self._active = True
        self._expected = self._expects_calls = False
        self._history = getattr(self.model, "history", None)

    def suspend(self) -> None:
        """Treat the next calls, if any, as those of a phase without this hook."""
        self._active = False

    def expect_call(self) -> None:
        """Note that Keras has announced a batch."""
        self._expected = self._expects_calls = True

    def _is_ours(self) -> bool:
        if not self._active:
            return False
        if self._expects_calls:
            expected, self._expected = self._expected, False
            return expected
        history = getattr(self.model, "history", None)
        if history is self._history:
            return True
        # A callback may evaluate the model while it is trained; that history has no epochs.
        return self.kind == "train" and not hasattr(history, "epoch")

    # -- calls --------------------------------------------------------------------------------

    def __call__(self, source: Any) -> Any:
        if not self._is_ours():
            self._on_foreign_call(self)
            return self.below(source)
        clock = self._clock
        if self.runner.armed:  # an exception interrupted the last execution
            self.runner.disarm()
        self.running = True
        try:
            if self._single and clock.idle_forwards_left > 0 and clock.mode is self._mode:
                result = self.below(source)
                clock.idle_forwards_left -= 1  # only now is it certain that there was a batch
                return result
            return self._execute(source)
        finally:
            self.running = False
            while self._joined:
                self._joined.pop().running = False

    def _execute(self, source: Any) -> Any:
        recording = self.recording
        if not recording.enter(self._mode):
            return self.below(source)
        steps = steps_per_execution(self.model)
        if self._eager or recording.due_within(steps):
            return self.runner.run_due(self, source, steps)
        counter = StepCounter(self.model, self.kind, steps)
        result = self.below(source)
        recording.count(counter.passed(source))
        return result

    def join_waiting(self) -> list[KerasRecording]:
        """Return the recordings of other hooks whose phases wait below, and mark those running."""
        for phase in list(self._lower()):
            if not phase._is_ours():
                phase._on_foreign_call(phase)
            elif phase.recording.enter(phase._mode):
                phase.running = True
                self._joined.append(phase)
        return [phase.recording for phase in self._joined]
