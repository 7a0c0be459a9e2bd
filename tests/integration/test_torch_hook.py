"""What the PyTorch hook captures, read back through a trial and compared bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smdist.pytorch as smd
from smdist.errors import TensorUnavailableForStep
from tests.integration.torch_jobs import (
    ALL,
    PARAMETERS,
    Net,
    as_array,
    hooked,
    read,
    same,
    train,
)

TRAIN, EVAL = smd.modes.TRAIN, smd.modes.EVAL


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


# -- when ------------------------------------------------------------------------------------------


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
            values["gradient/Generator_fc1.weight"] = as_array(_grad(generator.fc1.weight))
            values["gradient/Critic_fc1.weight"] = as_array(_grad(critic.fc1.weight))
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


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


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
        last = as_array(_grad(deep.a.weight))
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1]
    names = [n for n in trial.tensor_names(step=1) if "put_" in n]
    assert len(names) == len({n.rpartition("_")[0] for n in names}) == 8
    assert same(trial.tensor("gradient/Deep_a.weight").value(1), last)


# -- what ------------------------------------------------------------------------------------------


@dataclass
class Result:
    loss: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


def test_nested_outputs_keyword_inputs_and_repeated_calls(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor, flag: bool = True) -> Result:
            first = self.inner(x)
            return Result(first.sum(), (first, self.inner(first * mask)))

    odd, x, mask = Odd(), torch.randn(1, 2), torch.tensor([True, False])
    with hooked(tmp_path / "run", save_all=True) as hook:
        hook.register_module(odd)
        result = odd(x, mask=mask)
    trial = read(tmp_path / "run")
    for name, value in {
        "Odd_input_0": x,
        "Odd_input_1": mask,
        "Odd_output_0": result.loss,
        "Odd_output_1": result.hidden[0],
        "Odd_output_2": result.hidden[1],
        "inner_output_0": result.hidden[0],
        "inner_output_1": result.hidden[1],
        "inner_input_1": result.hidden[0] * mask,
    }.items():
        assert same(trial.tensor(name).value(0), as_array(value)), name


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_and_shape(tmp_path: Path, dtype: torch.dtype) -> None:
    base = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(1)) * 3
    tensor = (base > 0) if dtype is torch.bool else base.to(dtype)
    cases = {
        "plain": tensor,
        "scalar": tensor[0, 0, 0].clone(),
        "empty": tensor[:0],
        "transposed": tensor.transpose(0, 2),
        "sliced": tensor[:, 1:3, ::2],
        "expanded": tensor[:1].expand(3, 4, 5),
        "channels_last": tensor[None].contiguous(memory_format=torch.channels_last),
    }
    if dtype is torch.complex64:
        cases["conjugate"] = tensor.conj()
        cases["negative"] = tensor.conj().imag
    with hooked(tmp_path / "run") as hook:
        hook.step()  # so that the first value begins a step, and is not kept for one
        for name, value in cases.items():
            hook.save_tensor(name, value)
        hook.step()
    trial = read(tmp_path / "run")
    for name, value in cases.items():
        plain = value.resolve_conj().resolve_neg()
        assert same(trial.tensor(name).value(0), as_array(plain)), name


def test_models_of_reduced_precision_and_odd_memory(tmp_path: Path) -> None:
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(torch.bfloat16)
    conv = conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with hooked(tmp_path / "run", include_collections=ALL) as hook:
        hook.register_module(conv)
        images = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)
        output = conv(images.contiguous(memory_format=torch.channels_last))
        output.sum().backward()
        gradient = as_array(_grad(conv[0].weight))
    trial = read(tmp_path / "run")
    assert same(trial.tensor("Sequential_0.weight").value(0), as_array(conv[0].weight))
    assert same(trial.tensor("gradient/Sequential_0.weight").value(0), gradient)
    assert same(trial.tensor("1_output_0").value(0), as_array(output))


def test_a_value_is_what_it_was_when_it_was_captured(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.relu(self.fc(x))
            return out

    net, x = InPlace(), torch.randn(2, 4)
    expected = as_array(torch.nn.functional.linear(x, net.fc.weight, net.fc.bias))
    with hooked(tmp_path / "run", save_all=True) as hook:
        hook.register_module(net)
        with torch.no_grad():
            net(x).zero_()
            saved = torch.arange(4.0)
            hook.save_tensor("mine", saved)
            saved.zero_()
    trial = read(tmp_path / "run")
    assert same(trial.tensor("fc_output_0").value(0), expected)
    assert same(trial.tensor("relu_input_0").value(0), expected)
    assert same(trial.tensor("mine").value(0), np.arange(4.0, dtype=np.float32))


def test_frozen_shared_and_unused_parameters(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.frozen = nn.Linear(3, 3)
            self.frozen.requires_grad_(False)
            self.unused = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.frozen(self.embed(x)))
            return out

    tied = Tied()
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"]) as hook:
        hook.register_module(tied)
        for _ in range(2):
            tied(torch.tensor([1, 2])).sum().backward()
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1]
    assert set(trial.tensor_names()) == {
        "Tied_embed.weight",
        "Tied_frozen.weight",
        "Tied_unused.weight",
        "gradient/Tied_embed.weight",
    }


def test_parameters_that_are_replaced_are_found_again(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"]) as hook:
        hook.register_module(net)
        train(net, 1)
        net.fc2.weight = nn.Parameter(torch.ones(2, 8))
        net.half().float()
        before, computed = train(net, 1)
    trial = read(tmp_path / "run")
    assert same(trial.tensor("Net_fc2.weight").value(1), before[0]["fc2.weight"])
    assert same(trial.tensor("gradient/Net_fc2.weight").value(1), computed[0]["fc2.weight"])


def test_lazy_modules_appear_once_they_have_a_shape(tmp_path: Path) -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(net)
        net(torch.randn(2, 4))
        net(torch.randn(2, 4))
    trial = read(tmp_path / "run")
    assert trial.tensor("Sequential_0.weight").steps() == [1]
    assert trial.tensor("Sequential_1.weight").steps() == [0, 1]


def test_tensors_without_dense_values_are_reported_and_cost_nothing_else(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    settings = {"include_collections": ["weights", "gradients"], "on_error": "warn"}
    with hooked(tmp_path / "run", **settings) as hook:
        hook.register_module(net)
        for _ in range(3):
            net(torch.tensor([1, 2])).sum().backward()
        hook.save_tensor("nowhere", torch.empty(3, device="meta"))
        assert hook.errors == 4
    trial = read(tmp_path / "run")
    assert trial.tensor("gradient/Sequential_1.weight").steps() == [0, 1, 2]
    assert not trial.has_tensor("gradient/Sequential_0.weight")
    troubles = "\n".join(text for texts in trial.troubles().values() for text in texts)
    assert "gradient/Sequential_0.weight" in troubles
    assert "sparse" in troubles
    assert "meta device" in troubles


def test_reductions_instead_of_values(tmp_path: Path) -> None:
    net = Net()
    config = smd.ReductionConfig(reductions=["mean", "max"], norms=["l2"])
    with hooked(
        tmp_path / "run", include_collections=["weights", "gradients"], reduction_config=config
    ) as hook:
        hook.register_module(net)
        before, computed = train(net, 2)
    trial = read(tmp_path / "run")
    for step in range(2):
        for name, value in (
            ("Net_fc1.weight", before[step]["fc1.weight"]),
            ("gradient/Net_fc1.weight", computed[step]["fc1.weight"]),
        ):
            tensor, exact = trial.tensor(name), value.astype(np.float64)
            assert tensor.reduction_value(step, "mean") == pytest.approx(exact.mean(), rel=1e-12)
            assert tensor.reduction_value(step, "max") == exact.max()
            assert tensor.reduction_value(step, "l2") == pytest.approx(np.linalg.norm(exact))
            with pytest.raises(TensorUnavailableForStep):
                tensor.value(step)


# -- the script's own values -----------------------------------------------------------------------


def test_scalars_stay_at_their_step_whatever_the_interval(tmp_path: Path) -> None:
    net = Net()
    config = smd.SaveConfig(save_interval=5)
    with hooked(tmp_path / "run", include_collections=["weights"], save_config=config) as hook:
        hook.register_module(net)
        train(net, 8, after=lambda step: hook.save_scalar("loss", step * 1.5))
    trial = read(tmp_path / "run")
    assert trial.tensor("Net_fc1.weight").steps() == [0, 5]
    values = trial.tensor("scalar/loss").values()
    assert {step: float(value) for step, value in values.items()} == {
        step: step * 1.5 for step in range(8)
    }


def test_values_that_one_rank_adds_between_due_steps_make_no_step_partial(tmp_path: Path) -> None:
    for rank in (0, 1):
        net = Net()
        with hooked(
            tmp_path / "run",
            include_workers="all",
            rank=rank,
            world_size=2,
            save_config=smd.SaveConfig(save_interval=2),
            include_collections=["weights"],
        ) as hook:
            hook.register_module(net)
            for step in range(4):
                net(torch.ones(2, 4))
                if rank == 0:
                    hook.save_scalar("accuracy", step / 4)
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2, 3]
    assert trial.missing(1) == {}
    assert trial.tensor("scalar/accuracy").steps() == [0, 1, 2, 3]
    assert trial.tensor(PARAMETERS[0]).steps() == [0, 2]


def test_a_step_with_a_value_alone_is_closed_by_the_next(tmp_path: Path) -> None:
    net = Net()
    config = smd.SaveConfig(save_interval=100)
    with hooked(tmp_path / "run", include_collections=["weights"], save_config=config) as hook:
        hook.register_module(net)
        train(net, 3)
        hook.save_scalar("x", 1)
        capture = hook._outlet.capture
        assert capture is not None
        assert capture.open_step == (smd.modes.GLOBAL, 2, 2)
        train(net, 1)
        assert capture.open_step is None


def test_a_value_of_another_mode_does_not_draw_gradients_along(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:
        hook.register_module(net)
        hook.set_mode(EVAL)
        net(torch.randn(1, 4))
        hook.set_mode(TRAIN)
        loss = net(torch.randn(1, 4)).sum()
        hook.set_mode(EVAL)
        hook.save_scalar("accuracy", 0.5)
        hook.set_mode(TRAIN)
        loss.backward()
    trial = read(tmp_path / "run")
    assert trial.tensor("gradient/Net_fc1.weight").steps(mode=TRAIN) == [0]
    assert trial.tensor("scalar/accuracy").steps(mode=EVAL) == [0]


def test_values_saved_before_the_first_step_belong_to_it(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(net)
        hook.save_scalar("seed", 7)
        hook.set_mode(TRAIN)
        early = torch.ones(2)
        hook.save_tensor("early", early)
        early.zero_()
        net(torch.randn(1, 4))
        hook.set_mode(EVAL)
        hook.save_scalar("between", 1)
        net(torch.randn(1, 4))
        hook.set_mode(TRAIN)
        hook.save_scalar("accuracy", 0.5)
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == [0]
    assert trial.tensor("early").value(0, mode=TRAIN).tolist() == [1.0, 1.0]
    assert trial.tensor("scalar/between").steps(mode=EVAL) == [0]
    assert trial.tensor("scalar/accuracy").steps(mode=TRAIN) == [0]
    assert trial.has_tensor("scalar/seed")


def test_tensors_join_every_collection_they_are_given(tmp_path: Path) -> None:
    with hooked(tmp_path / "run") as hook:
        hook.save_tensor("a", np.arange(3), collections_to_write=["mine", "losses"])
        hook.save_tensor("b", [1.0, 2.0], collections_to_write="mine")
        hook.save_scalar("metric", 3, sm_metric=True)
        hook.step()
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names(collection="mine")) == {"a", "b"}
    assert trial.tensor_names(collection="losses") == ["a"]
    assert trial.tensor_names(collection="sm_metrics") == ["scalar/metric"]
    assert same(trial.tensor("a").value(0), np.arange(3))


def test_functional_losses(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run") as hook:
        hook.register_module(net)
        loss = nn.functional.mse_loss(net(torch.randn(2, 4)), torch.zeros(2, 2))
        hook.record_tensor_value("mse_loss", loss)
    trial = read(tmp_path / "run")
    assert same(trial.tensor("mse_loss_output_0").value(0), as_array(loss))
    assert trial.tensor_names(collection="losses") == ["mse_loss_output_0"]


@pytest.mark.parametrize("before", [True, False])
def test_tensors_of_a_module_by_hand(tmp_path: Path, before: bool) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["mine"]) as hook:
        if not before:
            hook.register_module(net)
        mine = hook.get_collection("mine")
        assert isinstance(mine, smd.Collection)
        mine.add_module_tensors(net.relu, inputs=True, outputs=True)
        if before:
            hook.register_module(net)
        net(torch.randn(2, 4))
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names(collection="mine")) == {"relu_input_0", "relu_output_0"}
