"""Rules across ranks: each finds its fault at the right rank, step and tensor, and is quiet without."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from smdist.identity import ModeKeys
from smdist.rules.across_ranks import (
    ACROSS_RANKS,
    FirstNonFinite,
    IdenticalData,
    LossSpike,
    NormMismatch,
    NotZeroed,
    NoUpdate,
    OutlierRank,
    ReplicaDesync,
    StepSkew,
    Straggler,
)
from smdist.rules.across_ranks.drift import places
from smdist.rules.evidence import Evidence
from smdist.rules.findings import Finding, Verdict
from smdist.tables.rows import COLUMN_TYPES, Rows
from tests.support.rows import evidence_of

TRAIN = ModeKeys.TRAIN
COLLECTIONS = {
    "Net_input_0": ["inputs"],
    "loss": ["losses"],
    "gradient/Net_fc.weight": ["gradients"],
    "gradient/Net_head.weight": ["gradients"],
    "Net_fc.weight": ["weights"],
    "Net_head.weight": ["weights"],
    "Net_bn.running_mean": ["weights"],
    "adam/fc": ["optimizer_variables"],
}
INPUT, LOSS, GRADIENT, WEIGHT, HEAD = (
    "Net_input_0",
    "loss",
    "gradient/Net_fc.weight",
    "Net_fc.weight",
    "Net_head.weight",
)
Values = dict[tuple[str, ModeKeys, int, int], Any]


def healthy(ranks: int = 4, steps: int = 30, seed: int = 0) -> Values:
    """Return what a data-parallel job saves: own data, losses and gradients, the same weights."""
    random = np.random.default_rng(seed)
    values: Values = {}
    for step in range(steps):
        for rank in range(ranks):
            for name in COLLECTIONS:
                shared = name in (WEIGHT, HEAD, "adam/fc")
                if shared:
                    value = np.random.default_rng([step, len(name)]).normal(size=12)
                else:
                    value = random.normal(size=1 if name == LOSS else 100)
                    if name == LOSS:
                        value = 1.0 + 0.1 * np.abs(value)
                values[name, TRAIN, step, rank] = value
    return values


def run(rule: Any, values: Values, **more: Any) -> list[Finding]:
    more.setdefault("fingerprints", True)
    answer: list[Finding] = rule.evaluate(evidence_of(values, COLLECTIONS, **more))
    return answer


def fired(rule: Any, values: Values, **more: Any) -> Finding:
    (finding,) = run(rule, values, **more)
    assert finding.verdict is Verdict.FIRES, finding
    assert finding.message
    assert len(finding.message) <= 160
    assert finding.advice
    return finding


def verdict(rule: Any, values: Values, **more: Any) -> Verdict:
    (finding,) = run(rule, values, **more)
    assert (finding.needs is not None) == (finding.verdict is Verdict.UNDECIDED)
    return finding.verdict


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_a_healthy_run_fires_nothing(ranks: int, seed: int) -> None:
    evidence = evidence_of(healthy(ranks, 40, seed), COLLECTIONS, fingerprints=True)
    found = [finding for rule in ACROSS_RANKS for finding in rule().evaluate(evidence)]
    assert [one for one in found if one.verdict is Verdict.FIRES] == []
    undecided = {one.rule for one in found if one.verdict is Verdict.UNDECIDED}
    assert undecided == {"NotZeroed", "NormMismatch", "Straggler"}


@pytest.mark.parametrize(
    "rule", [ReplicaDesync, OutlierRank, IdenticalData, StepSkew], ids=lambda rule: rule.__name__
)
def test_one_rank_alone_is_not_judged(rule: Any) -> None:
    (finding,) = run(rule(), healthy(ranks=1))
    assert finding.verdict is Verdict.UNDECIDED
    assert "include_workers='all'" in str(finding.needs)


@pytest.mark.parametrize("rule", ACROSS_RANKS, ids=lambda rule: rule.__name__)
def test_an_empty_run_is_not_judged(rule: Any) -> None:
    assert verdict(rule(), {}) is Verdict.UNDECIDED


# -- ReplicaDesync -------------------------------------------------------------------------------


@pytest.mark.parametrize("fingerprints", [True, False])
def test_a_weight_that_differs_blames_the_minority(fingerprints: bool) -> None:
    values = healthy()
    for step in range(18, 30):
        values[WEIGHT, TRAIN, step, 2] = values[WEIGHT, TRAIN, step, 2] * (1 + 1e-12)
        values["adam/fc", TRAIN, step, 2] = values["adam/fc", TRAIN, step, 2] + 1
    found = fired(ReplicaDesync(), values, fingerprints=fingerprints)
    assert (found.first_step, found.tensor, found.ranks) == (18, WEIGHT, (2,))
    assert (
        found.message == "worker_2 differs from the other 3 ranks in Net_fc.weight from step 18 on"
    )


def test_two_ranks_go_wrong_at_different_steps() -> None:
    values = healthy(ranks=5)
    for rank, first in ((1, 5), (3, 9)):
        for step in range(first, 30):
            values[WEIGHT, TRAIN, step, rank] = values[WEIGHT, TRAIN, step, rank] + rank
    found = run(ReplicaDesync(), values)
    assert [(one.first_step, one.ranks) for one in found] == [(5, (1,)), (9, (3,))]


def test_two_ranks_cannot_tell_who_is_right() -> None:
    values = healthy(ranks=2)
    values[HEAD, TRAIN, 7, 1] = values[HEAD, TRAIN, 7, 1] + 1
    found = fired(ReplicaDesync(), values)
    assert (found.first_step, found.tensor, found.ranks) == (7, HEAD, (0, 1))
    assert "no majority" in found.message


def test_permuted_weights_differ_although_their_statistics_agree() -> None:
    values = healthy()
    values[WEIGHT, TRAIN, 4, 0] = values[WEIGHT, TRAIN, 4, 0][::-1].copy()
    assert fired(ReplicaDesync(), values).ranks == (0,)


def test_equal_statistics_alone_prove_nothing() -> None:
    assert verdict(ReplicaDesync(), healthy(), fingerprints=False) is Verdict.UNDECIDED


def test_nan_on_one_rank_is_a_difference() -> None:
    values = healthy()
    values[WEIGHT, TRAIN, 4, 3] = np.full(12, np.nan)
    assert fired(ReplicaDesync(), values, fingerprints=False).ranks == (3,)


# -- FirstNonFinite ------------------------------------------------------------------------------


def test_the_first_nan_is_named_and_not_its_victims() -> None:
    values = healthy()
    values[GRADIENT, TRAIN, 12, 1] = np.full(100, np.nan)
    for step in range(13, 30):
        for rank in range(4):
            for name in (LOSS, GRADIENT, WEIGHT, HEAD):
                values[name, TRAIN, step, rank] = np.full(3, np.nan)
    found = fired(FirstNonFinite(), values)
    assert (found.first_step, found.tensor, found.ranks) == (12, GRADIENT, (1,))


def test_within_a_step_the_causal_order_counts() -> None:
    values = healthy()
    for name in (GRADIENT, LOSS, INPUT):
        values[name, TRAIN, 3, 2] = np.full(3, np.inf)
    assert fired(FirstNonFinite(), values).tensor == INPUT
    assert fired(FirstNonFinite(ignore="_input_"), values).tensor == LOSS


def overflow(steps: set[int], *, applied: bool = False) -> Values:
    """Return a run in which gradients overflow, and the update is left out unless it is applied."""
    values = healthy()
    for step in sorted(steps):
        for rank in range(4):
            values[GRADIENT, TRAIN, step, rank] = np.full(100, np.inf)
            for name in (WEIGHT, HEAD):
                if not applied:
                    values[name, TRAIN, step + 1, rank] = values[name, TRAIN, step, rank]
    return values


def test_steps_that_loss_scaling_skips_are_fine_until_there_are_many() -> None:
    assert verdict(FirstNonFinite(), overflow({3, 12})) is Verdict.QUIET
    assert verdict(OutlierRank(), overflow({3, 12})) is Verdict.QUIET
    found = fired(FirstNonFinite(), overflow({8, 10, 12, 14, 16, 18}))
    assert (found.first_step, found.value, found.threshold) == (8, 6.0, 5.0)
    assert fired(FirstNonFinite(), overflow({3}, applied=True)).first_step == 3


def test_without_weights_the_steps_after_tell_whether_it_was_skipped() -> None:
    def gradients(values: Values) -> Values:
        return {key: value for key, value in values.items() if key[0] in (GRADIENT, LOSS)}

    assert verdict(FirstNonFinite(), gradients(overflow({3}))) is Verdict.QUIET
    assert fired(FirstNonFinite(), gradients(overflow({29}, applied=True))).first_step == 29


# -- OutlierRank ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("factor", [30.0, 1 / 30])
def test_a_rank_far_off_fires_at_once(ranks: int, factor: float) -> None:
    values = healthy(ranks)
    for step in range(18, 30):
        values[GRADIENT, TRAIN, step, 1] = values[GRADIENT, TRAIN, step, 1] * factor
    found = fired(OutlierRank(), values)
    assert (found.first_step, found.tensor, found.ranks) == (18, GRADIENT, (1,))
    assert found.threshold == 20.0


def test_one_step_of_twelve_times_is_chance_and_two_of_three_are_not() -> None:
    values = healthy()
    values[GRADIENT, TRAIN, 18, 1] = values[GRADIENT, TRAIN, 18, 1] * 13
    assert verdict(OutlierRank(), values) is Verdict.QUIET
    values[GRADIENT, TRAIN, 20, 1] = values[GRADIENT, TRAIN, 20, 1] * 13
    assert fired(OutlierRank(), values).first_step == 18


def test_many_ranks_have_a_scale_of_their_own() -> None:
    values = healthy(ranks=8)
    for step in (20, 21):
        values[GRADIENT, TRAIN, step, 5] = values[GRADIENT, TRAIN, step, 5] * 6
    found = fired(OutlierRank(), values)
    assert (found.first_step, found.ranks, found.threshold) == (20, (5,), 3.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_rank_that_is_not_finite_is_never_fine(value: float) -> None:
    values = healthy()
    values[LOSS, TRAIN, 11, 3] = np.array([value])
    found = fired(OutlierRank(), values)
    assert (found.first_step, found.ranks, found.value) == (11, (3,), np.inf)


def test_zeros_of_one_rank_alone_are_lost_data() -> None:
    values = healthy()
    for step in (10, 11):
        values[GRADIENT, TRAIN, step, 0] = np.zeros(100)
    assert fired(OutlierRank(), values).first_step == 10
    values[GRADIENT, TRAIN, 2, 3] = np.zeros(100)  # sparse everywhere
    assert verdict(OutlierRank(), values) is Verdict.QUIET


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_loss_that_is_steadily_higher_is_a_drift(ranks: int) -> None:
    values = healthy(ranks, 60)
    for step in range(20, 60):
        values[LOSS, TRAIN, step, 2] = values[LOSS, TRAIN, step, 2] + 0.5
    found = fired(OutlierRank(), values)
    assert (found.tensor, found.ranks) == (LOSS, (2,))
    assert found.first_step is not None
    assert abs(found.first_step - 20) <= 1
    assert "highest" in found.message


def test_a_rank_with_other_data_from_the_start_can_be_calibrated() -> None:
    values = healthy(4, 60)
    for step in range(60):
        values[LOSS, TRAIN, step, 2] = values[LOSS, TRAIN, step, 2] + 0.5
    assert fired(OutlierRank(), values).first_step == 0
    assert verdict(OutlierRank(calibrate=20), values) is Verdict.QUIET


def test_equal_values_share_their_place() -> None:
    table = np.array([[3.0, 1.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert places(table).tolist() == [[3.5, 1.0, 3.5, 2.0], [2.5, 2.5, 2.5, 2.5]]


# -- IdenticalData -------------------------------------------------------------------------------


def test_the_same_batches_on_two_ranks() -> None:
    values = healthy()
    for step in range(5, 30):
        values[INPUT, TRAIN, step, 3] = values[INPUT, TRAIN, step, 1]
    found = fired(IdenticalData(), values)
    assert (found.first_step, found.tensor, found.ranks) == (5, INPUT, (1, 3))


def test_one_shared_batch_is_chance_and_constants_are_no_data() -> None:
    values = healthy()
    values[INPUT, TRAIN, 29, 3] = values[INPUT, TRAIN, 29, 1]
    assert verdict(IdenticalData(), values) is Verdict.QUIET
    positions = np.arange(100.0)
    for step in range(30):
        for rank in range(4):
            values[INPUT, TRAIN, step, rank] = positions
    assert verdict(IdenticalData(), values) is Verdict.QUIET
    assert verdict(IdenticalData(), values, fingerprints=False) is Verdict.UNDECIDED


# -- StepSkew ------------------------------------------------------------------------------------


def test_a_rank_that_captures_other_tensors() -> None:
    values = healthy()
    for step in range(9, 30):
        del values[GRADIENT, TRAIN, step, 2]
    found = fired(StepSkew(), values)
    assert (found.first_step, found.tensor, found.ranks) == (9, GRADIENT, (2,))


def test_a_rank_that_stands_still() -> None:
    values = {key: value for key, value in healthy().items() if key[3] != 1 or key[2] < 12}
    del values["adam/fc", TRAIN, 11, 1]
    found = fired(StepSkew(), values, ended=False)
    assert (found.first_step, found.ranks, found.value) == (11, (1,), 18.0)
    assert found.tensor == "Net_bn.running_mean"  # the last but one, as adam/fc is not there


def test_the_newest_step_of_a_live_run_is_on_its_way() -> None:
    values = healthy()
    del values[GRADIENT, TRAIN, 29, 2]
    assert verdict(StepSkew(), values, ended=False) is Verdict.QUIET
    assert fired(StepSkew(), values).first_step == 29


# -- the others ----------------------------------------------------------------------------------


def test_a_weight_that_stays_although_it_has_a_gradient() -> None:
    values = healthy()
    for step in range(6, 30):
        for rank in range(4):
            values[WEIGHT, TRAIN, step, rank] = values[WEIGHT, TRAIN, 5, rank]
    found = fired(NoUpdate(), values)
    assert (found.first_step, found.tensor, found.ranks) == (5, WEIGHT, (0, 1, 2, 3))
    for step in range(30):
        for rank in range(4):
            values[GRADIENT, TRAIN, step, rank] = np.zeros(100)
    assert verdict(NoUpdate(), values) is Verdict.QUIET


def test_weights_that_wait_for_accumulated_gradients_are_fine() -> None:
    values = healthy()
    for step in range(30):
        for rank in range(4):
            for name in (WEIGHT, HEAD):
                values[name, TRAIN, step, rank] = values[name, TRAIN, step - step % 4, rank]
    assert verdict(NoUpdate(), values) is Verdict.QUIET


def test_no_weight_moves_at_all() -> None:
    values = healthy()
    for step in range(30):
        for rank in range(4):
            for name in (WEIGHT, HEAD):
                values[name, TRAIN, step, rank] = values[name, TRAIN, 0, rank]
    found = fired(NoUpdate(), values)
    assert (found.first_step, found.tensor) == (0, WEIGHT)
    assert verdict(NoUpdate(), values, fingerprints=False) is Verdict.UNDECIDED


def test_gradients_that_pile_up() -> None:
    values = healthy(ranks=1)
    for step in range(30):
        values["accumulated/Net_fc.weight", TRAIN, step, 0] = values[GRADIENT, TRAIN, step, 0]
    assert verdict(NotZeroed(), values) is Verdict.QUIET
    for step in range(1, 30):
        before = values["accumulated/Net_fc.weight", TRAIN, step - 1, 0]
        values["accumulated/Net_fc.weight", TRAIN, step, 0] = (
            before + values[GRADIENT, TRAIN, step, 0]
        )
    found = fired(NotZeroed(), values)
    assert (found.first_step, found.tensor) == (1, GRADIENT)


def norms(factor: float, *, local: bool = False) -> Values:
    values = healthy()
    for step in range(30):
        for rank in range(4):
            square = 0.0
            for name in (GRADIENT, "gradient/Net_head.weight"):
                shared = values[name, TRAIN, step, rank if local else 0]
                values[name, TRAIN, step, rank] = shared
                square += float(np.sum(shared**2))
            values["grad_norm", TRAIN, step, rank] = np.array([square**0.5])
            if step >= 7:
                values["grad_norm", TRAIN, step, rank] *= factor
    return values


def test_a_norm_over_the_wrong_ranks() -> None:
    assert verdict(NormMismatch(), norms(1.005)) is Verdict.QUIET
    found = fired(NormMismatch(), norms(1.066))
    assert (found.first_step, found.tensor) == (7, "grad_norm")
    assert found.value == pytest.approx(0.066)
    assert fired(NormMismatch(), norms(np.nan)).first_step == 7
    assert verdict(NormMismatch(), norms(1.066, local=True)) is Verdict.UNDECIDED


@pytest.mark.parametrize("value", [30.0, np.nan, np.inf])
def test_a_loss_far_above_those_before(value: float) -> None:
    values = healthy()
    for rank in range(4):
        values[LOSS, TRAIN, 25, rank] = np.array([value])
    found = fired(LossSpike(), values)
    assert (found.first_step, found.tensor) == (25, LOSS)


def test_a_few_losses_say_nothing() -> None:
    assert verdict(LossSpike(), healthy(steps=5)) is Verdict.UNDECIDED


def test_busy_times_are_not_saved_yet() -> None:
    assert verdict(Straggler(), healthy()) is Verdict.UNDECIDED


# -- many rows -----------------------------------------------------------------------------------


def many_rows(ranks: int, steps: int, tensors: int) -> Rows:
    """Return random rows of gradients and weights, sorted already."""
    random = np.random.default_rng(0)
    names = tuple(name for i in range(tensors // 2) for name in (f"gradient/layer{i}", f"layer{i}"))
    size = ranks * steps * len(names)
    columns: dict[str, Any] = {name: np.zeros(size, kind) for name, kind in COLUMN_TYPES.items()}
    columns["tensor"] = np.repeat(np.arange(len(names), dtype=np.int32), ranks * steps)
    columns["mode"][:] = TRAIN.value
    columns["mode_step"] = np.tile(np.repeat(np.arange(steps), ranks), len(names))
    columns["step"] = columns["mode_step"]
    columns["rank"] = np.tile(np.arange(ranks, dtype=np.int32), steps * len(names))
    columns["order"] = columns["tensor"]
    columns["count"][:] = 1000
    columns["m2"] = 900 + 100 * random.random(size)
    columns["fingerprint"] = (columns["mode_step"] + 1).astype(np.uint64)
    columns["has_fingerprint"][:] = True
    groups: Mapping[str, frozenset[str]] = {
        name: frozenset(["gradients" if name.startswith("gradient/") else "weights"])
        for name in names
    }
    return Rows(names, ("F32",), groups, columns)


def test_the_cost_grows_with_the_rows_alone() -> None:
    """No rule may loop over rows: 1.3 million take them less than a few seconds of processor time."""
    rows = many_rows(64, 100, 200)
    evidence = Evidence(rows, lambda *_: None, True, 0.0, {})
    before = time.process_time()
    found = [finding for rule in ACROSS_RANKS for finding in rule().evaluate(evidence)]
    assert time.process_time() - before < 20
    assert [one for one in found if one.verdict is Verdict.FIRES] == []
