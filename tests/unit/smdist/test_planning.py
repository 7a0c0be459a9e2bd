from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.config import PYTORCH, CollectionManager, HookConfig
from smdist.config.collection import Collection
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.config.save_config_mode import SaveConfigMode
from smdist.errors import InvalidCollectionConfiguration
from smdist.format.manifest import CollectionInfo
from smdist.identity import ModeKeys
from smdist.planning import NEVER, Planner, TensorPlan

TRAIN, EVAL, PREDICT, GLOBAL = ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT, ModeKeys.GLOBAL
WEIGHT, GRADIENT, LOSS = "Net_fc1.weight", "gradient/Net_fc1.weight", "CrossEntropyLoss_output_0"
MOMENTUM = "optimizer/Net_fc1.weight/exp_avg"


def plan_for(**arguments: Any) -> tuple[Planner, CollectionManager]:
    config = HookConfig.from_arguments(PYTORCH, out_dir="o", **arguments)
    manager = config.build_manager()
    return Planner(config, manager), manager


def save_config(manager: CollectionManager, name: str) -> SaveConfig:
    found = manager.get(name).save_config
    assert found is not None
    return found


def test_defaults_save_losses_only() -> None:
    planner, _ = plan_for()
    assert planner.wants(LOSS, TRAIN, 0) == TensorPlan(True, frozenset(), ("losses",))
    assert planner.wants(LOSS, TRAIN, 1) is None
    assert planner.wants(WEIGHT, TRAIN, 0) is None
    assert planner.next_due(TRAIN, 1) == 500
    assert tuple(planner.active()) == ("losses",)


def test_included_collections_join_the_defaults() -> None:
    planner, _ = plan_for(include_collections=["weights"], include_regex=["fc1_output"])
    assert planner.wants(LOSS, TRAIN, 0)
    assert planner.wants(WEIGHT, TRAIN, 0)
    assert planner.wants("fc1_output_0", TRAIN, 0) == TensorPlan(
        True, frozenset(), ("default", "outputs")
    )
    assert planner.wants(GRADIENT, TRAIN, 0) is None


def test_save_all_saves_everything_and_activates_all() -> None:
    planner, manager = plan_for(save_all=True, save_config=SaveConfig(save_interval=10))
    save_config(manager, "weights").save_interval = 3
    assert planner.wants("anything", TRAIN, 10) == TensorPlan(True, frozenset(), ("all",))
    assert planner.wants(WEIGHT, TRAIN, 3) == TensorPlan(True, frozenset(), ("all", "weights"))
    assert planner.wants("anything", TRAIN, 3) is None
    assert planner.next_due(TRAIN, 4) == 6


def test_raw_of_any_due_collection_wins_and_reductions_unite() -> None:
    planner, manager = plan_for(
        include_collections=["weights", "often", "raw"],
        reduction_config=ReductionConfig(reductions=["mean"]),
        save_config=SaveConfig(save_interval=4),
    )
    manager.add(
        Collection(
            "often",
            "fc1",
            reduction_config=ReductionConfig(norms=["l2"]),
            save_config=SaveConfig(save_interval=2),
        )
    )
    manager.add(
        Collection(
            "raw",
            tensor_names=[WEIGHT],
            reduction_config=ReductionConfig(["max"], save_raw_tensor=True),
            save_config=SaveConfig(save_interval=8),
        )
    )
    members = ("often", "raw", "weights")
    assert planner.wants(WEIGHT, TRAIN, 2) == TensorPlan(False, frozenset({"l2"}), members)
    assert planner.wants(WEIGHT, TRAIN, 4) == TensorPlan(False, frozenset({"l2", "mean"}), members)
    everything = frozenset({"l2", "mean", "max"})
    assert planner.wants(WEIGHT, TRAIN, 8) == TensorPlan(True, everything, members)
    assert planner.wants(WEIGHT, TRAIN, 3) is None


