"""Which tensors the PyTorch hook captures: nested, odd, of every type, as they were at that moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from smdist.errors import TensorUnavailableForStep
from tests.support.torch_jobs import (
    ALL,
    Net,
    as_array,
    grad_of,
    gradients,
    hooked,
    read,
    same,
    train,
)


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
        gradient = as_array(grad_of(conv[0].weight))
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


def test_parameters_that_change_in_place_are_read_as_they_are(tmp_path: Path) -> None:
    """Their module still has the same objects: nothing but a look at them can tell."""
    net: Any = nn.Sequential(nn.Linear(4, 8, bias=False))
    net.forward = lambda x: x  # it need not fit
    weight: Any = net[0].weight
    kept = torch.rand(8, 4)
    changes = [
        kept,
        torch.ones(8, 4),
        torch.rand(16, 4)[::2],
        torch.rand(4, 8).t(),
        torch.rand(4, 8),
        torch.rand(4, 8).double(),
    ]
    expected = []
    settings = {"include_collections": ["weights"], "on_error": "warn"}
    with hooked(tmp_path / "run", **settings) as hook:
        hook.register_module(net)
        for changed in (*changes, None, kept):
            if changed is None:
                weight.untyped_storage().resize_(0)  # as FSDP does between uses
            else:
                weight.data = changed
                expected += 2 * [changed.clone().numpy()]
            net(torch.zeros(1))
            net(torch.zeros(1))
    trial = read(tmp_path / "run")
    tensor = trial.tensor("Sequential_0.weight")
    assert tensor.steps() == [*range(12), 14, 15]
    for step, value in zip(tensor.steps(), expected, strict=True):
        assert tensor.value(step).dtype == value.dtype
        assert same(tensor.value(step), value)
    assert any("freed" in text for texts in trial.troubles().values() for text in texts)


def test_lazy_modules_appear_once_they_have_a_shape(tmp_path: Path) -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(net)
        net(torch.randn(2, 4))
        net(torch.randn(2, 4))
    trial = read(tmp_path / "run")
    assert trial.tensor("Sequential_0.weight").steps() == [1]
    assert trial.tensor("Sequential_1.weight").steps() == [0, 1]


@pytest.mark.parametrize("stage", ["local", "synced"])
def test_the_first_step_of_a_lazy_model_has_all_its_gradients(tmp_path: Path, stage: str) -> None:
    net, computed = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(1)), []
    settings = {"include_collections": ["gradients", "outputs"], "stage_gradients": stage}
    with hooked(tmp_path / "run", **settings) as hook:
        hook.register_module(net)
        for _ in range(2):
            net.zero_grad()
            net(torch.randn(2, 4)).sum().backward()
            computed.append(gradients(net))
    trial = read(tmp_path / "run")
    assert trial.tensor("1_output_0").steps() == [0, 1]
    for step, expected in enumerate(computed):
        assert len(expected) == 4
        for name, value in expected.items():
            assert same(trial.tensor(f"gradient/Sequential_{name}").value(step), value), name


class Odd(nn.Module):
    """With a parameter whose elements no store takes, and two whose memory was given back."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        half = torch.zeros(3, dtype=torch.complex32)
        flat = torch.randn(64)
        self.typed = nn.Parameter(half, requires_grad=False)
        self.freed = nn.Parameter(torch.randn(100, 100), requires_grad=False)
        self.view = nn.Parameter(flat[8:40].view(4, 8), requires_grad=False)
        self.shrunk = nn.Parameter(torch.randn(8, 8)[:, :2], requires_grad=False)
        self.repeated = nn.Parameter(torch.randn(1).expand(5), requires_grad=False)
        self.freed.untyped_storage().resize_(0)
        flat.untyped_storage().resize_(0)
        self.shrunk.untyped_storage().resize_(4 * 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(x)
        return out


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_tensor_that_cannot_be_read_is_left_out_alone(tmp_path: Path) -> None:
    odd = Odd()
    optimizer = torch.optim.SGD(odd.fc.parameters(), 0.1, momentum=0.9)
    with hooked(tmp_path / "run", save_all=True, on_error="warn") as hook:
        hook.register_module(odd)
        hook.register_optimizer(optimizer)
        for _ in range(3):
            odd(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            state = optimizer.state[odd.fc.weight]
            state["half"] = torch.zeros(2, dtype=torch.complex32)
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2]
    for name in ("Odd_fc.weight", "Odd_repeated", "gradient/Odd_fc.weight", "fc_output_0"):
        assert trial.tensor(name).steps() == [0, 1, 2]
    assert trial.tensor("optimizer/Odd_fc.weight/momentum_buffer").steps() == [1, 2]
    troubles = [text for texts in trial.troubles().values() for text in texts]
    for name, why in {
        "Odd_typed": "complex32 cannot be stored. Exclude it",
        "Odd_freed": "freed",
        "Odd_view": "freed",
        "Odd_shrunk": "shrunk",
        "optimizer/Odd_fc.weight/half": "converted copy",
    }.items():
        assert not trial.has_tensor(name)
        assert [why in text for text in troubles if text.startswith(f"{name} ")] == [True], name


def test_modules_that_are_added_or_wrapped_later_are_found(tmp_path: Path) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.extra = base, nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.base(x) + self.extra(x)
            return out

    net: Any = Net()
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"]) as hook:
        hook.register_module(net)
        train(net, 1)
        net.fc1 = Adapter(net.fc1)
        net.head = nn.Linear(2, 2)
        before, computed = train(net, 2)
    trial = read(tmp_path / "run")
    assert trial.tensor("Net_fc1.weight").steps() == [0]
    for name in ("fc1.base.weight", "fc1.extra.weight", "fc2.weight"):
        assert same(trial.tensor(f"Net_{name}").value(2), before[1][name])
        assert same(trial.tensor(f"gradient/Net_{name}").value(1), computed[0][name])
    assert trial.tensor("Net_head.weight").steps() == [1, 2]


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


class Lazy(Mapping[str, torch.Tensor]):
    def __getitem__(self, key: str) -> torch.Tensor:
        if key == "labels":
            raise RuntimeError("no labels in inference")
        return torch.ones(1, 4)

    def __iter__(self) -> Iterator[str]:
        return iter(["x", "labels"])

    def __len__(self) -> int:
        return 2


def test_an_input_that_cannot_be_read_is_told_and_harms_nothing(tmp_path: Path) -> None:
    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, batch: Mapping[str, torch.Tensor], rest: Any = None) -> torch.Tensor:
            out: torch.Tensor = self.net(batch["x"])
            return out

    net = Batched()
    with hooked(tmp_path / "run", save_all=True, on_error="warn") as hook:
        hook.register_module(net)
        net(Lazy(), torch.zeros(2))
        net({"ids": list(range(100_000)), "x": torch.ones(1, 4)})
    trial = read(tmp_path / "run")
    assert trial.tensor("Batched_input_0").value(0).tolist() == [[1.0] * 4]
    assert trial.tensor("Batched_input_1").value(0).tolist() == [0.0] * 2
    assert trial.tensor("Batched_input_0").value(1).tolist() == [[1.0] * 4]
    long, broken = sorted(trial.troubles()["worker_0"])
    assert "inputs of Batched for tensors: RuntimeError: no labels in inference" in broken
    assert "inputs of Batched" in long
    assert "after 256 entries" in long


