"""Run a rule over the saved steps of its trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smdist.errors import (
    NoMoreData,
    RuleEvaluationConditionMet,
    StepUnavailable,
    TensorUnavailable,
    TensorUnavailableForStep,
)

if TYPE_CHECKING:
    from smdist.rules.rule import Rule

__all__ = ["invoke_rule"]


def invoke_rule(
    rule_obj: Rule,
    start_step: int | None = 0,
    end_step: int | None = None,
    raise_eval_cond: bool = False,
) -> None:
    """Invoke the rule at every saved global step in [`start_step`, `end_step`).

    Waits for further steps of a running job and returns when the job has ended. A step is evaluated
    once no more data of it can arrive, complete or not. Steps that lack a required tensor are skipped.
    When the condition holds, it continues, unless `raise_eval_cond` is set or the rule raised
    RuleEvaluationConditionMet with `end_of_rule`.
    """
    trial, log = rule_obj.base_trial, rule_obj.logger
    step = trial.next_saved_step(start_step or 0)
    while step is not None and (end_step is None or step < end_step):
        try:
            rule_obj.invoke(step)
        except (TensorUnavailableForStep, StepUnavailable, TensorUnavailable, NoMoreData) as error:
            log.debug("rule %s skipped step %d: %s", rule_obj.rule_name, step, error)
        except RuleEvaluationConditionMet as met:
            if raise_eval_cond:
                raise
            log.info("%s", met)
            if met.end_of_rule:
                return
        if end_step is not None and step + 1 >= end_step:
            return
        step = trial.next_saved_step(step + 1)