def test_scalar_collections_are_saved_raw_despite_reductions() -> None:
    planner, _ = plan_for(reduction_config=ReductionConfig(["mean"]), include_regex=["Loss"])
    assert planner.wants(LOSS, TRAIN, 0) == TensorPlan(
        True, frozenset({"mean"}), ("default", "losses")
    )


def test_shape_alone_is_a_plan() -> None:
    planner, _ = plan_for(
        include_collections=["weights"], reduction_config=ReductionConfig(save_shape=True)
    )
    assert planner.wants(WEIGHT, TRAIN, 0) == TensorPlan(False, frozenset(), ("weights",))


@pytest.mark.parametrize("mode", [EVAL, PREDICT])
def test_gradients_and_optimizer_variables_belong_to_training(mode: ModeKeys) -> None:
    planner, manager = plan_for(include_collections=["gradients", "optimizer_variables"])
    save_config(manager, "losses").end_step = 0
    assert planner.wants(GRADIENT, TRAIN, 0)
    assert planner.wants(GRADIENT, GLOBAL, 0)
    assert planner.wants(GRADIENT, mode, 0) is None
    assert planner.next_due(mode, 0) == NEVER
    everything, _ = plan_for(save_all=True)
    assert everything.wants(WEIGHT, mode, 0)
    assert everything.wants(GRADIENT, mode, 0) is None
    assert everything.wants(MOMENTUM, mode, 0) is None


def test_optimizer_variables_are_not_weights() -> None:
    planner, manager = plan_for(include_collections=["weights", "optimizer_variables"])
    assert planner.membership(MOMENTUM) == ("optimizer_variables",)
    manager.add(Collection("custom", "exp_avg"))
    manager.get("weights").add_tensor_name(MOMENTUM)
    assert planner.membership(MOMENTUM) == ("custom", "optimizer_variables", "weights")


def test_membership_includes_unsaved_collections() -> None:
    planner, _ = plan_for(include_regex=["fc1"])
    assert planner.wants(WEIGHT, TRAIN, 0) == TensorPlan(True, frozenset(), ("default", "weights"))


def test_empty_custom_collection_fails_at_the_first_step() -> None:
    for arguments in ({"include_collections": ["mine"]}, {}):
        planner, manager = plan_for(**arguments)
        manager.get("mine")
        assert not planner.wanted_anywhere("x")
        with pytest.raises(
            InvalidCollectionConfiguration, match="'mine' has neither include_regex nor"
        ):
            planner.next_due(TRAIN, 0)
        manager.get("mine").include("x")
        assert planner.next_due(TRAIN, 0) == 0


def test_remedy_for_an_empty_collection_fits_its_cause() -> None:
    missing, _ = plan_for(include_collections=["wieghts"])
    with pytest.raises(InvalidCollectionConfiguration, match="did you mean 'weights'") as caught:
        missing.prepare()
    assert "drop it from include_collections" in str(caught.value)
    created, manager = plan_for()
    manager.get("my_own")
    with pytest.raises(InvalidCollectionConfiguration) as caught:
        created.prepare()
    assert "drop it from" not in str(caught.value)
    assert "name it in include_collections, or do not create it" in str(caught.value)
    assert "did you mean" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_unmatched_patterns_of_due_collections_are_reported() -> None:
    planner, manager = plan_for(include_collections=["mine", "late"], include_regex=["fc1", "typo"])
    manager.get("mine").include(["weight$", "nowhere", "fc9"])
    manager.get("late").include("never")
    save_config(manager, "late").start_step = 10
    assert planner.at(TRAIN, 0).due == ("default", "losses", "mine")
    assert planner.unmatched() == {}, "a step was due, and left out"
    assert planner.wants(WEIGHT, TRAIN, 0)
    assert planner.unmatched() == {"default": ("typo",), "mine": ("nowhere", "fc9")}
    save_config(manager, "late").start_step = 0  # what was asked before a change counts
    assert planner.unmatched() == {"default": ("typo",), "mine": ("nowhere", "fc9")}
    planner.wants("typo", TRAIN, 0)
    assert planner.unmatched() == {"late": ("never",), "mine": ("nowhere", "fc9")}
    planner.explicit("nowhere", ())
    assert planner.unmatched()["mine"] == ("fc9",)


