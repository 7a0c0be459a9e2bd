"""Rules that look at tensors one by one, on rows measured from arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys
from smdist.rules.builtin import (
    AllZero,
    BuiltInRule,
    DeadRelu,
    ExplodingTensor,
    SaturatedActivation,
    SimilarAcrossRuns,
    TensorVariance,
    UnchangedTensor,
    VanishingGradient,
    WeightUpdateRatio,
)
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from tests.support.rows import Key, evidence_of, steps_of

TRAIN, EVAL = ModeKeys.TRAIN, ModeKeys.EVAL
NOTHING = evidence_of({})
GRADIENTS = {"g": ["gradients"]}
WEIGHTS = {"w": ["weights"]}
rng = np.random.default_rng(0)


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


# -- VanishingGradient ---------------------------------------------------------------------------


def test_vanishing_gradient_names_the_first_step_and_the_ranks_that_fire_there() -> None:
    values: dict[Key, Any] = {}
    for rank in range(3):
        small = 1e-9 if rank in (0, 2) else 1.0
        values |= steps_of("g", [[1.0, -1.0], [small, -small], [1e-9, 1e-9]], rank=rank)
    found = only(VanishingGradient(), evidence_of(values, GRADIENTS))
    assert (found.verdict, found.first_step, found.mode) == (Verdict.FIRES, 1, TRAIN)
    assert (found.tensor, found.ranks, found.attempt) == ("g", (0, 2), 0)
    assert found.value == pytest.approx(1e-9)
    assert found.threshold == 1e-7


def test_vanishing_gradient_over_all_ranks_together() -> None:
    values = steps_of("g", [[1e-9]], rank=0) | steps_of("g", [[1.0]], rank=1)
    assert verdict(VanishingGradient(), evidence_of(values, GRADIENTS)) == "FIRES"
    assert verdict(VanishingGradient(scope="merged"), evidence_of(values, GRADIENTS)) == "QUIET"


def test_vanishing_gradient_is_undecided_without_gradients_or_numbers() -> None:
    assert verdict(VanishingGradient(), evidence_of(steps_of("w", [[0.0]]), WEIGHTS)) == "UNDECIDED"
    spoilt = steps_of("g", [[np.nan], []])
    assert verdict(VanishingGradient(), evidence_of(spoilt, GRADIENTS)) == "UNDECIDED"


def test_frozen_gradients_may_be_ignored() -> None:
    values = steps_of("g", [[0.0], [0.0]]) | steps_of("h", [[1.0], [1.0]])
    evidence = evidence_of(values, {"g": ["gradients"], "h": ["gradients"]})
    assert verdict(VanishingGradient(), evidence) == "FIRES"
    assert verdict(VanishingGradient(ignore_frozen=True), evidence) == "QUIET"


# -- ExplodingTensor, AllZero, TensorVariance -----------------------------------------------------


def test_exploding_tensor_lists_tensors_in_the_order_of_capture() -> None:
    values = steps_of("z", [[1.0], [np.inf]]) | steps_of("a", [[1.0], [np.nan]])
    first, second = ExplodingTensor().evaluate(evidence_of(values))
    assert [first.tensor, second.tensor] == ["z", "a"]
    assert first.first_step == 1
    assert only(ExplodingTensor(only_nan=True), evidence_of(values)).tensor == "a"


def test_exploding_tensor_quiet_and_undecided() -> None:
    assert verdict(ExplodingTensor(), evidence_of(steps_of("a", [[1.0]]))) == "QUIET"
    assert verdict(ExplodingTensor(), NOTHING) == "UNDECIDED"
    assert verdict(ExplodingTensor(tensor_regex="b"), evidence_of(steps_of("a", [[1.0]]))) == (
        "UNDECIDED"
    )


@pytest.mark.parametrize(
    ("array", "threshold", "expected"),
    [
        ([0.0, 0.0], 100, "FIRES"),
        ([0.0, 1.0], 100, "QUIET"),
        ([0.0, 1.0], 50, "FIRES"),
        ([], 100, "UNDECIDED"),
    ],
)
def test_all_zero(array: list[float], threshold: float, expected: str) -> None:
    rule = AllZero(tensor_regex="x", threshold=threshold)
    assert verdict(rule, evidence_of(steps_of("x", [array]))) == expected


def test_variance_is_of_the_population_and_merges_over_ranks() -> None:
    values = steps_of("x", [[0.0, 2.0]], rank=0) | steps_of("x", [[10.0, 12.0]], rank=1)
    evidence = evidence_of(values)
    assert verdict(TensorVariance(tensor_regex="x", max_threshold=1.1), evidence) == "QUIET"
    below = only(TensorVariance(tensor_regex="x", min_threshold=1.1), evidence)
    assert (below.value, below.ranks) == (1.0, (0, 1))
    merged = only(TensorVariance(tensor_regex="x", max_threshold=1.1, scope="merged"), evidence)
    assert merged.value == pytest.approx(np.var([0, 2, 10, 12]))
    bad = evidence_of(steps_of("x", [[np.inf, 1.0]]))
    assert verdict(TensorVariance(tensor_regex="x", max_threshold=1.1), bad) == "UNDECIDED"


@pytest.mark.parametrize("rule", [AllZero, UnchangedTensor])
def test_a_selection_is_required(rule: type[AllZero | UnchangedTensor]) -> None:
    with pytest.raises(ConfigurationError, match="collection_names or tensor_regex"):
        rule()


def test_variance_needs_a_threshold_and_patterns_must_compile() -> None:
    with pytest.raises(ConfigurationError, match="max_threshold"):
        TensorVariance(tensor_regex="x")
    with pytest.raises(ConfigurationError, match="regular expression"):
        AllZero(tensor_regex="(")


def test_alternatives_are_separated_by_commas_and_collections_are_added() -> None:
    values = steps_of("a", [[0.0]]) | steps_of("b", [[0.0]]) | steps_of("c", [[0.0]])
    rule = AllZero(collection_names=("weights",), tensor_regex="^a{1,2}$,^b$")
    found = rule.evaluate(evidence_of(values, {"c": ["weights"]}))
    assert [each.tensor for each in found] == ["a", "b", "c"]


# -- UnchangedTensor -----------------------------------------------------------------------------

ONES = np.ones((2, 3))
UNCHANGED = UnchangedTensor(tensor_regex=".*")


def test_unchanged_fires_at_the_third_of_equal_values() -> None:
    assert verdict(UNCHANGED, evidence_of(steps_of("foo", [ONES] * 2))) == "QUIET"
    found = only(UNCHANGED, evidence_of(steps_of("foo", [ONES] * 3)))
    assert (found.verdict, found.first_step) == (Verdict.FIRES, 2)
    assert verdict(UNCHANGED, evidence_of(steps_of("boo", [ONES], steps=[5]))) == "QUIET"


def test_unchanged_follows_each_rank_and_mode_alone() -> None:
    values = steps_of("x", [[1.0], [2.0], [3.0]], rank=0)
    values |= steps_of("x", [[1.0], [1.0], [1.0]], rank=1)
    assert only(UNCHANGED, evidence_of(values)).ranks == (1,)
    values = steps_of("x", [[1.0]] * 2) | steps_of("x", [[1.0]] * 2, mode=EVAL)
    assert verdict(UNCHANGED, evidence_of(values)) == "QUIET"


def test_unchanged_needs_fingerprints_or_raw_values_where_rows_agree() -> None:
    a, swapped = np.array([1.0, 2.0, 3.0]), np.array([2.0, 1.0, 3.0])
    same, other = steps_of("x", [a] * 3), steps_of("x", [a, swapped, a])
    assert verdict(UNCHANGED, evidence_of(same)) == "UNDECIDED"
    assert verdict(UNCHANGED, evidence_of(same, fingerprints=True)) == "FIRES"
    assert verdict(UNCHANGED, evidence_of(same, raw=True)) == "FIRES"
    assert verdict(UNCHANGED, evidence_of(other)) == "UNDECIDED"
    assert verdict(UNCHANGED, evidence_of(other, raw=True)) == "QUIET"
    moved = steps_of("x", [a, a + 1e-3, a])
    assert verdict(UNCHANGED, evidence_of(moved)) == "QUIET"


def test_nan_is_unchanged_only_if_asked_for() -> None:
    values = steps_of("x", [[np.nan, 1.0]] * 3)
    assert verdict(UNCHANGED, evidence_of(values, raw=True)) == "QUIET"
    rule = UnchangedTensor(tensor_regex=".*", equal_nan=True)
    assert verdict(rule, evidence_of(values, raw=True)) == "FIRES"


# -- SimilarAcrossRuns ---------------------------------------------------------------------------


def test_runs_that_differ_fire_at_the_first_step() -> None:
    a = rng.normal(size=5)
    mine = steps_of("x", [a, a, a + 1])
    other = evidence_of(steps_of("x", [a, a, a]), fingerprints=True)
    found = only(SimilarAcrossRuns(), evidence_of(mine, fingerprints=True, others=(other,)))
    assert (found.verdict, found.first_step) == (Verdict.FIRES, 2)
    assert found.value == pytest.approx(1.0)


def test_runs_that_agree_are_quiet_and_tell_what_one_alone_has() -> None:
    a = rng.normal(size=5)
    other = evidence_of(steps_of("x", [a]) | steps_of("y", [a]), raw=True)
    found = only(SimilarAcrossRuns(), evidence_of(steps_of("x", [a]), raw=True, others=(other,)))
    assert found.verdict is Verdict.QUIET
    assert "such as y" in found.message


def test_runs_without_common_rows_are_undecided() -> None:
    a = rng.normal(size=5)
    mine = evidence_of(steps_of("x", [a]))
    assert verdict(SimilarAcrossRuns(), mine) == "UNDECIDED"
    for theirs in (steps_of("x", [a], steps=[7]), steps_of("x", [a]), steps_of("y", [a])):
        evidence = evidence_of(steps_of("x", [a]), others=(evidence_of(theirs),))
        assert verdict(SimilarAcrossRuns(), evidence) == "UNDECIDED"


# -- WeightUpdateRatio ---------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([1.0, 2.001], "QUIET"),
        ([1.0, 2.0], "FIRES"),
        ([100.0, 2.0], "FIRES"),
    ],
)
def test_weight_updates(second: list[float], expected: str, *, raw: bool) -> None:
    values = steps_of("w", [[1.0, 2.0], second])
    evidence = evidence_of(values, WEIGHTS, raw=raw, fingerprints=True)
    found = only(WeightUpdateRatio(), evidence)
    assert found.verdict.value == expected
    if expected == "FIRES":
        assert found.first_step == 1


def test_a_ratio_within_the_bounds_of_norms_needs_raw_values() -> None:
    turned = steps_of("w", [[1.0, 2.0], [2.0, 1.0]])
    assert verdict(WeightUpdateRatio(), evidence_of(turned, WEIGHTS)) == "UNDECIDED"
    assert verdict(WeightUpdateRatio(), evidence_of(turned, WEIGHTS, raw=True)) == "QUIET"
    tiny = steps_of("w", [[1.0, 2.0], [1.0, 2.0 + 1e-12]])
    assert verdict(WeightUpdateRatio(), evidence_of(tiny, WEIGHTS)) == "UNDECIDED"
    assert verdict(WeightUpdateRatio(), evidence_of(tiny, WEIGHTS, raw=True)) == "FIRES"


def test_bounds_from_rows_never_contradict_raw_values() -> None:
    decided = 0
    for _ in range(200):
        first = rng.normal(size=4)
        change = rng.normal(size=4) * 10.0 ** rng.integers(-14, 3)
        values = steps_of("w", [first, first + change])
        from_rows = verdict(WeightUpdateRatio(), evidence_of(values, WEIGHTS))
        if from_rows != "UNDECIDED":
            decided += 1
            exact = verdict(WeightUpdateRatio(), evidence_of(values, WEIGHTS, raw=True))
            assert from_rows == exact
    assert decided > 50


def test_weights_of_one_step_or_too_far_apart_are_undecided() -> None:
    once = steps_of("w", [[1.0, 2.0]])
    assert verdict(WeightUpdateRatio(), evidence_of(once, WEIGHTS)) == "UNDECIDED"
    assert verdict(WeightUpdateRatio(), evidence_of(once)) == "UNDECIDED"
    far = evidence_of(steps_of("w", [[1.0], [1.5]], steps=[0, 10]), WEIGHTS)
    assert verdict(WeightUpdateRatio(), far) == "QUIET"
    assert verdict(WeightUpdateRatio(num_steps=10), far) == "QUIET"
    assert verdict(WeightUpdateRatio(num_steps=9), far) == "UNDECIDED"


def test_weights_of_two_ranks_are_not_compared() -> None:
    values = steps_of("w", [[1.0]], rank=0) | steps_of("w", [[1.0]], rank=1)
    assert verdict(WeightUpdateRatio(), evidence_of(values, WEIGHTS, raw=True)) == "UNDECIDED"


def test_weights_are_compared_in_training_alone() -> None:
    values = steps_of("w", [[1.0], [1.5]]) | steps_of("w", [[1.5], [1.5]], mode=EVAL)
    assert verdict(WeightUpdateRatio(), evidence_of(values, WEIGHTS, raw=True)) == "QUIET"


# -- activations ---------------------------------------------------------------------------------


def relu(
    dead: int, units: int = 10, samples: int = 40
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    array = np.ones((samples, units))
    array[:, :dead] = 0.0
    return array


@pytest.mark.parametrize(
    ("dead", "with_rows", "with_raw"),
    [
        (0, "QUIET", "QUIET"),
        (4, "QUIET", "QUIET"),
        (5, "UNDECIDED", "QUIET"),
        (6, "UNDECIDED", "FIRES"),
        (10, "FIRES", "FIRES"),
    ],
)
def test_dead_relu_from_rows_and_from_raw_values(dead: int, with_rows: str, with_raw: str) -> None:
    values = steps_of("net_relu_output_0", [relu(dead)])
    assert verdict(DeadRelu(), evidence_of(values)) == with_rows
    found = only(DeadRelu(), evidence_of(values, raw=True))
    assert found.verdict.value == with_raw
    if with_raw == "FIRES":
        assert found.first_step == 0
        assert found.value == pytest.approx(10.0 * dead)


def test_dead_relu_says_why_it_may_find_nothing() -> None:
    found = only(DeadRelu(), evidence_of(steps_of("fc_output", [relu(10)])))
    assert found.verdict is Verdict.UNDECIDED
    assert "F.relu" in (found.needs or "")


def test_elements_below_zero_are_inactive_too() -> None:
    values = steps_of("relu_output", [relu(10) - 1.0])
    assert verdict(DeadRelu(), evidence_of(values)) == "FIRES"
    half = relu(0)
    half[:, :8] = -1.0
    assert verdict(DeadRelu(), evidence_of(steps_of("relu_output", [half]))) == "UNDECIDED"
    assert verdict(DeadRelu(), evidence_of(steps_of("relu_output", [half]), raw=True)) == "FIRES"


@pytest.mark.parametrize(
    ("name", "level", "expected"),
    [
        ("tanh_input_0", 9.0, "QUIET"),
        ("tanh_input_0", 10.0, "FIRES"),
        ("sigmoid_input_0", 10.0, "QUIET"),
        ("sigmoid_input_0", 17.0, "FIRES"),
        ("sigmoid_input_0", -24.0, "FIRES"),
        ("relu_input_0", 99.0, "UNDECIDED"),
    ],
)
def test_saturated_from_rows(name: str, level: float, expected: str) -> None:
    rule = SaturatedActivation()
    assert verdict(rule, evidence_of(steps_of(name, [np.full((4, 2), level)]))) == expected


def test_saturated_units_are_counted_in_raw_values() -> None:
    array = np.zeros((50, 4))
    array[:, :3] = 20.0
    values = steps_of("tanh_input_0", [array])
    assert verdict(SaturatedActivation(), evidence_of(values)) == "UNDECIDED"
    found = only(SaturatedActivation(), evidence_of(values, raw=True))
    assert (found.verdict, found.value) == (Verdict.FIRES, 75.0)
    wide = SaturatedActivation(threshold_tanh=(-30.0, 30.0))
    assert verdict(wide, evidence_of(values)) == "QUIET"
