"""What the PyTorch hook captures, read back through a trial and compared bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.torch_jobs import (
    ALL,
    PARAMETERS,
    Net,
    as_array,
    hooked,
    read,
    same,
    train,
)


def test_weights_are_those_before_the_update_and_gradients_those_of_the_step(
    tmp_path: Path,
) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=ALL) as hook:
        hook.register_module(net)
        before, computed = train(net, 4)
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2, 3]
    assert set(trial.tensor_names(collection="weights")) == {PARAMETERS[0], PARAMETERS[2]}
    for step in range(4):
        for name, value in before[step].items():
            assert same(trial.tensor(f"Net_{name}").value(step), value)
        for name, value in computed[step].items():
            assert same(trial.tensor(f"gradient/Net_{name}").value(step), value)


def test_the_names_of_everything(tmp_path: Path) -> None:
    net, loss = Net(), nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters())
    with hooked(tmp_path / "run", save_all=True) as hook:
        hook.register_module(net)
        hook.register_loss(loss)
        hook.register_optimizer(optimizer)
        train(net, 2, loss, optimizer)
    trial = read(tmp_path / "run")
    modules = ["Net", "fc1", "relu", "fc2"]
    keys = ["step", "exp_avg", "exp_avg_sq"]
    assert set(trial.tensor_names()) == {
        *PARAMETERS,
        *(f"gradient/{name}" for name in PARAMETERS),
        *(f"{name}_{side}_0" for name in modules for side in ("input", "output")),
        "MSELoss_input_0",
        "MSELoss_input_1",
        "MSELoss_output_0",
        *(f"optimizer/{name}/{key}" for name in PARAMETERS for key in keys),
    }
    assert set(trial.tensor_names(collection="losses")) == {"MSELoss_output_0"}
    assert set(trial.tensor_names(collection="gradients")) == {f"gradient/{n}" for n in PARAMETERS}
    assert "Net_output_0" in trial.tensor_names(collection="outputs")
    # Before its first update an optimizer has no variables.
    assert trial.tensor("optimizer/Net_fc1.weight/exp_avg").steps() == [1]


def test_only_losses_are_saved_unless_more_is_asked_for(tmp_path: Path) -> None:
    net, loss = Net(), nn.CrossEntropyLoss()
    with hooked(tmp_path / "run") as hook:
        hook.register_module(net)
        hook.register_loss(loss)
        values = []
        for _ in range(3):
            value = loss(net(torch.randn(2, 4)), torch.tensor([0, 1]))
            values.append(as_array(value))
            value.backward()
    trial = read(tmp_path / "run")
    assert trial.tensor_names() == ["CrossEntropyLoss_output_0"]
    for step, value in enumerate(values):
        assert same(trial.tensor("CrossEntropyLoss_output_0").value(step), value)


def test_any_module_can_be_a_loss(tmp_path: Path) -> None:
    class Criterion(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"total": (x - y).abs().mean(), "other": x.sum()}

    net, loss = Net(), Criterion()
    with hooked(tmp_path / "run") as hook:
        hook.register_module(net)
        hook.register_loss(loss)
        loss(net(torch.randn(2, 4)), torch.zeros(2, 2))["total"].backward()
    trial = read(tmp_path / "run")
    names = {"Criterion_output_0", "Criterion_output_1"}
    assert set(trial.tensor_names(collection="losses")) == names


def test_optimizer_variables_have_the_values_before_the_update(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    kept: list[np.ndarray[Any, Any]] = []

    def after(_: int) -> None:
        kept.append(as_array(optimizer.state[net.fc1.weight]["exp_avg"]))

    with hooked(tmp_path / "run", include_collections=["optimizer_variables"]) as hook:
        hook.register_module(net)
        hook.register_optimizer(optimizer)
        train(net, 3, optimizer=optimizer, after=after)
    tensor = read(tmp_path / "run").tensor("optimizer/Net_fc1.weight/exp_avg")
    assert same(tensor.value(1), kept[0])
    assert same(tensor.value(2), kept[1])