def test_collections_of_other_frameworks_are_idle() -> None:
    planner, manager = plan_for(include_collections=["metrics", "layers", "weights"])
    planner.prepare()
    assert planner.idle() == ("metrics", "layers")
    metrics = manager.get("metrics").save_config
    assert metrics is not None
    metrics.end_step = 0
    assert planner.idle() == ("layers",)


def test_unsaved_collections_are_reported() -> None:
    planner, manager = plan_for(include_collections=["mine"])
    for name in ("mine", "other"):
        manager.get(name).include("relu")
    manager.get_manual("by_hand")
    assert planner.unsaved() == ("other",)
    everything, manager = plan_for(save_all=True)
    manager.get("other").include("relu")
    assert everything.unsaved() == ()


def test_requests_for_modules_are_enough() -> None:
    planner, manager = plan_for(include_collections=["mine"])
    mine = manager.get("mine")
    request = mine.request(object(), inputs=False, outputs=True)
    planner.prepare()
    assert not planner.wanted_anywhere("fc1_output_0")
    mine.bind(request, [r"^fc1_output_\d+$"])
    assert planner.wanted_anywhere("fc1_output_0")
    assert planner.wants("fc1_output_0", TRAIN, 0)


def test_wanted_anywhere_asks_every_mode() -> None:
    modes = {mode: SaveConfigMode(end_step=0) for mode in ModeKeys}
    planner, manager = plan_for(
        include_collections=["weights", "gradients"], save_config=SaveConfig(modes)
    )
    assert not planner.wanted_anywhere(WEIGHT)
    save_config(manager, "weights").get_save_config(EVAL).save_steps = [4]
    save_config(manager, "gradients").get_save_config(EVAL).save_steps = [4]
    assert planner.wanted_anywhere(WEIGHT)
    assert not planner.wanted_anywhere(GRADIENT)
    assert not planner.wanted_anywhere("fc1_output_0")


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 20), st.none() | st.integers(0, 40)),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
)
def test_next_due_is_the_first_step_with_anything_due(
    settings: list[tuple[int, int, int | None]], steps: list[int]
) -> None:
    names = [f"c{i}" for i in range(len(settings))]
    planner, manager = plan_for(include_collections=names, save_config=SaveConfig(end_step=0))
    for name, (interval, start, end) in zip(names, settings, strict=True):
        manager.add(Collection(name, "x", save_config=SaveConfig(None, interval, start, end)))
    for step in steps:  # in any order: the cache must not depend on it
        expected = next((s for s in range(step, 120) if planner.wants("x", TRAIN, s)), NEVER)
        assert planner.next_due(TRAIN, step) == expected
        due = [n for n in names if save_config(manager, n).should_save_step(TRAIN, step)]
        assert list(planner.at(TRAIN, step).due) == due


def test_steps_with_the_same_due_collections_share_a_plan() -> None:
    planner, _ = plan_for(save_config=SaveConfig(save_interval=5))
    assert planner.at(TRAIN, 0) is planner.at(TRAIN, 5)
    assert planner.at(TRAIN, 0) is not planner.at(EVAL, 0)
    plan = planner.at(TRAIN, 0)
    assert plan.wants(LOSS) is plan.wants(LOSS)


def test_a_known_name_is_not_matched_again() -> None:
    planner, manager = plan_for()
    asked: list[str] = []

    class Counting(Collection):
        def matches(self, name: str) -> bool:
            asked.append(name)
            return super().matches(name)

    manager.add(Counting("mine", "x"))
    for step in range(0, 3000, 500):
        planner.wants("x", TRAIN, step)
        planner.wants("x", EVAL, step)
        planner.wanted_anywhere("x")
    assert asked == ["x"]


