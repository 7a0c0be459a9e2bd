"""`Rule`: a condition over one or several trials, evaluated at global steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from smdist.errors import RuleEvaluationConditionMet
from smdist.rules.req_tensors import RequiredTensors
from smdist.trials import no_refresh

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smdist.trials import Trial

__all__ = ["Rule"]


class Rule(ABC):
    """Base class of rules: `invoke_at_step` returns whether the condition holds.

    For each step, `invoke` waits until the step is available and stops refreshing the trials. Then it
    calls `set_required_tensors`, fetches the tensors in `req_tensors`, and calls `invoke_at_step`.
    """

    def __init__(
        self,
        base_trial: Trial,
        action_str: str = "",
        other_trials: Iterable[Trial] | None = None,
    ) -> None:
        self.base_trial = base_trial
        self.other_trials = None if other_trials is None else list(other_trials)
        self.trials = [base_trial, *(self.other_trials or ())]
        self.req_tensors = RequiredTensors(base_trial, self.other_trials)
        self.logger = base_trial.logger
        self.rule_name = type(self).__name__
        self.action_str = (action_str or "").strip()
        self.report: dict[str, Any] = {
            "RuleTriggered": 0,
            "Violations": 0,
            "Details": {},
            "Datapoints": 0,
            "RuleParameters": "",
        }
        if self.action_str:
            self.logger.warning(
                "rule %s: actions are not supported yet and will not run: %s",
                self.rule_name,
                self.action_str,
            )

    def set_required_tensors(self, step: int) -> None:  # noqa: B027 (a hook, empty by default)
        """Add what the rule reads at `step`, with `self.req_tensors.add(name, steps)`."""

    @abstractmethod
    def invoke_at_step(self, step: int) -> bool:
        """Return whether the condition holds at the global step `step`."""

    def invoke(self, step: int) -> None:
        """Evaluate one step; raise RuleEvaluationConditionMet if the condition holds."""
        self.base_trial.wait_for_steps([step])
        with no_refresh(self.trials):
            self.req_tensors.clear()
            self.set_required_tensors(step)
            self.req_tensors.fetch()
            met = self.invoke_at_step(step)
        if met:
            raise RuleEvaluationConditionMet(self.rule_name, step)
