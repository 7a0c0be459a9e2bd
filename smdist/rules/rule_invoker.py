"""Runs a rule over the saved steps of its trial, as they come."""

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
    """Invoke the rule at every saved global step from `start_step` on, before `end_step`.

    Of a live job it waits for further steps, and returns when the job has ended. A step that lacks
    a tensor the rule needs is passed over. A step is judged once no more of it can come, COMPLETE or
    not. When the condition holds it goes on, unless `raise_eval_cond` says to raise
    RuleEvaluationConditionMet, or the rule raised one that says `end_of_rule`.
    """
    trial, log = rule_obj.base_trial, rule_obj.logger
    step = trial.next_saved_step(start_step or 0)
    while step is not None and (end_step is None or step < end_step):
        try:
            rule_obj.invoke(step)
        except (TensorUnavailableForStep, StepUnavailable, TensorUnavailable, NoMoreData) as error:
            log.debug("rule %s passed over step %d: %s", rule_obj.rule_name, step, error)
        except RuleEvaluationConditionMet as met:
            if raise_eval_cond:
                raise
            log.info("%s", met)
            if met.end_of_rule:
                return
        if end_step is not None and step + 1 >= end_step:
            return
        step = trial.next_saved_step(step + 1)
