from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from smdist.config import PYTORCH, CollectionManager
from smdist.config.collection import Collection, CollectionKeys
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.config.save_config_mode import SaveConfigMode
from smdist.config.schedule import Schedule
from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys


class Counter:
    count = 0

    def changed(self) -> None:
        self.count += 1


@pytest.fixture
def manager() -> CollectionManager:
    return CollectionManager(PYTORCH, SaveConfig(save_interval=10), ReductionConfig())


def test_matching_is_search_or_exact_name() -> None:
    collection = Collection("c", include_regex="relu", tensor_names=["exact.name"])
    assert collection.matches("layer1.relu_output_0")
    assert collection.matches("exact.name")
    assert not collection.matches("exactXname")
    assert not collection.matches("an exact.name")
    collection.include(["^a{1,2}$", ("tanh",)])
    assert list(collection.include_regex) == ["relu", "^a{1,2}$", "tanh"]
    assert collection.matches("aa")


@pytest.mark.parametrize("bad", ["(", "a[", "*x"])
def test_bad_regex_names_collection_regex_and_position(bad: str) -> None:
    collection = Collection("mine", include_regex="good")
    attempts: list[Any] = [
        lambda: Collection("mine", include_regex=["ok", bad]),
        lambda: collection.include(bad),
        lambda: collection.include_regex.append(bad),
        lambda: setattr(collection, "include_regex", [bad]),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigurationError, match="collection 'mine': ") as caught:
            attempt()
        assert repr(bad) in str(caught.value)
        assert "at position" in str(caught.value)
    assert collection.include_regex == ["good"]


@pytest.mark.parametrize("value", [3, {"a": 1}, [None], b"x"])
def test_wrong_kinds_are_errors(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="include_regex"):
        Collection("c", include_regex=value)
    with pytest.raises(ConfigurationError, match="tensor_names"):
        Collection("c", tensor_names=value)
    with pytest.raises(ConfigurationError, match="save_config"):
        Collection("c", save_config=7)
    with pytest.raises(ConfigurationError, match="reduction_config"):
        Collection("c", reduction_config="mean")
    with pytest.raises(ConfigurationError, match="save_histogram"):
        Collection("c", save_histogram=value)
    with pytest.raises(ConfigurationError, match="name="):
        Collection("")


def test_names_can_be_edited_in_place() -> None:
    collection = Collection("c", tensor_names={"a"})
    collection.tensor_names.add("b")
    collection.add_tensor_name("c")
    collection.remove_tensor_name("a")
    collection.remove_tensor_name("missing")
    assert collection.tensor_names == {"b", "c"} == set(collection.tensor_names)
    assert collection.has_tensor_name("b")
    assert "a" not in collection.tensor_names


def test_every_change_reaches_listeners(manager: CollectionManager) -> None:
    listener = Counter()
    manager.watch(listener)
    weights = manager.get("weights")
    assert weights.save_config is not None
    assert weights.reduction_config is not None
    save, reduction = weights.save_config, weights.reduction_config
    changes: list[Any] = [
        lambda: weights.include("x"),
        lambda: setattr(weights, "include_regex", []),
        lambda: weights.add_tensor_name("t"),
        lambda: weights.remove_tensor_name("t"),
        lambda: setattr(save, "end_step", 4),
        lambda: save.get_save_config(ModeKeys.EVAL).save_steps.append(1),
        lambda: setattr(reduction, "norms", ["l1"]),
        lambda: setattr(manager.save_config, "save_interval", 3),
        lambda: setattr(manager.reduction_config, "save_shape", True),
        lambda: setattr(weights, "save_config", SaveConfig()),
        lambda: setattr(weights, "reduction_config", None),
        lambda: manager.add(Collection("new", "x")),
        lambda: manager.get("newer"),
        lambda: weights.request(object(), False, True),
        lambda: weights.bind(weights.unbound_requests[0], ["^fc1_output_"]),
    ]
    for place, change in enumerate(changes):
        before = listener.count
        change()
        assert listener.count > before, place
    before = listener.count
    save.end_step = 5  # no longer the collection's
    assert listener.count == before


def test_built_in_collections_of_pytorch(manager: CollectionManager) -> None:
    found = {
        name: {c for c, collection in manager.get_collections().items() if collection.matches(name)}
        for name in ("Net_fc1.weight", "gradient/Net_fc1.bias", "CrossEntropyLoss_output_0")
    }
    assert found["Net_fc1.weight"] == {"all", "weights"}
    assert found["gradient/Net_fc1.bias"] == {"all", "gradients"}
    assert found["CrossEntropyLoss_output_0"] == {"all", "losses"}
    assert manager.get("outputs").matches("layer1.0.relu_output_0")
    assert not manager.get("outputs").matches("fc1_input_0")
    assert not manager.get("losses").matches("CrossEntropyLoss_input_0")
    assert manager.get("weights").include_regex == ["^(?!gradient).*weight"]


