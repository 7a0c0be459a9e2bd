"""Rules on labels, boosted trees and the first steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smdist.identity import ModeKeys
from smdist.rules.builtin import (
    BuiltInRule,
    ClassImbalance,
    Confusion,
    CreateXgboostReport,
    FeatureImportanceOverweight,
    PoorWeightInitialization,
    TreeDepth,
)
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from tests.support.rows import Key, evidence_of, raw_of, rows_of, steps_of

GLOBAL = ModeKeys.GLOBAL
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


def labelled(labels: Any, predictions: Any, *, raw: bool = True) -> Evidence:
    values = steps_of("labels", [labels]) | steps_of("predictions", [predictions])
    return evidence_of(values, raw=raw)


# -- ClassImbalance ------------------------------------------------------------------------------


def test_990_to_10_is_imbalanced() -> None:
    labels = np.repeat([0, 1], [990, 10])
    found = only(ClassImbalance(), labelled(labels, labels))
    assert (found.verdict, found.first_step, found.value) == (Verdict.FIRES, 0, 99.0)


def test_classes_are_counted_over_steps_and_ranks() -> None:
    half = np.repeat([0, 1], [60, 65])
    values: dict[Key, Any] = {}
    for rank in range(2):
        for name in ("labels", "predictions"):
            values |= steps_of(name, [half, half], rank=rank)
    assert verdict(ClassImbalance(), evidence_of(values, raw=True)) == "QUIET"
    for rank in range(2):
        values["predictions", ModeKeys.TRAIN, 1, rank] = np.zeros(125, np.int64)
        values["predictions", ModeKeys.TRAIN, 0, rank] = np.zeros(125, np.int64)
    found = only(ClassImbalance(), evidence_of(values, raw=True))
    assert (found.first_step, found.ranks, found.value) == (1, (0, 1), 1.0)
    assert "class 1 is mispredicted" in found.message


def test_too_few_labels_or_none_are_undecided() -> None:
    labels = np.repeat([0, 1], [400, 99])
    assert verdict(ClassImbalance(), labelled(labels, labels)) == "UNDECIDED"
    assert verdict(ClassImbalance(samples=10), labelled(labels, labels, raw=False)) == "UNDECIDED"
    assert verdict(ClassImbalance(samples=10), labelled(labels, labels[1:])) == "UNDECIDED"
    assert verdict(ClassImbalance(), NOTHING) == "UNDECIDED"


def test_probabilities_become_classes() -> None:
    labels = np.repeat([0, 1], 250)
    scores = np.stack([labels == 0, labels == 1], axis=1) * 0.8 + 0.1
    assert verdict(ClassImbalance(argmax=True), labelled(labels, scores)) == "QUIET"
    assert verdict(ClassImbalance(argmax=True), labelled(labels, scores[:, ::-1])) == "FIRES"


# -- Confusion -----------------------------------------------------------------------------------

TEN = np.arange(10)
FOUR_AS_SEVEN = np.where(TEN == 4, 7, TEN)


def test_identity_is_not_confused() -> None:
    assert verdict(Confusion(), labelled(TEN, TEN)) == "QUIET"
    assert verdict(Confusion(category_no=12), labelled(TEN, TEN)) == "QUIET"


def test_one_of_ten_confused() -> None:
    found = only(Confusion(category_no=10), labelled(TEN, FOUR_AS_SEVEN))
    assert (found.verdict, found.value) == (Verdict.FIRES, 0.0)
    assert "class 4" in found.message
    off = only(Confusion(min_diag=0.0, max_off_diag=0.01), labelled(TEN, FOUR_AS_SEVEN))
    assert (off.value, off.threshold) == (0.5, 0.01)
    lax = Confusion(min_diag=0.0, max_off_diag=0.5)
    assert verdict(lax, labelled(TEN, FOUR_AS_SEVEN)) == "QUIET"


def test_labels_are_found_by_collection_too() -> None:
    values = steps_of("y", [TEN]) | steps_of("z", [TEN])
    evidence = evidence_of(values, {"y": ["labels"], "z": ["predictions"]}, raw=True)
    assert verdict(Confusion(), evidence) == "QUIET"


def test_confusion_without_raw_values_is_undecided() -> None:
    assert verdict(Confusion(), labelled(TEN, TEN, raw=False)) == "UNDECIDED"
    assert verdict(Confusion(), NOTHING) == "UNDECIDED"


# -- trees ---------------------------------------------------------------------------------------


def importance(*weights: float, step: int = 0) -> dict[Key, Any]:
    return {
        (f"feature_importance/weight/f{at}", GLOBAL, step, 0): [weight]
        for at, weight in enumerate(weights)
    }


def test_few_features_that_dominate() -> None:
    values = importance(1, 1, 1, 1, 1) | importance(5, 1, 7, 1, 6, step=1)
    found = only(FeatureImportanceOverweight(), evidence_of(values))
    assert (found.first_step, found.tensor) == (1, "feature_importance/weight/f2")
    assert found.value == pytest.approx(18 / 20)
    even = evidence_of(importance(1, 1, 1, 1, 1))
    assert verdict(FeatureImportanceOverweight(), even) == "QUIET"


def test_as_many_features_as_counted_are_undecided() -> None:
    three = evidence_of(importance(1, 1, 1))
    assert verdict(FeatureImportanceOverweight(), three) == "UNDECIDED"
    assert verdict(FeatureImportanceOverweight(), NOTHING) == "UNDECIDED"


def full_tree(depth: int) -> dict[str, list[Any]]:
    """Return a complete tree whose nodes are numbered level by level."""
    last, inner = 2 ** (depth + 1) - 1, 2**depth - 1
    return {
        "Tree": [0] * last,
        "Node": list(range(last)),
        "Yes": [2 * at + 1 if at < inner else -1 for at in range(last)],
        "No": [2 * at + 2 if at < inner else -1 for at in range(last)],
    }


def path_tree(depth: int) -> dict[str, list[Any]]:
    """Return a tree that splits at one side only."""
    last = 2 * depth + 1
    splits = {0, *range(1, last, 2)} - {last - 2}
    follow = {0: 1} | {at: at + 2 for at in range(1, last - 2, 2)}
    return {
        "Tree": [3] * last,
        "Node": list(range(last)),
        "Yes": [f"3-{follow[at]}" if at in splits else "nan" for at in range(last)],
        "No": [f"3-{follow[at] + 1}" if at in splits else "nan" for at in range(last)],
    }


def trees(tree: dict[str, list[Any]], *, raw: bool = True) -> Evidence:
    every = {(f"trees/{key}", GLOBAL, 0, 0): np.array(column) for key, column in tree.items()}
    numeric = {key: array for key, array in every.items() if array.dtype.kind != "U"}
    rows = rows_of(numeric, {key[0]: ["trees"] for key in numeric})
    return Evidence(rows, raw_of(every if raw else {}), True, 0.0, {})


@pytest.mark.parametrize(
    ("tree", "with_rows", "with_raw"),
    [
        (full_tree(2), "QUIET", "QUIET"),
        (full_tree(4), "UNDECIDED", "QUIET"),
        (full_tree(5), "FIRES", "FIRES"),
        (path_tree(4), "QUIET", "QUIET"),
        (path_tree(9), "UNDECIDED", "FIRES"),
    ],
)
def test_depth_is_bounded_by_ids_and_found_by_links(
    tree: dict[str, list[Any]], with_rows: str, with_raw: str
) -> None:
    assert verdict(TreeDepth(), trees(tree, raw=False)) == with_rows
    assert verdict(TreeDepth(), trees(tree)) == with_raw


def test_depth_is_the_longest_path() -> None:
    assert only(TreeDepth(), trees(path_tree(9))).value == 9
    assert verdict(TreeDepth(), NOTHING) == "UNDECIDED"


def test_there_is_no_report_yet() -> None:
    found = only(CreateXgboostReport(), NOTHING)
    assert found.verdict is Verdict.UNDECIDED
    assert "no report" in found.message


# -- PoorWeightInitialization --------------------------------------------------------------------

rng = np.random.default_rng(1)
GROUPS = {"g": ["gradients"], "loss": ["losses"]}


def beginning(
    *, layers: tuple[float, ...] = (1.0, 1.0), gradient: float = 1.0, falling: bool = True
) -> dict[Key, Any]:
    values: dict[Key, Any] = {}
    for step in range(12):
        for at, scale in enumerate(layers):
            name = f"layer{at}_relu_input_0"
            values[name, ModeKeys.TRAIN, step, 0] = scale * rng.normal(size=400)
        values["g", ModeKeys.TRAIN, step, 0] = gradient * rng.normal(size=400)
        values["loss", ModeKeys.TRAIN, step, 0] = [2.0 - 0.1 * step if falling else 2.0]
    return values


def test_a_good_beginning_is_quiet_with_quantiles_and_undecided_without() -> None:
    rule = PoorWeightInitialization()
    values = beginning()
    assert verdict(rule, evidence_of(values, GROUPS, raw=True)) == "QUIET"
    assert verdict(rule, evidence_of(values, GROUPS)) == "UNDECIDED"
    assert verdict(rule, NOTHING) == "UNDECIDED"


def test_each_sign_fires_by_itself() -> None:
    rule = PoorWeightInitialization()
    wide = only(rule, evidence_of(beginning(layers=(1.0, 10.0)), GROUPS, raw=True))
    assert (wide.tensor, wide.first_step, wide.ranks) == ("layer1_relu_input_0", 0, (0,))
    flat = only(rule, evidence_of(beginning(gradient=1e-5), GROUPS))
    assert (flat.tensor, flat.first_step) == ("g", 0)
    stuck = only(rule, evidence_of(beginning(falling=False), GROUPS, raw=True))
    assert (stuck.tensor, stuck.first_step, stuck.value) == ("loss", 9, 9.0)


def test_the_middle_of_a_gradient_counts_not_its_extremes() -> None:
    values = beginning(gradient=1e-5)
    for key in values:
        if key[0] == "g":
            values[key][:2] = [-1.0, 1.0]
    assert only(PoorWeightInitialization(), evidence_of(values, GROUPS, raw=True)).tensor == "g"