CHANGES: list[Callable[[CollectionManager], object]] = [
    lambda m: setattr(save_config(m, "losses"), "save_interval", 1),
    lambda m: setattr(m.save_config, "save_interval", 1),
    lambda m: m.save_config.get_save_config(TRAIN).save_steps.append(1),
    lambda m: setattr(m.get("losses"), "save_config", SaveConfig(save_interval=1)),
    lambda m: m.add(Collection("losses", save_config=SaveConfig(save_interval=1))),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_effect_at_once(change: Callable[[CollectionManager], object]) -> None:
    planner, manager = plan_for()
    calls: list[int] = []
    end = planner.subscribe(lambda: calls.append(1))
    assert planner.next_due(TRAIN, 1) == 500
    assert planner.wants(LOSS, TRAIN, 1) is None
    assert not calls
    change(manager)
    assert calls
    assert planner.next_due(TRAIN, 1) == 1
    assert planner.wants(LOSS, TRAIN, 1)
    end()
    calls.clear()
    change(manager)
    assert not calls


def test_end_step_zero_stops_saving_losses() -> None:
    planner, manager = plan_for(include_collections=["weights"])
    assert planner.wants(LOSS, TRAIN, 0)
    save_config(manager, "losses").end_step = 0
    assert planner.wants(LOSS, TRAIN, 0) is None
    assert planner.wants(WEIGHT, TRAIN, 0)


def test_a_mutation_of_reductions_changes_plans() -> None:
    planner, manager = plan_for(include_collections=["weights"])
    assert planner.wants(WEIGHT, TRAIN, 0) == TensorPlan(True, frozenset(), ("weights",))
    weights = manager.get("weights").reduction_config
    assert weights is not None
    weights.reductions.append("mean")
    assert planner.wants(WEIGHT, TRAIN, 0) == TensorPlan(False, frozenset({"mean"}), ("weights",))


def test_explicit_tensors_are_kept_and_make_their_collections() -> None:
    planner, manager = plan_for()
    plan = planner.explicit("scalar/lr", ["default", "brand_new"])
    assert plan == TensorPlan(True, frozenset(), ("brand_new", "default"))
    assert planner.explicit("scalar/lr", ["default", "brand_new"]) is plan
    planner.prepare()
    assert "brand_new" in manager


def test_description_has_the_fields_of_collection_info() -> None:
    planner, manager = plan_for(include_collections=["mine"])
    mine = manager.get("mine")
    mine.bind(mine.request(object(), False, True), ["^fc_"])
    infos = {d["name"]: CollectionInfo(**d) for d in planner.description()}
    assert infos["mine"].include_regex == ("^fc_",)
    assert SaveConfig.from_dict(infos["losses"].save_config) == SaveConfig()
    assert ReductionConfig.from_dict(infos["losses"].reduction_config) == ReductionConfig()


def test_a_script_s_configuration_does_not_keep_a_planner_alive() -> None:
    mine = SaveConfig()
    planner, manager = plan_for(save_config=mine)
    gone = weakref.ref(planner)
    del planner, manager
    gc.collect()
    assert gone() is None
    mine.end_step = 3


def test_schedules_without_steps_are_reported() -> None:
    def planner(**settings: Any) -> Planner:
        planner, manager = plan_for(include_collections=["weights", "biases"])
        for name in ("weights", "biases"):
            manager.get(name).save_config = SaveConfig(**settings)
        return planner

    (schedule,) = (found := planner(save_interval=1, start_step=10, end_step=5).never_due())
    assert (schedule.start_step, schedule.end_step) == (10, 5)
    assert set(found[schedule]) == {"weights", "biases"}
    assert planner(save_interval=100, start_step=1, end_step=100).never_due()
    assert not planner(save_interval=100, start_step=1, end_step=101).never_due()
    assert not planner(end_step=0).never_due()
    assert not planner(start_step=10, end_step=5, save_steps=[3]).never_due()