def test_changing_a_collection_does_not_change_the_hook(manager: CollectionManager) -> None:
    losses, weights = manager.get(CollectionKeys.LOSSES), manager.get(CollectionKeys.WEIGHTS)
    assert losses.save_config is not None
    assert weights.save_config is not None
    assert weights.reduction_config is not None
    assert losses.save_config.save_interval == 10
    losses.save_config.end_step = 0
    weights.reduction_config.reductions = ["mean"]
    assert not losses.save_config.should_save_step(ModeKeys.TRAIN, 0)
    assert weights.save_config.should_save_step(ModeKeys.TRAIN, 0)
    assert manager.save_config.should_save_step(ModeKeys.TRAIN, 0)
    assert not manager.reduction_config.names
    manager.save_config.save_interval = 3
    assert weights.save_config.save_interval == 3


def test_partial_and_whole_overrides(manager: CollectionManager) -> None:
    partial = Collection("p", "x", save_config={ModeKeys.TRAIN: SaveConfigMode(save_interval=2)})
    whole = Collection("w", "x", save_config=SaveConfig(end_step=5))
    manager.add(partial)
    manager.add(whole)
    assert partial.save_config is not None
    assert whole.save_config is not None
    assert partial.save_config.schedule(ModeKeys.TRAIN).save_interval == 2
    assert partial.save_config.schedule(ModeKeys.EVAL).save_interval == 10
    assert whole.save_config.schedule(ModeKeys.EVAL).save_interval == 500


def test_adding_replaces_and_keeps_built_in_patterns(manager: CollectionManager) -> None:
    mine = Collection("losses", save_config=SaveConfig(save_interval=1))
    former = manager.get("losses")
    manager.add(mine)
    assert manager.get("losses") is mine
    assert mine.matches("CrossEntropyLoss_output_0")
    listener = Counter()
    manager.watch(listener)
    former.include("x")
    assert listener.count == 0
    with pytest.raises(ConfigurationError, match="is not a Collection"):
        manager.add(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no collection 'zz'"):
        manager.get("zz", create=False)
    manager.get_collections().clear()
    assert "losses" in manager


def test_requests_are_recorded_in_any_order() -> None:
    assert Collection("empty").selects_nothing
    collection = Collection("c")
    module = object()
    collection.request(module, inputs=True, outputs=False)
    request = collection.request(module, inputs=False, outputs=True)
    assert collection.requests == (request,)
    assert [r.target for r in collection.unbound_requests] == [module]
    assert not collection.selects_nothing
    assert not collection.matches("fc1_output_0")
    collection.bind(request, [r"^fc1_output_\d+$"])
    assert len(collection.unbound_requests) == 0
    assert collection.matches("fc1_output_0")
    assert collection.include_regex == []
    assert collection.bound_regex == (r"^fc1_output_\d+$",)


def test_round_trip_through_dict_json_and_pickle(manager: CollectionManager) -> None:
    mine = Collection(
        "c",
        include_regex=["a"],
        tensor_names=["t"],
        reduction_config=ReductionConfig(norms=["l2"]),
        save_config=SaveConfig(save_interval=3),
        save_histogram=False,
    )
    manager.add(mine)
    mine.request(object(), inputs=True, outputs=True)
    for twin in (
        Collection.from_json(mine.to_json()),
        copy.deepcopy(mine),
        pickle.loads(pickle.dumps(mine)),
    ):
        assert twin == mine
        assert hash(twin) == hash(mine)
        twin.include("b")
        assert twin != mine


def test_a_collection_that_moves_follows_its_new_hook(manager: CollectionManager) -> None:
    mine = Collection("mine", "x")
    manager.add(mine)
    assert mine.save_config is not None
    mine.save_config.start_step = 4
    other = CollectionManager(PYTORCH, SaveConfig(save_interval=7), ReductionConfig(["mean"]))
    other.add(mine)
    assert mine.save_config.schedule(ModeKeys.TRAIN) == Schedule(7, 4)
    assert mine.reduction_config is not None
    assert mine.reduction_config.names == {"mean"}
    listener = Counter()
    other.watch(listener)
    other.reduction_config.norms = ["l1"]
    assert listener.count
    assert mine.reduction_config.names == {"mean", "l1"}
