"""The hook beside torch.compile: same names, same values, and no part of any graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from tests.support.torch_jobs import ALL, Net, as_array, hooked, read, same, train

NAMES = {
    "Net_fc1.weight",
    "gradient/Net_fc1.weight",
    "fc1_output_0",
    "relu_output_0",
    "fc2_output_0",
    "Net_output_0",
    "MSELoss_output_0",
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(module: nn.Module, **settings: Any) -> nn.Module:
    found: Any = torch.compile(module, **settings)
    assert isinstance(found, nn.Module)
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("first", [0, 2])
def test_a_compiled_model_is_captured_with_all_its_parts(
    tmp_path: Path, backend: str, fullgraph: bool, first: int
) -> None:
    net, loss = Net(), nn.MSELoss()
    model = compiled(net, backend=backend, fullgraph=fullgraph)
    config = smd.SaveConfig(save_interval=3, start_step=first)
    with hooked(tmp_path / "run", include_collections=ALL, save_config=config) as hook:
        hook.register_module(model)
        hook.register_loss(loss)
        before, computed = train(model, 8, loss)
    trial = read(tmp_path / "run")
    steps = [step for step in range(first, 8) if step % 3 == 0]
    assert trial.steps() == steps
    for step in steps:
        assert set(trial.tensor_names(step=step)) >= NAMES
        weight = before[step]["_orig_mod.fc1.weight"]
        gradient = computed[step]["_orig_mod.fc1.weight"]
        assert same(trial.tensor("Net_fc1.weight").value(step), weight)
        assert same(trial.tensor("gradient/Net_fc1.weight").value(step), gradient)


# Of the compiler itself, where a graph ends at a hook.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_compiled_after_registering(tmp_path: Path, first: int, in_place: bool) -> None:
    net, loss = Net(), nn.MSELoss()
    config = smd.SaveConfig(save_interval=3, start_step=first)
    with hooked(tmp_path / "run", include_collections=ALL, save_config=config) as hook:
        hook.register_module(net)
        hook.register_loss(loss)
        if in_place:
            net.compile(backend="eager")
        model = net if in_place else compiled(net, backend="eager")
        train(model, 8, loss)
    trial = read(tmp_path / "run")
    steps = [step for step in range(first, 8) if step % 3 == 0]
    assert trial.steps() == steps
    for step in steps:
        assert set(trial.tensor_names(step=step)) >= NAMES


def test_steps_that_are_not_due_run_what_was_compiled(tmp_path: Path) -> None:
    calls = 0

    def counting(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        def run(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            return graph(*inputs)

        return run

    net = Net()
    model = compiled(net, backend=counting, fullgraph=True)
    config = smd.SaveConfig(save_interval=4)
    with hooked(tmp_path / "run", save_all=True, save_config=config) as hook:
        hook.register_module(model)
        with torch.no_grad():
            for _ in range(8):
                model(torch.randn(2, 4))
        assert calls == 6
        # Closed or not, nothing of the compiler's stays changed.
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert calls == 7


def test_nothing_is_compiled_away_or_twice_without_submodules(tmp_path: Path) -> None:
    net = Net()
    model = compiled(net, backend="eager", fullgraph=True)
    collections = ["weights", "gradients", "losses"]
    with hooked(tmp_path / "run", include_collections=collections) as hook:
        hook.get_collection("weights").include("^Net_output_0$")
        hook.register_module(model)
        outputs = []
        for _ in range(3):
            output = model(torch.randn(2, 4))
            outputs.append(as_array(output))
            output.sum().backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] <= 2
    trial = read(tmp_path / "run")
    for step, output in enumerate(outputs):
        assert same(trial.tensor("Net_output_0").value(step), output)


def test_a_full_graph_of_a_model_registered_before(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(net)
        before, _ = train(compiled(net, backend="eager", fullgraph=True), 3)
    trial = read(tmp_path / "run")
    for step in range(3):
        weight = before[step]["_orig_mod.fc1.weight"]
        assert same(trial.tensor("Net_fc1.weight").value(step), weight)


def test_a_full_graph_around_the_hook_says_what_to_do(tmp_path: Path) -> None:
    net = nn.Sequential(Net())  # a class of torch's own is compiled together with its hooks
    with hooked(tmp_path / "run") as hook:
        hook.register_module(net)
        model = compiled(net, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="register the compiled module"):
            model(torch.randn(2, 4))


@pytest.mark.parametrize("kind", ["returned", "other instance", "in place"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_graph_from_before_the_hook_is_told(tmp_path: Path, kind: str, first: int) -> None:
    net = Net()
    if kind == "in place":
        net.compile(backend="eager")
    model = net if kind == "in place" else compiled(net, backend="eager")
    former = compiled(Net(), backend="eager") if kind == "other instance" else model
    former(torch.randn(3, 4))
    config = smd.SaveConfig(save_interval=1, start_step=first)
    with hooked(tmp_path / "run", include_collections=["outputs"], save_config=config) as hook:
        hook.register_module(net)
        train(model, 4)
    trial = read(tmp_path / "run")
    assert trial.steps() == list(range(first, 4))
    assert not trial.has_tensor("fc1_output_0")
    (message,) = trial.troubles()["worker_0"]
    assert "fc1 and 2 more" in message
    assert "hook.register_module(model)" in message


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.fc(x))
        return out


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("ran_before", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_a_model_that_is_compiled_in_parts(
    tmp_path: Path, in_place: bool, ran_before: bool, first: int
) -> None:
    calls = 0

    def counting(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        def run(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            return graph(*inputs)

        return run

    part: nn.Module = Block()
    if in_place:
        part.compile(backend=counting)
    else:
        part = compiled(part, backend=counting)
    net = nn.Sequential(part, nn.Linear(4, 2))
    if ran_before:
        net(torch.randn(3, 4))
    config = smd.SaveConfig(save_interval=2, start_step=first)
    with hooked(tmp_path / "run", include_collections=["outputs"], save_config=config) as hook:
        hook.register_module(net)
        calls = 0
        train(net, 4)
        assert calls == (2 if first == 0 else 3)  # the graph, on steps that are not due
    trial = read(tmp_path / "run")
    assert trial.steps() == ([0, 2] if first == 0 else [2])
    for step in trial.steps():
        assert {"0.fc_output_0", "0.act_output_0"} <= set(trial.tensor_names(step=step))
    assert trial.troubles() == {}
    calls = 0
    net(torch.randn(3, 4))
    assert calls == 1


def test_a_compiled_model_with_a_part_that_does_not_run_is_no_trouble(tmp_path: Path) -> None:
    net = Net()
    net.add_module("unused", nn.Linear(4, 2))
    model = compiled(net, backend="eager")
    with hooked(tmp_path / "run", include_regex="unused_output") as hook:
        hook.register_module(model)
        train(model, 2)
    assert read(tmp_path / "run").troubles() == {}


# Of the compiler itself, where a graph ends at a hook.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_inside_another_compiled_function(
    tmp_path: Path, first: int, whole: bool
) -> None:
    net, loss = Net(), nn.MSELoss()
    model = compiled(net, backend="aot_eager", fullgraph=whole)

    @torch.compile(backend="aot_eager")
    def forward(x: torch.Tensor, y: torch.Tensor) -> Any:
        return loss(model(x), y)

    config = smd.SaveConfig(save_interval=2, start_step=first)
    losses = []
    with hooked(tmp_path / "run", include_collections=ALL, save_config=config) as hook:
        hook.register_module(model)
        hook.register_loss(loss)
        for _ in range(5):
            found = forward(torch.randn(3, 4), torch.zeros(3, 2))
            losses.append(as_array(found))
            found.backward()
    trial = read(tmp_path / "run")
    assert trial.steps() == ([0, 2, 4] if first == 0 else [2, 4])
    assert trial.troubles() == {}
    for step in trial.steps():
        assert set(trial.tensor_names(step=step)) >= NAMES
        assert same(trial.tensor("MSELoss_output_0").value(step), losses[step])
    assert not net._forward_pre_hooks


def test_a_full_graph_around_a_compiled_model_says_what_to_do(tmp_path: Path) -> None:
    model = compiled(Net(), backend="eager")

    @torch.compile(backend="eager", fullgraph=True)
    def around(x: torch.Tensor) -> Any:
        return model(x)

    with hooked(tmp_path / "run") as hook:
        hook.register_module(model)
        with pytest.raises(Exception, match="outside of functions compiled with fullgraph"):
            around(torch.randn(2, 4))
    around(torch.randn(2, 4))
