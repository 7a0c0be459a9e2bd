"""Copies of a hook, and of models that have one hanging on them or as an attribute."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smdist.pytorch as smd
from tests.support.torch_jobs import Net, hooked, read
from tests.support.waiting import until


def test_copies_and_pickles_of_a_model_are_free_of_the_hook(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", save_all=True) as hook:
        hook.register_module(net)
        loss = net(torch.randn(1, 4)).sum()  # in the middle of a recorded step
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        clones = [
            copy.deepcopy(net),
            pickle.loads(pickle.dumps(net)),
            torch.load(buffer, weights_only=False),
        ]
        loss.backward()
        for clone in clones:
            clone(torch.randn(1, 4)).sum().backward()
        assert hook.global_step == 0
    assert read(tmp_path / "run").steps() == [0]


class Holder(nn.Module):
    """Has its hook as an attribute, as modules that train themselves do."""

    def __init__(self, hook: smd.Hook) -> None:
        super().__init__()
        self.net = Net()
        self.hook = hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hook.save_scalar("inside", 1.0)
        out: torch.Tensor = self.net(x)
        return out


def test_a_copy_of_a_model_shares_the_hook_that_is_its_attribute(tmp_path: Path) -> None:
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        model = Holder(hook)
        hook.register_module(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        model(torch.randn(1, 4)).sum().backward()
        average.update_parameters(model)
        average(torch.randn(1, 4))  # no step of the registered model
        copied: Any = average.module
        assert copied.hook is hook
        assert copy.copy(hook) is hook
        assert copy.deepcopy({"hook": hook})["hook"] is hook
        assert hook.global_step == 0
    assert read(tmp_path / "run").steps() == [0]


def test_a_loaded_hook_is_silent(tmp_path: Path) -> None:
    with hooked(tmp_path / "run") as hook:
        model = Holder(hook)
        hook.register_module(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        model(torch.randn(1, 4))
    until(lambda: not (tmp_path / "run/.tmp").exists(), "its uploader to be gone")
    before = sorted(tmp_path.rglob("*"))
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loaded.hook.register_module(loaded)
    loaded(torch.randn(1, 4))
    loaded.hook.get_collection("weights").save_config.end_step = 0
    loaded.hook.close()
    assert type(loaded.hook) is smd.Hook
    assert loaded.hook.out_dir == hook.out_dir
    assert loaded.hook.global_step == -1
    assert sorted(tmp_path.rglob("*")) == before
