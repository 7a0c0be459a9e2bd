"""Count steps: one global counter and one per mode. Pure.

What begins a step, by `step_on`:

    forward     every forward of a counting root
    optimizer   the first forward after the optimizer's last update; in EVAL and PREDICT, where no
                optimizer runs, every forward
    manual      the first forward, or the first value saved, after `hook.step()`

Where a step spans several forwards (optimizer, manual), those of losses and of roots that do not count
begin one too, if none has begun. In mode GLOBAL the mode's counter is the global one.

A signal handler may raise at any moment. So new counts are computed first, and then assigned in
statements without calls and loops, between which no handler runs: a step is counted or it is not.
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

    `due` is the first step of the current mode that is reported; `NEXT_STEP` stands for the next one. A
    change of mode sets it to `NEXT_STEP`.

    `idle_forwards_left` counts down the forwards before it. While it is positive, a forward may subtract 1
    from it instead of calling `forward()`. That is all that an idle step costs; the step numbers follow
    from what was subtracted.
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
        # Steps that were reported, the last one last. The hook clears it when it has handled them.
        self.unreported: tuple[StepRef, ...] = ()
        self._latest = -1  # global number of the current mode's last step
        self._others: dict[ModeKeys, tuple[int, int]] = {}  # mode_step and latest of other modes
        self._spans_forwards = False
        self._step_on: StepOn = "forward"
        self.step_on = step_on

    # -- every step ---------------------------------------------------------------------------

    def forward(self) -> bool:
        """Count a forward of a counting root; True if a step began that is reported."""
        if self._spans_forwards and self._in_step:
            return False
        return self.begin()

    def begin(self, *, report: bool = True) -> bool:
        """Begin a step; True if it is reported. With `report=False` it is not among `unreported`."""
        self._count(self._idle_budget - self.idle_forwards_left + 1, report=report)
        return self._mode_step >= self._due

    def end(self) -> None:
        """End the step: the optimizer has updated, or the script says so."""
        self._apply_idle_forwards()
        self._in_step = False

    def _count(self, steps: int, *, report: bool = False) -> None:
        """Count `steps`, and compute how many idle forwards may follow."""
        step, mode_step = self._step + steps, self._mode_step + steps
        if self.mode is ModeKeys.GLOBAL:
            # Until a step is counted, the mode keeps the number of its own last one.
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
        """Return the idle forwards after step `last`; 0 where a forward is not always a step."""
        return 0 if self._spans_forwards else max(0, due - last - 1)

    def _apply_idle_forwards(self) -> None:
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
        """Check whether a step has ended and none has begun since: any module may begin the next."""
        return self._spans_forwards and not self._in_step

    @property
    def has_step(self) -> bool:
        """Check whether the current mode has had a step."""
        self._apply_idle_forwards()
        return self._latest >= 0

    @property
    def ref(self) -> StepRef:
        """Return the current mode's last step, or the one that would be its first."""
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
        """Return the counters as plain data, to be kept in a checkpoint."""
        self._apply_idle_forwards()
        last = {**self._others, self.mode: (self._mode_step, self._latest)}
        return {"step": self._step, "modes": {m.name: list(pair) for m, pair in last.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state()` was taken: the next step has the next number."""
        try:
            step = int(state["step"])
            last = {ModeKeys[m]: (int(a), int(b)) for m, (a, b) in state["modes"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"not the state of a hook ({error!r}); pass what hook.state_dict() returned"
            ) from error
        self._enter(self.mode, step, last)
