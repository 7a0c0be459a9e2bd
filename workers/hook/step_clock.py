"""Counting steps: one global counter and one per mode. Pure.

What begins a step, by `step_on`:

    forward     every forward of a counting root
    optimizer   the first forward after the optimizer's last update; in EVAL and PREDICT, where no
                optimizer runs, every forward
    manual      the first forward, or the first value saved, after `hook.step()`

Where a step spans several forwards (optimizer, manual), those of roots that do not count and of losses
begin one too, if none has begun.

In mode GLOBAL the mode's counter is the global one.

A signal handler may raise at any moment. Whatever is counted is computed first and then assigned in
statements that hold no call and no loop, awaiting_next_step which no handler runs: a step is counted or it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys, StepRef

__all__ = ["NEXT_STEP", "StepClock", "StepOn"]

StepOn = Literal["forward", "optimizer", "manual"]

NEXT_STEP = -1


class StepClock:
    """`step` and `mode_step` number the last step that began, -1 before the first.

    `due` is the step of the current mode from which on somebody wants to be told; `NEXT_STEP` is the
    next one. A change of mode sets it to `NEXT_STEP`.

    Forwards before it are a countdown: whoever sees one may take 1 from `idle_forwards_left` as long as it is
    positive, instead of calling `forward()`. That is all that a step costs on which nothing is due;
    the numbers follow from how much was taken.
    """

    __slots__ = (
        "_due",
        "_idle_budget",
        "_in_step",
        "_latest",
        "_mode_step",
        "_others",
        "_spans_forwards",
        "_step",
        "_step_on",
        "idle_forwards_left",
        "mode",
        "unreported",
    )

    def __init__(self, step_on: StepOn = "forward") -> None:
        self.mode = ModeKeys.GLOBAL
        self._step = self._mode_step = -1
        self.idle_forwards_left = self._idle_budget = 0
        self._in_step = False
        self._due = NEXT_STEP
        # Steps that began and were to be told of, the last one last: who is told clears it at the end.
        self.unreported: tuple[StepRef, ...] = ()
        self._latest = -1  # global number of the current mode's last step
        self._others: dict[ModeKeys, tuple[int, int]] = {}  # the same of modes not current
        self._spans_forwards = False
        self._step_on: StepOn = "forward"
        self.step_on = step_on

    # -- every step ---------------------------------------------------------------------------

    def forward(self) -> bool:
        """A counting root runs. True: a step began, and it is one to be told of."""
        if self._spans_forwards and self._in_step:
            return False
        return self.begin()

    def begin(self, *, report: bool = True) -> bool:
        """Begin a step. With `report=False` it is not among `unreported`."""
        self._count(self._idle_budget - self.idle_forwards_left + 1, report=report)
        return self._mode_step >= self._due

    def end(self) -> None:
        """The optimizer has updated, or the caller said so: the step is over."""
        self._apply_idle_forwards()
        self._in_step = False

    def _count(self, steps: int, *, report: bool = False) -> None:
        """Count `steps`, and grant the forwards that may pass from here on."""
        step, mode_step = self._step + steps, self._mode_step + steps
        if self.mode is ModeKeys.GLOBAL:
            # Until a step is counted it has the number of its own last one.
            mode_step = step if steps else self._mode_step
        idle = self._idle_forwards_after(
            step if self.mode is ModeKeys.GLOBAL else mode_step, self._due
        )
        unreported = self.unreported
        if report and mode_step >= self._due:
            unreported = (*unreported, StepRef(self.mode, mode_step, step))
        latest, in_step = (step, True) if steps else (self._latest, self._in_step)
        self._step, self._mode_step, self._latest = step, mode_step, latest
        self._in_step, self.unreported = in_step, unreported
        self.idle_forwards_left = self._idle_budget = idle

    def _idle_forwards_after(self, last: int, due: int) -> int:
        """Forwards can pass by being counted only where each of them is a step."""
        return 0 if self._spans_forwards else max(0, due - last - 1)

    def _apply_idle_forwards(self) -> None:
        """Count what has passed quietly."""
        self._count(self._idle_budget - self.idle_forwards_left)

    # -- questions ----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        self._apply_idle_forwards()
        return self._step

    @property
    def mode_step(self) -> int:
        self._apply_idle_forwards()
        return self._mode_step

    @property
    def in_step(self) -> bool:
        self._apply_idle_forwards()
        return self._in_step

    @property
    def awaiting_next_step(self) -> bool:
        """Was a step ended, and has none begun since? Whatever runs next begins one."""
        return self._spans_forwards and not self._in_step

    @property
    def has_step(self) -> bool:
        """Did the current mode have a step yet?"""
        self._apply_idle_forwards()
        return self._latest >= 0

    @property
    def ref(self) -> StepRef:
        """The current mode's last step, or the one that would be its first."""
        if self.has_step:
            return StepRef(self.mode, self._mode_step, self._latest)
        coming = self._step + 1
        return StepRef(self.mode, coming if self.mode is ModeKeys.GLOBAL else 0, coming)

    @property
    def mode_steps(self) -> dict[ModeKeys, int]:
        steps = {mode: mode_step for mode, (mode_step, _) in self._others.items()}
        steps[self.mode] = self.mode_step
        steps[ModeKeys.GLOBAL] = self.step
        return steps

    # -- changes ------------------------------------------------------------------------------

    @property
    def due(self) -> int:
        return self._due

    @due.setter
    def due(self, step: int) -> None:
        self._apply_idle_forwards()
        last = self._step if self.mode is ModeKeys.GLOBAL else self._mode_step
        idle = self._idle_forwards_after(last, step)
        self._due = step
        self.idle_forwards_left = self._idle_budget = idle

    def set_mode(self, mode: ModeKeys) -> None:
        if mode is self.mode:
            return
        self._apply_idle_forwards()
        others = {**self._others, self.mode: (self._mode_step, self._latest)}
        self._enter(mode, self._step, others)

    @property
    def step_on(self) -> StepOn:
        return self._step_on

    @step_on.setter
    def step_on(self, value: StepOn) -> None:
        if value not in get_args(StepOn):
            known = ", ".join(map(repr, get_args(StepOn)))
            raise ConfigurationError(f"step_on={value!r} is not one of {known}")
        self._apply_idle_forwards()
        spans = self._step_spans_forwards(value, self.mode)
        last = self._step if self.mode is ModeKeys.GLOBAL else self._mode_step
        idle = 0 if spans else max(0, self._due - last - 1)
        self._step_on, self._spans_forwards = value, spans
        self.idle_forwards_left = self._idle_budget = idle

    def _enter(self, mode: ModeKeys, step: int, modes: dict[ModeKeys, tuple[int, int]]) -> None:
        mode_step, latest = modes.pop(mode, (-1, -1))
        spans = self._step_spans_forwards(self._step_on, mode)
        self.mode, self._others, self._spans_forwards = mode, modes, spans
        self._step, self._mode_step, self._latest = step, mode_step, latest
        self._in_step, self._due = False, NEXT_STEP
        self.idle_forwards_left = self._idle_budget = 0  # the next one is due

    @staticmethod
    def _step_spans_forwards(step_on: StepOn, mode: ModeKeys) -> bool:
        updates = mode not in (ModeKeys.EVAL, ModeKeys.PREDICT)
        return step_on == "manual" or (step_on == "optimizer" and updates)

    # -- across processes ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data, to be kept in a checkpoint."""
        self._apply_idle_forwards()
        last = {**self._others, self.mode: (self._mode_step, self._latest)}
        return {"step": self._step, "modes": {m.name: list(pair) for m, pair in last.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state()` was taken: the next step has the next number."""
        try:
            step = int(state["step"])
            last = {ModeKeys[m]: (int(a), int(b)) for m, (a, b) in state["modes"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"not the state of a hook: {error!r}; pass what hook.state_dict() returned"
            ) from error
        self._enter(self.mode, step, last)
