"""An optimizer that reduces gradients as Horovod's does: when it steps, between two calls of hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.torch_jobs import Net, as_array, hooked, read, same


class Reducing(torch.optim.SGD):
    """torch calls hooks of a step in each of the classes that the step passes through."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._handles: dict[Any, object] = {}
        self.meanwhile: Callable[[], None] | None = None

    def synchronize(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile()
        for parameter in self._handles:
            parameter.grad.mul_(0.5)  # as if another rank had zeros
        self._handles.clear()

    def step(self, closure: Any = None) -> Any:
        self.synchronize()
        return super().step(closure)


def backward(model: nn.Module, optimizer: Reducing) -> None:
    optimizer.zero_grad()
    loss: Any = nn.functional.mse_loss(model(torch.randn(5, 4)), torch.randn(5, 2))
    loss.backward()
    optimizer._handles = dict.fromkeys(model.parameters())


@pytest.fixture
def model() -> Net:
    model = Net()
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on hooks are called in that class, too
    return model


@pytest.mark.parametrize("stage", ["local", "synced"])
def test_gradients_and_variables(tmp_path: Path, stage: str, model: Net) -> None:
    optimizer = Reducing(model.parameters(), lr=0.1, momentum=0.9)
    gradients, buffers = [], []
    wanted = ["gradients", "optimizer_variables"]
    with hooked(tmp_path / "run", stage_gradients=stage, include_collections=wanted) as hook:
        hook.register_module(model)
        hook.register_optimizer(optimizer)
        for step in range(3):
            backward(model, optimizer)
            found: Any = model.fc1.weight.grad
            gradients.append(as_array(found * (0.5 if stage == "synced" else 1.0)))
            if step:
                buffers.append(as_array(optimizer.state[model.fc1.weight]["momentum_buffer"]))
            optimizer.step()
    with read(tmp_path / "run") as trial:
        assert trial.steps() == [0, 1, 2]
        kept = trial.tensor("optimizer/Net_fc1.weight/momentum_buffer")
        assert kept.steps() == [1, 2]
        for step in range(3):
            saved = trial.tensor("gradient/Net_fc1.weight").value(step)
            assert same(saved, gradients[step])
            assert step == 0 or same(kept.value(step), buffers[step - 1])


def test_a_step_is_not_complete_while_its_gradients_are_reduced(tmp_path: Path, model: Net) -> None:
    """Who reads it then, or a rank that is killed then, must not take it for what it will be."""
    optimizer = Reducing(model.parameters(), lr=0.1)
    seen: list[list[int]] = []

    def look() -> None:
        hook.flush()
        with read(tmp_path / "run") as trial:
            seen.append(list(trial.steps()))

    with hooked(
        tmp_path / "run", stage_gradients="synced", include_collections=["weights", "gradients"]
    ) as hook:
        hook.register_module(model)
        hook.register_optimizer(optimizer)
        optimizer.meanwhile = look
        for _ in range(3):
            backward(model, optimizer)
            optimizer.step()
    assert seen == [[], [0], [0, 1]]
