"""What scripts written for the ancestor ask a hook and its collections."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from tests.support.torch_jobs import Net, hooked, train


def test_a_hook_tells_how_it_was_configured(tmp_path: Path) -> None:
    every = smd.SaveConfig(save_interval=2)
    mean = smd.ReductionConfig(reductions=["mean"])
    with hooked(
        tmp_path / "run",
        save_config=every,
        reduction_config=mean,
        include_collections=["weights"],
        include_regex="relu",
    ) as hook:
        assert hook.save_config == every
        assert hook.reduction_config == mean
        assert set(hook.include_collections) == {"losses", "weights", "default"}
        assert list(hook.include_regex) == ["relu"]
        assert not hook.save_all
        assert not hook.dry_run
        assert hook.tensorboard_dir is None
        assert hook.collection_manager.get("weights") is hook.get_collection("weights")
        hook.logger.debug("a message of the script")
        hook.save_config.save_interval = 3
        saved = hook.get_collection("weights").save_config
        assert saved is not None
        assert saved.save_interval == 3
        with pytest.raises(AttributeError):
            hook.save_all = True  # type: ignore[misc]


def test_whether_only_what_always_is_is_saved(tmp_path: Path) -> None:
    with hooked(tmp_path / "plain") as hook:
        assert hook.has_default_configuration()
        assert not hook.has_default_hook_configuration(default_saved_collections=["weights"])
    with hooked(tmp_path / "more", include_collections=["weights"]) as hook:
        assert not hook.has_default_configuration()
        assert hook.has_default_hook_configuration(["losses", "weights"])


def test_whether_a_tensor_is_saved_now(tmp_path: Path) -> None:
    net = Net()
    config = smd.SaveConfig(save_interval=2)
    settings = {"include_collections": ["weights", "gradients"], "save_config": config}
    with hooked(tmp_path / "run", **settings) as hook:
        hook.register_module(net)
        ask = hook.should_save_tensor_or_collection
        assert not ask("Net_fc1.weight", "weights")
        train(net, 1)
        assert ask(tensor_name="Net_fc1.weight", collection_name="weights")
        assert ask("Net_fc1.weight", "gradients")
        assert ask("gradient/Net_fc1.bias", "gradients")
        assert ask("Net_fc1.weight", "biases")  # saved, though not because of them
        assert not ask("Net_fc1.bias", "biases")
        hook.set_mode(smd.modes.EVAL)
        net(torch.randn(1, 4))
        assert ask("Net_fc1.weight", "weights")
        assert not ask("gradient/Net_fc1.bias", "gradients")
        hook.set_mode(smd.modes.GLOBAL)
        train(net, 2)
        assert hook.global_step == 3
        assert not ask("Net_fc1.weight", "weights")
    assert not ask("Net_fc1.weight", "weights")


def test_collections_answer_to_older_names(tmp_path: Path) -> None:
    first, second = nn.Linear(1, 1), nn.ReLU()
    collection = smd.Collection("some")
    collection.include(t=["relu", "tanh"])
    assert list(collection.include_regex) == ["relu", "tanh"]
    collection.add_module_tensors(module=first, inputs=True, outputs=False)
    collection.add_module_tensors(second)
    assert dict(collection.modules) == {first: (True, False), second: (False, True)}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("record_trace_events", "torch.profiler"),
        ("forward_hook", "register_module"),
        ("export_collections", "trial.collections"),
    ],
)
def test_what_is_not_there_says_what_to_do(tmp_path: Path, name: str, remedy: str) -> None:
    with hooked(tmp_path / "run") as hook:
        assert not hasattr(hook, name)
        with pytest.raises(AttributeError, match=remedy):
            getattr(hook, name)
        with pytest.raises(AttributeError, match="'Hook' object has no attribute 'regster_module'"):
            hook.regster_module  # type: ignore[attr-defined]  # noqa: B018
