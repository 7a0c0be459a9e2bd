"""What is trained: each model with a step that takes as long as it takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["MODELS", "Job", "count_bytes", "training"]


class Job(NamedTuple):
    model: nn.Module
    step: Callable[[], None]
    example: torch.Tensor


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.scaled_dot_product_attention(
            self.query(x), self.key(x), self.value(x)
        )
        found: torch.Tensor = self.out(mixed)
        return found


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = _Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        found: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return found


class _Many(nn.Module):
    """Tensors of 4 KB each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(1024)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.parts)).view(len(self.parts), 1024) @ x


def training(model: nn.Module, example: torch.Tensor) -> Callable[[], None]:
    """One step of it, to be called again and again."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(example).square().mean()
        loss.backward()
        optimizer.step()

    return step


def _job(model: nn.Module, example: torch.Tensor) -> Job:
    return Job(model, training(model, example), example)


def mlp(batch: int = 256, sizes: tuple[int, ...] = (784, 1700, 1700, 1200, 10)) -> Job:
    """6.3 million parameters in 8 tensors: 50 MB of weights and gradients."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return _job(nn.Sequential(*layers[:-1]), torch.randn(batch, sizes[0]))


def mlp25() -> Job:
    """25 million parameters in 8 tensors: 200 MB of weights and gradients."""
    return mlp(sizes=(784, 3600, 3600, 2600, 10))


def transformer(batch: int = 4) -> Job:
    """6.3 million parameters in 92 tensors."""
    width, blocks = 256, 8
    model = nn.Sequential(
        nn.Linear(64, width), *(_Block(width) for _ in range(blocks)), nn.LayerNorm(width)
    )
    return _job(model, torch.randn(batch, 64, 64))


def many() -> Job:
    """1000 tensors of 4 KB."""
    return _job(_Many(1000), torch.randn(1024, 4))


def large() -> Job:
    """One tensor of 256 MB."""
    return _job(nn.Linear(8192, 8192, bias=False), torch.randn(64, 8192))


def narrow() -> Job:
    """100 tensors, so small that a microsecond shows."""
    return _job(nn.Sequential(*(nn.Linear(16, 16) for _ in range(50))), torch.randn(8, 16))


MODELS: dict[str, Callable[[], Job]] = {
    "large": large,
    "mlp": mlp,
    "mlp25": mlp25,
    "transformer": transformer,
    "many": many,
    "narrow": narrow,
}


def count_bytes(model: nn.Module) -> int:
    """Of weights and gradients together."""
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters())
