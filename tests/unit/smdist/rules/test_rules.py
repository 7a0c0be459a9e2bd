"""Rules over saved steps, as scripts written for smdebug use them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import smdist.exceptions
from smdist.errors import RuleEvaluationConditionMet, SmdistError, TensorUnavailable
from smdist.identity import ModeKeys
from smdist.rules import Rule
from smdist.rules.rule_invoker import invoke_rule
from smdist.storage import LocalStore
from smdist.trials import Trial, create_trial
from tests.support.run_builder import RunBuilder, Saved

TRAIN = ModeKeys.TRAIN


class Watch(Rule):
    """Notes which steps it is asked about; fires where the tensor exceeds a threshold."""

    def __init__(self, base_trial: Trial, threshold: float = 1e9, regex: str = "^x$") -> None:
        super().__init__(base_trial, action_str="")
        self.threshold = threshold
        self.regex = regex
        self.seen: list[int] = []

    def set_required_tensors(self, step: int) -> None:
        self.req_tensors.add(self.regex, [step], should_match_regex=True)

    def invoke_at_step(self, step: int) -> bool:
        self.seen.append(step)
        tensors = self.req_tensors.get()
        return any(t.reduction_value(step, "max", abs=True) > self.threshold for t in tensors)


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    return RunBuilder(LocalStore(tmp_path))


def save(run: RunBuilder, *steps: int) -> None:
    rank = run.rank(0)
    for step in steps:
        rank.step(TRAIN, step, {"x": np.full(3, float(step))})
    rank.end()


def test_only_saved_steps_are_visited_until_the_job_ends(run: RunBuilder, tmp_path: Path) -> None:
    save(run, 0, 500, 1000)
    rule = Watch(create_trial(tmp_path))
    invoke_rule(rule)
    assert rule.seen == [0, 500, 1000]


def test_start_is_inclusive_and_end_exclusive(run: RunBuilder, tmp_path: Path) -> None:
    save(run, 0, 10, 20, 30)
    rule = Watch(create_trial(tmp_path))
    invoke_rule(rule, start_step=10, end_step=30)
    assert rule.seen == [10, 20]
    invoke_rule(rule, start_step=11, end_step=20)
    assert rule.seen == [10, 20]


def test_a_bounded_range_of_a_live_job_does_not_wait_for_more(
    run: RunBuilder, tmp_path: Path
) -> None:
    run.rank(0).step(TRAIN, 0, {"x": np.ones(1)}).step(TRAIN, 1, {"x": np.ones(1)}).flush()
    rule = Watch(create_trial(tmp_path))
    invoke_rule(rule, end_step=2)
    assert rule.seen == [0, 1]


def test_condition_is_raised_only_on_request(run: RunBuilder, tmp_path: Path) -> None:
    save(run, 0, 10, 20)
    rule = Watch(create_trial(tmp_path), threshold=5)
    invoke_rule(rule)
    assert rule.seen == [0, 10, 20]
    with pytest.raises(RuleEvaluationConditionMet) as met:
        invoke_rule(rule, raise_eval_cond=True)
    assert (met.value.rule_name, met.value.step) == ("Watch", 10)


def test_rule_can_end_itself(run: RunBuilder, tmp_path: Path) -> None:
    class Once(Watch):
        def invoke_at_step(self, step: int) -> bool:
            self.seen.append(step)
            raise RuleEvaluationConditionMet(self.rule_name, step, end_of_rule=True)

    save(run, 0, 10)
    rule = Once(create_trial(tmp_path))
    invoke_rule(rule)
    assert rule.seen == [0]


def test_a_live_job_is_followed_to_its_end(run: RunBuilder, tmp_path: Path) -> None:
    rank = run.rank(0).step(TRAIN, 0, {"x": np.ones(1)}).flush()
    rule = Watch(create_trial(tmp_path))
    timer = threading.Timer(0.3, lambda: rank.step(TRAIN, 7, {"x": np.ones(1)}).end())
    timer.start()
    try:
        invoke_rule(rule)
    finally:
        timer.join()
    assert rule.seen == [0, 7]


def test_steps_without_the_tensor_are_skipped(run: RunBuilder, tmp_path: Path) -> None:
    rank = run.rank(0)
    rank.step(TRAIN, 0, {"x": np.ones(1)}).step(TRAIN, 1, {"y": np.ones(1)})
    rank.step(TRAIN, 2, {"x": np.ones(1)}).end()
    rule = Watch(create_trial(tmp_path))
    invoke_rule(rule)
    assert rule.seen == [0, 2]


def test_partial_steps_are_evaluated_once_they_are_final(run: RunBuilder, tmp_path: Path) -> None:
    one, two = run.rank(0, 2), run.rank(1, 2)
    one.step(TRAIN, 0, {"x": np.ones(1)}).step(TRAIN, 1, {"x": np.ones(1)}).end()
    two.step(TRAIN, 0, {"x": np.ones(1)}).lose()
    rule = Watch(create_trial(tmp_path))
    invoke_rule(rule)
    assert rule.seen == [0, 1]


def test_reductions_are_enough_for_a_required_tensor(run: RunBuilder, tmp_path: Path) -> None:
    saved = Saved(np.full(3, 9.0), raw=False, reductions=())
    run.rank(0).step(TRAIN, 0, {"x": saved}).end()
    with pytest.raises(RuleEvaluationConditionMet):
        invoke_rule(Watch(create_trial(tmp_path), threshold=5), raise_eval_cond=True)


def test_required_tensors(run: RunBuilder, tmp_path: Path) -> None:
    save(run, 0, 1)
    trial, other = create_trial(tmp_path), create_trial(tmp_path)

    class Two(Rule):
        def invoke_at_step(self, step: int) -> bool:
            return False

    rule = Two(trial, other_trials=[other])
    needs = rule.req_tensors
    needs.add("x", [0])
    needs.add("x", [1])
    needs.add("x", [0], trial=other)
    assert needs.get_names() == ["x"]
    assert needs.get_tensor_steps("x") == [0, 1]
    assert needs.get_tensor_steps("x", trial=other) == [0]
    assert [tensor.name for tensor in needs.get()] == ["x"]
    needs.fetch()
    needs.clear()
    assert needs.get_names() == []
    with pytest.raises(TensorUnavailable):
        needs.add("nowhere", [0])
    assert rule.trials == [trial, other]
    rule.invoke(0)


def test_trial_is_not_refreshed_while_a_rule_runs(run: RunBuilder, tmp_path: Path) -> None:
    rank = run.rank(0).step(TRAIN, 0, {"x": np.ones(1)}).flush()

    class Grow(Watch):
        def invoke_at_step(self, step: int) -> bool:
            rank.step(TRAIN, 1, {"x": np.ones(1)}).flush()
            found = self.base_trial.has_tensor("nowhere") or self.base_trial.loaded_all_steps
            self.seen += self.base_trial.steps()
            return found

    rule = Grow(create_trial(tmp_path))
    rule.invoke(0)
    assert rule.seen == [0]


def test_rule_must_define_its_condition(run: RunBuilder, tmp_path: Path) -> None:
    save(run, 0)
    with pytest.raises(TypeError):
        Rule(create_trial(tmp_path))  # type: ignore[abstract]


def test_smdebug_exception_names_exist() -> None:
    for name in smdist.exceptions.__all__:
        assert issubclass(getattr(smdist.exceptions, name), SmdistError), name
    older = ("", "Customer", "NotImplemented", "Runtime", "Type", "Value")
    assert {f"SMDebug{kind}Error" for kind in older} <= set(smdist.exceptions.__all__)
    assert issubclass(smdist.exceptions.SMDebugNotImplementedError, NotImplementedError)