@pytest.mark.parametrize(
    ("regex", "names"),
    [
        ("Many_output_4$", ["Many_output_4"]),
        (["part_output_[45]$"], ["part_output_4", "part_output_5"]),
        (r"Many_output_\d\d$", ["Many_output_10", "Many_output_11"]),
        (r"Many_output_(?![0-9]$)", ["Many_output_10", "Many_output_11"]),
    ],
)
def test_an_expression_may_single_out_any_number(
    tmp_path: Path, regex: Any, names: list[str]
) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.ReLU()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(self.part(x + i) for i in range(12))

    many = Many()
    with hooked(tmp_path / "run", include_regex=regex) as hook:
        hook.register_module(many)
        many(torch.ones(2))
    trial = read(tmp_path / "run")
    assert trial.tensor_names() == names
    first = names[0]
    assert trial.tensor(first).value(0).tolist() == [1.0 + int(first.rpartition("_")[2])] * 2


def test_a_number_beyond_all_usual_ones_can_be_written_out(tmp_path: Path) -> None:
    relu = nn.ReLU()
    with hooked(tmp_path / "run", include_regex="ReLU_output_120$") as hook:
        hook.register_module(relu, step_on="manual")
        for i in range(130):
            relu(torch.tensor([float(i)]))
        hook.step()
    trial = read(tmp_path / "run")
    assert trial.tensor_names() == ["ReLU_output_120"]
    assert trial.tensor("ReLU_output_120").value(0).tolist() == [120.0]


def test_names_that_would_be_the_same_are_not(tmp_path: Path) -> None:
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output_0 = nn.Parameter(torch.full((3,), 2.0))
            self.Echo = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.Echo(x * self.output_0) + 1
            return out

    echo = Echo()
    with hooked(tmp_path / "run", save_all=True) as hook:
        hook.register_module(echo)
        echo(torch.ones(3)).sum().backward()
    trial = read(tmp_path / "run")
    assert trial.tensor("Echo_output_0").value(0).tolist() == [3.0] * 3
    assert trial.tensor("Echo.Echo_output_0").value(0).tolist() == [2.0] * 3
    assert trial.tensor("Echo_.output_0").value(0).tolist() == [2.0] * 3
    assert trial.tensor("gradient/Echo_.output_0").value(0).tolist() == [1.0] * 3
