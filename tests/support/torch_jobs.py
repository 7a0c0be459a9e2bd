"""Small training jobs for tests of the PyTorch hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

import smdist.pytorch as smd
from smdist.trials import Trial

EVERY_STEP = smd.SaveConfig(save_interval=1)
ALL = ["weights", "biases", "gradients", "outputs", "losses", "optimizer_variables"]


def beside_waiting(said: Iterable[str]) -> list[str]:
    """What is said but for words about an uploader that a busy machine keeps waiting."""
    waiting = ("waiting for the uploader", "the process that trained is gone")
    return [line for line in said if not any(words in line for words in waiting)]


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 8)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.relu(self.fc1(x)))
        return out


PARAMETERS = ["Net_fc1.weight", "Net_fc1.bias", "Net_fc2.weight", "Net_fc2.bias"]


@contextmanager
def hooked(out_dir: Path, **settings: Any) -> Iterator[smd.Hook]:
    """A hook that raises its own errors, saves every step unless told otherwise, and is closed."""
    settings = {
        "save_config": EVERY_STEP,
        "on_error": "raise",
        "buffer_bytes": 64 << 20,
        "close_timeout_s": 60.0,
        **settings,
    }
    hook = smd.Hook(out_dir, **settings)
    try:
        yield hook
        hook.close()
    finally:
        hook.close()


def read(out_dir: Path) -> Trial:
    return smd.create_trial(str(out_dir))


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The very bits, under the type that a trial gives."""
    tensor = tensor.detach().contiguous()
    special = {
        torch.bfloat16: ml_dtypes.bfloat16,
        torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
        torch.float8_e5m2: ml_dtypes.float8_e5m2,
    }
    if tensor.dtype in special:
        bits = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8)
        array: np.ndarray[Any, Any] = bits.numpy().view(special[tensor.dtype])
        return array
    plain: np.ndarray[Any, Any] = tensor.numpy().copy()
    return plain


def same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    """Equal in type, shape and every bit."""
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


def weights(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {name: as_array(p) for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {n: as_array(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def train(
    model: nn.Module,
    steps: int,
    loss: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[int], None] = lambda _: None,
    width: int = 4,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Copies of weights before, and of gradients after, every step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    before, computed = [], []
    for step in range(steps):
        optimizer.zero_grad()
        before.append(weights(model))
        output = model(torch.randn(3, width))
        value = output.square().mean() if loss is None else loss(output, torch.zeros_like(output))
        value.backward()
        computed.append(gradients(model))
        optimizer.step()
        after(step)
    return before, computed
