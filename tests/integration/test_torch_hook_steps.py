"""When the PyTorch hook captures: modes, intervals, what a step is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smdist.pytorch as smd
from tests.support.torch_jobs import (
    ALL,
    Net,
    as_array,
    grad_of,
    hooked,
    read,
    same,
    train,
)

TRAIN, EVAL = smd.modes.TRAIN, smd.modes.EVAL


def test_modes_have_their_own_steps(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=ALL) as hook:
        hook.register_module(net)
        for mode in (TRAIN, TRAIN, EVAL, EVAL, TRAIN, TRAIN):
            hook.set_mode(mode)
            net.zero_grad()
            output = net(torch.randn(2, 4))
            if mode is TRAIN:
                output.sum().backward()
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2, 3, 4, 5]
    assert trial.steps(mode=TRAIN) == [0, 1, 2, 3]
    assert trial.steps(mode=EVAL) == [0, 1]
    assert trial.global_step(EVAL, 1) == 3
    assert trial.mode(4) is TRAIN
    assert trial.mode_step(4) == 2
    gradient = trial.tensor("gradient/Net_fc1.weight")
    assert gradient.steps() == [0, 1, 4, 5]
    assert gradient.steps(mode=EVAL) == []


def test_a_step_that_is_not_due_leaves_nothing_on_the_model(tmp_path: Path) -> None:
    net = Net()
    config = smd.SaveConfig(save_interval=3)
    seen = []

    def hooks() -> int:
        modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
        parameters: list[Any] = list(net.parameters())
        return modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in parameters)

    with hooked(tmp_path / "run", save_all=True, save_config=config) as hook:
        hook.register_module(net)
        for _ in range(7):
            net(torch.randn(2, 4)).sum().backward()
            seen.append(hooks())
    assert [count > 1 for count in seen] == [True, False, False, True, False, False, True]
    assert [count for count in seen if count == 1] == [1] * 4  # what counts forwards
    assert hooks() == 0
    assert read(tmp_path / "run").steps() == [0, 3, 6]


def test_nothing_is_watched_that_nobody_wants(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_regex="^fc2_output_0$|^gradient/Net_fc1.bias") as hook:
        hook.register_module(net)
        net(torch.randn(2, 4)).sum().backward()
        assert len(net.fc2._forward_hooks) == 1
        assert not any(
            [*net.fc1._forward_hooks, *net.fc1._forward_pre_hooks, *net.relu._forward_hooks]
        )
        watched: Any = {
            name: getattr(p, "_post_accumulate_grad_hooks", None)
            for name, p in net.named_parameters()
        }
        assert [name for name, hooks in watched.items() if hooks] == ["fc1.bias"]
    assert set(read(tmp_path / "run").tensor_names()) == {"fc2_output_0", "gradient/Net_fc1.bias"}


def test_collections_have_intervals_of_their_own(tmp_path: Path) -> None:
    net = Net()
    with hooked(
        tmp_path / "run",
        include_collections=["weights", "biases", "gradients"],
        save_config=smd.SaveConfig(save_interval=2),
    ) as hook:
        hook.get_collection("biases").save_config = smd.SaveConfig(save_interval=3)
        hook.register_module(net)
        train(net, 7)
    trial = read(tmp_path / "run")
    assert trial.tensor("Net_fc1.weight").steps() == [0, 2, 4, 6]
    assert trial.tensor("Net_fc1.bias").steps() == [0, 3, 6]
    # A gradient of a bias is no bias.
    assert trial.tensor("gradient/Net_fc1.bias").steps() == [0, 2, 4, 6]


def test_configuration_can_change_while_training(tmp_path: Path) -> None:
    net = Net()
    config = smd.SaveConfig(save_interval=1000)
    with hooked(tmp_path / "run", include_collections=["weights"], save_config=config) as hook:
        hook.register_module(net)
        train(net, 3)
        hook.get_collection("weights").save_config.save_interval = 2  # type: ignore[union-attr]
        train(net, 4)
        hook.get_collection("weights").save_config.end_step = 0  # type: ignore[union-attr]
        train(net, 3)
    assert read(tmp_path / "run").tensor("Net_fc1.weight").steps() == [0, 4, 6]


def test_an_optimizer_step_spans_accumulated_backwards(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sums = []
    with hooked(tmp_path / "run", include_collections=ALL) as hook:
        hook.register_optimizer(optimizer)
        hook.register_module(net, step_on="optimizer")
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(4):
                net(torch.randn(2, 4)).sum().backward()
            sums.append(
                {n: as_array(p.grad) for n, p in net.named_parameters() if p.grad is not None}
            )
            optimizer.step()
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2]
    for step, expected in enumerate(sums):
        for name, value in expected.items():
            assert same(trial.tensor(f"gradient/Net_{name}").value(step), value)
        outputs = [n for n in trial.tensor_names(step=step) if n.startswith("fc2_output_")]
        assert outputs == [f"fc2_output_{i}" for i in range(4)]


@pytest.mark.parametrize("at_start", [True, False])
def test_steps_drawn_by_hand(tmp_path: Path, at_start: bool) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(net, step_on="manual")
        for number in range(3):
            if at_start:
                hook.step()
            net(torch.randn(1, 4))
            net(torch.randn(1, 4))
            hook.save_scalar("number", number)
            if not at_start:
                hook.step()
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2]
    values = trial.tensor("scalar/number").values()
    assert {step: int(value) for step, value in values.items()} == {0: 0, 1: 1, 2: 2}


def test_a_job_without_a_model_has_steps_too(tmp_path: Path) -> None:
    with hooked(tmp_path / "run") as hook:
        for number in range(3):
            hook.save_scalar("number", number)
            hook.step()
    values = read(tmp_path / "run").tensor("scalar/number").values()
    assert {step: int(value) for step, value in values.items()} == {0: 0, 1: 1, 2: 2}


def test_two_models_share_the_steps_of_the_first(tmp_path: Path) -> None:
    class Generator(Net):
        pass

    class Critic(Net):
        def __init__(self) -> None:
            super().__init__(width=2)

    generator, critic, loss = Generator(), Critic(), nn.BCEWithLogitsLoss()
    first = torch.optim.SGD(generator.parameters(), lr=0.1)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    kept: list[dict[str, np.ndarray[Any, Any]]] = []
    with hooked(tmp_path / "run", include_collections=ALL) as hook:
        hook.register_module(generator)
        hook.register_module(critic)
        hook.register_loss(loss)
        for _ in range(3):
            values: dict[str, np.ndarray[Any, Any]] = {}
            fake = generator(torch.randn(2, 4))
            second.zero_grad()
            loss(critic(torch.randn(2, 2)), torch.ones(2, 2)).backward()
            loss(critic(fake.detach()), torch.zeros(2, 2)).backward()
            second.step()
            first.zero_grad()
            second.zero_grad()
            loss(critic(fake), torch.ones(2, 2)).backward()
            values["gradient/Generator_fc1.weight"] = as_array(grad_of(generator.fc1.weight))
            values["gradient/Critic_fc1.weight"] = as_array(grad_of(critic.fc1.weight))
            first.step()
            kept.append(values)
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2]
    names = trial.tensor_names(step=1)
    assert {"Generator_fc1.weight", "Critic_fc1.weight", "fc1_output_0"} <= set(names)
    assert [n for n in names if n.startswith("Critic_output")] == [
        "Critic_output_0",
        "Critic_output_1",
        "Critic_output_2",
    ]
    assert {"Critic.fc1_output_2", "BCEWithLogitsLoss_output_2"} <= set(names)
    for step, values in enumerate(kept):
        for name, value in values.items():
            assert same(trial.tensor(name).value(step), value)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_forwards_are_not_recorded(tmp_path: Path, reentrant: bool) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in (self.a, self.b):
                x = checkpoint(part, x, use_reentrant=reentrant)
            result: torch.Tensor = self.out(x)
            return result

    deep = Deep()
    with hooked(tmp_path / "run", save_all=True) as hook:
        hook.register_module(deep)
        for _ in range(2):
            deep.zero_grad()
            deep(torch.randn(2, 4, requires_grad=True)).sum().backward()
        last = as_array(grad_of(deep.a.weight))
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1]
    names = [n for n in trial.tensor_names(step=1) if "put_" in n]
    assert len(names) == len({n.rpartition("_")[0] for n in names}) == 8
    assert same(trial.tensor("gradient/Deep_a.weight").value(1), last)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(4, 1)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        verdict: torch.Tensor = self.judge(sample)
        return verdict


def test_with_steps_drawn_by_hand_any_model_begins_one(tmp_path: Path) -> None:
    """The critic runs first in every iteration, the counting model later."""
    maker, critic, loss = nn.Linear(4, 4), Critic(), nn.BCEWithLogitsLoss()
    losses, gradients = [], []
    with hooked(tmp_path / "run", include_collections=["gradients", "weights"]) as hook:
        hook.register_module(maker, step_on="manual")
        hook.register_module(critic)
        hook.register_loss(loss)
        for _ in range(3):
            critic.zero_grad()
            real = loss(critic(torch.randn(2, 4)), torch.ones(2, 1))
            real.backward()
            made = loss(critic(maker(torch.randn(2, 4))), torch.zeros(2, 1))
            made.backward()
            losses.append([real.item(), made.item()])
            gradients.append(as_array(grad_of(critic.judge.weight).clone()))
            hook.step()
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2]
    for step in range(3):
        found = [trial.tensor(f"BCEWithLogitsLoss_output_{i}").value(step).item() for i in range(2)]
        assert found == losses[step]
        assert same(trial.tensor("gradient/Critic_judge.weight").value(step), gradients[step])
    assert trial.tensor_names(regex="output_2") == []
    assert trial.troubles() == {}


def test_with_steps_drawn_by_hand_a_loss_begins_one_too(tmp_path: Path) -> None:
    model, loss = nn.Linear(4, 1), nn.MSELoss()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(model, step_on="manual")
        hook.register_loss(loss)
        for step in range(3):
            if step:
                loss(torch.full((1,), float(step)), torch.zeros(1))
            loss(model(torch.ones(1, 4)), torch.zeros(1, 1))
            hook.step()
    trial = read(tmp_path / "run")
    first = trial.tensor("MSELoss_output_0")
    assert [first.value(step).item() for step in (1, 2)] == [1.0, 4.0]
    assert trial.tensor("MSELoss_output_1").steps() == [1, 2]


def test_what_runs_after_a_change_of_mode_is_not_of_the_step_before(tmp_path: Path) -> None:
    net, loss = Net(), nn.MSELoss()
    with hooked(tmp_path / "run", include_collections=["outputs"]) as hook:
        hook.register_module(net)
        hook.register_loss(loss)
        hook.set_mode(TRAIN)
        loss(net(torch.randn(2, 4)), torch.zeros(2, 2)).backward()
        hook.set_mode(EVAL)
        loss(torch.ones(2), torch.zeros(2))
    trial = read(tmp_path / "run")
    assert trial.tensor_names(regex="MSELoss") == ["MSELoss_output_0"]


def test_steps_of_an_optimizer_that_nobody_registered_are_told(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=ALL) as hook:
        hook.register_module(net, step_on="optimizer")
        train(net, 2)
    told = read(tmp_path / "run").troubles()
    assert "register_optimizer" in told["worker_0"][0]
