"""Counting steps: one global counter and one per mode. Pure.

What begins a step, by `step_on`:

    forward     every forward of a counting root
    optimizer   the first forward after the optimizer's last update; in EVAL and PREDICT, where no
                optimizer runs, every forward
    manual      the first forward, or the first value saved, after `hook.step()`

In mode GLOBAL the mode's counter is the global one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys, StepRef

__all__ = ["AT_ONCE", "StepClock", "StepOn"]

StepOn = Literal["forward", "optimizer", "manual"]

AT_ONCE = -1


class StepClock:
    """`step` and `mode_step` number the last step that began, -1 before the first.

    `due` is the step of the current mode from which on somebody wants to be told; `AT_ONCE` is the
    next one. A change of mode sets it to `AT_ONCE`.
    """

    __slots__ = (
        "_joins",
        "_latest",
        "_others",
        "_step_on",
        "due",
        "in_step",
        "mode",
        "mode_step",
        "step",
    )

    def __init__(self, step_on: StepOn = "forward") -> None:
        self.mode = ModeKeys.GLOBAL
        self.step = self.mode_step = -1
        self.due = AT_ONCE
        self.in_step = False
        self._latest = -1  # global number of the current mode's last step
        self._others: dict[ModeKeys, tuple[int, int]] = {}  # the same of modes not current
        self.step_on = step_on

    # -- every step ---------------------------------------------------------------------------

    def forward(self) -> bool:
        """A counting root runs. True: a step began, and it is one to be told of."""
        if self.in_step and self._joins:
            return False
        return self.begin()

    def begin(self) -> bool:
        self.step = self._latest = step = self.step + 1
        self.in_step = True
        self.mode_step = step = step if self.mode is ModeKeys.GLOBAL else self.mode_step + 1
        return step >= self.due

    def end(self) -> None:
        """The optimizer has updated, or the caller said so: the step is over."""
        self.in_step = False

    # -- questions ----------------------------------------------------------------------------

    @property
    def has_step(self) -> bool:
        """Did the current mode have a step yet?"""
        return self._latest >= 0

    @property
    def ref(self) -> StepRef:
        """The current mode's last step, or the one that would be its first."""
        if self.has_step:
            return StepRef(self.mode, self.mode_step, self._latest)
        coming = self.step + 1
        return StepRef(self.mode, coming if self.mode is ModeKeys.GLOBAL else 0, coming)

    @property
    def mode_steps(self) -> dict[ModeKeys, int]:
        steps = {mode: mode_step for mode, (mode_step, _) in self._others.items()}
        steps[self.mode] = self.mode_step
        steps[ModeKeys.GLOBAL] = self.step
        return steps

    # -- changes ------------------------------------------------------------------------------

    def set_mode(self, mode: ModeKeys) -> None:
        if mode is self.mode:
            return
        self._others[self.mode] = (self.mode_step, self._latest)
        self.mode_step, self._latest = self._others.pop(mode, (-1, -1))
        self.mode = mode
        self.in_step = False
        self.due = AT_ONCE
        self._settle()

    @property
    def step_on(self) -> StepOn:
        return self._step_on

    @step_on.setter
    def step_on(self, value: StepOn) -> None:
        if value not in get_args(StepOn):
            known = ", ".join(map(repr, get_args(StepOn)))
            raise ConfigurationError(f"step_on={value!r} is not one of {known}")
        self._step_on: StepOn = value
        self._settle()

    def _settle(self) -> None:
        updates = self.mode not in (ModeKeys.EVAL, ModeKeys.PREDICT)
        self._joins = self._step_on == "manual" or (self._step_on == "optimizer" and updates)

    # -- across processes ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data, to be kept in a checkpoint."""
        last = {**self._others, self.mode: (self.mode_step, self._latest)}
        return {"step": self.step, "modes": {m.name: list(pair) for m, pair in last.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state()` was taken: the next step has the next number."""
        try:
            step = int(state["step"])
            last = {ModeKeys[m]: (int(a), int(b)) for m, (a, b) in state["modes"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"not the state of a hook: {error!r}; pass what hook.state_dict() returned"
            ) from error
        self.step, self._others = step, last
        self.mode_step, self._latest = last.pop(self.mode, (-1, -1))
        self.in_step = False
        self.due = AT_ONCE
