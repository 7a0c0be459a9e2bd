from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.config.reduction_config import ReductionConfig, canonical_reduction
from smdist.errors import ConfigurationError, UnknownKey
from smdist.kernel.tensor_stats import REDUCTIONS, columns_for


def test_lists_resolve_to_canonical_names() -> None:
    config = ReductionConfig(
        reductions=["std", "variance", "nans", "q0.99", "l1"],
        abs_reductions=["mean"],
        norms=["l2"],
        abs_norms=["l1_norm"],
    )
    assert config.names == {
        "std", "variance", "nans", "q0.99", "l1", "abs_mean", "l2", "abs_l1",
    }  # fmt: skip
    assert config.abs_norms == ["l1"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("l1", "l1"),
        ("l1_norm", "l1"),
        ("abs_l2_norm", "abs_l2"),
        (" Mean ", "mean"),
        ("q.50", "q0.5"),
        ("q1", "q1.0"),
        ("q0", "q0.0"),
    ],
)
def test_each_reduction_has_one_canonical_name(given: str, name: str) -> None:
    assert canonical_reduction(given) == name
    assert ReductionConfig.from_dict({"reductions": given}).names == {name}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reductions": ["meen"]}, "'meen' is not a reduction; did you mean 'mean'"),
        ({"reductions": ["q99"]}, "'q99' is not a quantile; write one from 0 to 1"),
        ({"reductions": [3]}, "reductions=3"),
        ({"reductions": 3}, "reductions=3 is neither text nor a list"),
        ({"norms": ["mean"]}, "norms: 'mean' is not a norm"),
        ({"abs_norms": ["l3"]}, "abs_norms: 'l3' is not a reduction"),
        ({"abs_reductions": ["nans"]}, "abs_reductions: 'abs_nans' is not a reduction"),
        ({"save_raw_tensor": "maybe"}, "save_raw_tensor='maybe' is neither true nor false"),
        ({"save_shape": 3}, "save_shape=3"),
    ],
)
def test_wrong_values_name_the_remedy(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReductionConfig(**arguments)
    config = ReductionConfig()
    (key, value), *_ = arguments.items()
    with pytest.raises(ConfigurationError, match=message):
        setattr(config, key, value)
    assert config == ReductionConfig()


def test_unknown_keys() -> None:
    with pytest.raises(UnknownKey, match="'save_shape'"):
        ReductionConfig().save_shap = True
    with pytest.raises(UnknownKey, match="'reductions'"):
        ReductionConfig.from_dict({"reduction": "mean"})


@pytest.mark.parametrize("reductions", [[], ["mean"]])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("shape", [False, True])
def test_raw_is_kept_if_requested_or_if_nothing_else_is(
    reductions: list[str], raw: bool, shape: bool
) -> None:
    config = ReductionConfig(reductions=reductions, save_raw_tensor=raw, save_shape=shape)
    assert config.keeps_raw == (raw or not (reductions or shape))


def test_lists_can_be_edited_in_place() -> None:
    config = ReductionConfig(reductions=["mean"])
    config.reductions.append("max")
    config.norms += ["l2"]
    assert config.names == {"mean", "max", "l2"}
    with pytest.raises(ConfigurationError):
        config.reductions.append("nothing")
    del config.reductions[0]
    assert config.reductions == ["max"]


def test_unset_keys_fall_back_one_by_one() -> None:
    hook = ReductionConfig(reductions=["mean"], norms=["l1"])
    child = ReductionConfig.partial({"save_raw_tensor": "true"}, fallback=hook)
    assert child.names == {"mean", "l1"}
    assert child.keeps_raw
    assert not hook.keeps_raw
    hook.reductions = ["max"]
    assert child.names == {"max", "l1"}
    other = ReductionConfig.partial({"reductions": "abs_std"}, fallback=hook)
    assert other.names == {"abs_std"}


@given(st.lists(st.sampled_from([*REDUCTIONS, "q0.25"])), st.booleans(), st.booleans())
def test_round_trip_through_dict_json_and_pickle(names: list[str], raw: bool, shape: bool) -> None:
    flat = {"reductions": ",".join(names), "save_raw_tensor": raw, "save_shape": str(shape)}
    config = ReductionConfig.from_dict(flat)
    assert config.names == set(names)
    assert columns_for(config.names)
    for twin in (
        ReductionConfig(reductions=names, save_raw_tensor=raw, save_shape=shape),
        ReductionConfig.from_json(config.to_json()),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    ):
        assert twin == config
        twin.save_shape = not shape
        assert twin != config
