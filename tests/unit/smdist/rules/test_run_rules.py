"""Rules on losses, progress and inputs, and rules by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smdist.errors import ConfigurationError, UnknownKey
from smdist.identity import ModeKeys
from smdist.rules.builtin import (
    BuiltInRule,
    CheckInputImages,
    LossNotDecreasing,
    NLPSequenceRatio,
    Overfit,
    Overtraining,
    SaturatedActivation,
    StalledTrainingRule,
    UnchangedTensor,
)
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.rules.registry import RULES, build, default_rules
from tests.support.rows import Key, evidence_of, steps_of

TRAIN, EVAL, GLOBAL = ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.GLOBAL
LOSS = {"loss": ["losses"]}
NOTHING = evidence_of({})


def only(rule: BuiltInRule, evidence: Evidence) -> Finding:
    (finding,) = rule.evaluate(evidence)
    assert finding.rule == type(rule).__name__
    if finding.verdict is Verdict.UNDECIDED:
        assert finding.needs
    if finding.verdict is Verdict.FIRES:
        assert finding.advice
    return finding


def verdict(rule: BuiltInRule, evidence: Evidence) -> str:
    return only(rule, evidence).verdict.value


def losses(values: list[float], **more: Any) -> dict[Key, Any]:
    return steps_of("loss", [[value] for value in values], **more)


# -- LossNotDecreasing ---------------------------------------------------------------------------

FIVE = [0.30, 0.33, 0.31, 0.30, 0.28]
STRICT = LossNotDecreasing(diff_percent=0.0)


def test_loss_at_step_12_is_not_below_that_of_step_0() -> None:
    found = only(STRICT, evidence_of(losses(FIVE, steps=range(0, 20, 4)), LOSS))
    assert (found.verdict, found.first_step, found.mode) == (Verdict.FIRES, 12, TRAIN)


def test_loss_at_step_16_is_below_that_of_step_4() -> None:
    four = [0.30, 0.33, 0.31, 0.28]
    assert verdict(STRICT, evidence_of(losses(four, steps=[0, 4, 8, 16]), LOSS)) == "QUIET"


def test_loss_is_compared_again_after_num_steps() -> None:
    values = [float(100 - step) for step in range(9, 36, 3)]
    values[8] = values[4]  # 33 as high as 21
    found = only(STRICT, evidence_of(losses(values, steps=range(9, 36, 3)), LOSS))
    assert found.first_step == 33
    values[6] += 50  # nobody looks at 27
    assert only(STRICT, evidence_of(losses(values, steps=range(9, 36, 3)), LOSS)).first_step == 33


@pytest.mark.parametrize(
    ("new", "expected"),
    [(0.9, "QUIET"), (0.9995, "FIRES"), (1.04, "QUIET"), (1.06, "FIRES"), (np.nan, "FIRES")],
)
def test_how_much_a_loss_may_stay_or_grow(new: float, expected: str) -> None:
    evidence = evidence_of(losses([1.0, new, 0.1], steps=[0, 10, 20]), LOSS)
    assert verdict(LossNotDecreasing(), evidence) == expected


def test_a_loss_is_the_mean_of_its_ranks_in_evaluation_if_there_is_one() -> None:
    values = losses([1.0, 2.0], steps=[0, 10], rank=0) | losses([1.0, -1.0], steps=[0, 10], rank=1)
    assert verdict(LossNotDecreasing(), evidence_of(values, LOSS)) == "QUIET"
    values |= losses([1.0, 3.0], steps=[0, 10], mode=EVAL)
    assert only(LossNotDecreasing(), evidence_of(values, LOSS)).mode is EVAL
    assert verdict(LossNotDecreasing(mode=TRAIN), evidence_of(values, LOSS)) == "QUIET"


def test_a_loss_that_is_not_finite_names_the_rank() -> None:
    values = losses([1.0, 0.9], rank=0) | losses([1.0, np.inf], rank=1)
    found = only(LossNotDecreasing(), evidence_of(values, LOSS))
    assert (found.first_step, found.ranks) == (1, (1,))


def test_too_few_losses_are_undecided() -> None:
    assert verdict(LossNotDecreasing(), NOTHING) == "UNDECIDED"
    assert verdict(LossNotDecreasing(), evidence_of(losses([1.0, 1.0]), LOSS)) == "UNDECIDED"


# -- Overfit and Overtraining --------------------------------------------------------------------


def epochs(train: list[list[float]], validation: list[list[float]]) -> Evidence:
    """Return losses of blocks of training, each followed by one of evaluation."""
    values: dict[Key, Any] = {}
    order: dict[tuple[ModeKeys, int], int] = {}
    counters = {TRAIN: 0, EVAL: 0}
    for trained, evaluated in zip(train, validation, strict=True):
        for mode, block in ((TRAIN, trained), (EVAL, evaluated)):
            for loss in block:
                step = counters[mode]
                counters[mode] += 1
                order[mode, step] = len(order)
                values["loss", mode, step, 0] = [loss]
    return evidence_of(values, LOSS, global_steps=order)


def test_overfit_waits_for_its_patience() -> None:
    evidence = epochs([[2.0, 1.0]] * 4, [[1.6, 1.6], [1.7, 1.7], [1.4, 1.8], [3.0, 3.0]])
    found = only(Overfit(), evidence)
    assert (found.first_step, found.mode) == (3, EVAL)
    assert found.value == pytest.approx(0.2 / 1.5)
    assert verdict(Overfit(patience=2), evidence) == "QUIET"
    assert only(Overfit(start_step=8), evidence).first_step == 7


def test_overfit_reads_metrics_of_xgboost() -> None:
    names = ("train-rmse", "validation-rmse")
    values = {(n, GLOBAL, s, 0): [1.0 + s * (n == names[1])] for n in names for s in range(3)}
    assert only(Overfit(tensor_regex=".*-rmse"), evidence_of(values)).first_step == 1


def test_overfit_without_evaluation_is_undecided() -> None:
    assert verdict(Overfit(), evidence_of(losses([1.0, 1.0]), LOSS)) == "UNDECIDED"


def test_overtraining_needs_both_to_be_stale() -> None:
    falling = [[float(10 - at)] for at in range(8)]
    flat = [[1.0]] * 8
    rule = Overtraining(patience_train=3, patience_validation=5)
    assert verdict(rule, epochs(falling, flat)) == "QUIET"
    assert verdict(rule, epochs(flat, falling)) == "QUIET"
    found = only(rule, epochs(flat, flat))
    assert (found.first_step, found.mode) == (6, TRAIN)
    alone = only(rule, evidence_of(losses([1.0] * 8), LOSS))
    assert alone.first_step == 3


def test_overtraining_with_few_losses_is_undecided() -> None:
    assert verdict(Overtraining(), evidence_of(losses([1.0] * 5), LOSS)) == "UNDECIDED"
    assert verdict(Overtraining(), NOTHING) == "UNDECIDED"


def test_an_improvement_is_more_than_delta() -> None:
    slow = [1.0 - 0.001 * step for step in range(8)]
    assert verdict(Overtraining(), evidence_of(losses(slow), LOSS)) == "FIRES"
    assert verdict(Overtraining(delta=0.0), evidence_of(losses(slow), LOSS)) == "QUIET"


# -- StalledTrainingRule -------------------------------------------------------------------------


def running(times: dict[int, float], *, ended: bool = False) -> Evidence:
    values = losses([1.0, 1.0], rank=0) | losses([1.0], rank=1)
    return evidence_of(values, LOSS, now=10_000.0, last_progress=times, ended=ended)


def test_a_job_that_stands_still_names_the_rank_that_stopped_first() -> None:
    found = only(StalledTrainingRule(), running({0: 8000.0, 1: 7000.0}))
    assert found.verdict is Verdict.FIRES
    assert (found.ranks, found.value, found.first_step) == ((1, 0), 2000.0, 0)
    assert "rank 1 stopped first" in found.message


def test_a_rank_that_lags_is_told_from_a_job_that_stands_still() -> None:
    found = only(StalledTrainingRule(), running({0: 9999.0, 1: 7000.0}))
    assert (found.ranks, found.value) == ((1,), 3000.0)
    assert "lag" in found.message


def test_stalled_quiet_and_undecided() -> None:
    assert verdict(StalledTrainingRule(), running({0: 9000.0, 1: 9000.0})) == "QUIET"
    assert verdict(StalledTrainingRule(), running({0: 1.0}, ended=True)) == "QUIET"
    assert verdict(StalledTrainingRule(), running({})) == "UNDECIDED"


# -- inputs --------------------------------------------------------------------------------------

IMAGES = CheckInputImages(regex="input_0")


def images(*means: float, batch: int = 250, batches: int = 2) -> dict[Key, Any]:
    array = np.zeros((batch, len(means), 2, 2)) + np.reshape(means, (1, -1, 1, 1))
    return steps_of("net_input_0", [array] * batches)


def test_images_are_judged_by_channel() -> None:
    assert verdict(IMAGES, evidence_of(images(0.1, -0.1, 0.0), raw=True)) == "QUIET"
    found = only(IMAGES, evidence_of(images(0.3, -0.3, 0.0), raw=True))
    assert found.first_step == 1
    assert found.value == pytest.approx(0.3)
    assert verdict(IMAGES, evidence_of(images(0.3, -0.3, 0.0))) == "UNDECIDED"
    assert verdict(IMAGES, evidence_of(images(0.3, 0.3, 0.3))) == "FIRES"


def test_too_few_or_no_images_are_undecided() -> None:
    assert verdict(IMAGES, evidence_of(images(0.3, batches=1), raw=True)) == "UNDECIDED"
    assert verdict(CheckInputImages(), evidence_of(images(9.0), raw=True)) == "UNDECIDED"


def tokens(*ids: int) -> dict[Key, Any]:
    return steps_of("embedding0_input_0", [np.array(ids, np.int64)])


def test_padding_is_counted_in_rows() -> None:
    assert verdict(NLPSequenceRatio(), evidence_of(tokens(0, 0, 0, 5))) == "FIRES"
    assert verdict(NLPSequenceRatio(), evidence_of(tokens(0, 0, 7, 5))) == "QUIET"
    assert verdict(NLPSequenceRatio(), NOTHING) == "UNDECIDED"


def test_other_tokens_need_raw_values_unless_rows_exclude_them() -> None:
    rule = NLPSequenceRatio(token_values=(0.0, 3.0), token_thresholds_percent=(50.0, 20.0))
    assert verdict(rule, evidence_of(tokens(0, 1, 3, 5))) == "UNDECIDED"
    found = only(rule, evidence_of(tokens(0, 1, 3, 5), raw=True))
    assert (found.value, found.threshold) == (25.0, 20.0)
    assert verdict(rule, evidence_of(tokens(4, 5, 6, 7))) == "QUIET"
    with pytest.raises(ConfigurationError, match="2 token_values"):
        NLPSequenceRatio(token_values=(0.0, 3.0))


# -- names and parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss_not_decreasing", "LossNotDecreasing", "lossnotdecreasing"])
def test_a_rule_is_found_by_either_name(name: str) -> None:
    assert build(name) == LossNotDecreasing()


def test_texts_become_values() -> None:
    given = {"num_steps": "20", "diff_percent": "0.5", "mode": "train", "tensor_regex": "None"}
    given |= {"use_losses_collection": "False", "collection_names": "losses, metrics"}
    assert build("LossNotDecreasing", given) == LossNotDecreasing(
        collection_names=("losses", "metrics"),
        use_losses_collection=False,
        num_steps=20,
        diff_percent=0.5,
        mode=TRAIN,
    )
    pairs = build("saturated_activation", {"threshold_tanh": "(-1, 2)"})
    assert pairs == SaturatedActivation(threshold_tanh=(-1.0, 2.0))
    regex = build("UnchangedTensor", {"tensor_regex": ["a", "b"], "equal_nan": "true"})
    assert regex == UnchangedTensor(tensor_regex="a,b", equal_nan=True)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("LossNotDecreasing", {"num_step": 3}, "did you mean 'num_steps'"),
        ("LossNotDecreasing", {"num_steps": "many"}, "give a whole number"),
        ("LossNotDecreasing", {"num_steps": "1.5"}, "give a whole number"),
        ("LossNotDecreasing", {"num_steps": "None"}, "give a whole number"),
        ("LossNotDecreasing", {"use_losses_collection": "maybe"}, "true or false"),
        ("LossNotDecreasing", {"mode": "SLEEP"}, "known: TRAIN"),
        ("LossNotDecreasing", {"diff_percent": "nan"}, "give a number"),
        ("DeadRelu", {"colour": 3}, "known: tensor_regex, threshold_inactivity, threshold_layer"),
        ("AllZero", {}, "collection_names or tensor_regex"),
    ],
)
def test_wrong_parameters_are_refused(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(name, parameters)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UnknownKey, match="LossNotDecreasing"):
        build("loss_not_decreasin")


def test_no_default_rule_calls_an_empty_run_fine() -> None:
    rules = default_rules()
    assert {type(rule).__name__ for rule in rules} < set(RULES)
    running_now = evidence_of({}, ended=False)
    answers = {rule.name: verdict(rule, running_now) for rule in rules}
    assert set(answers.values()) == {"UNDECIDED"}
