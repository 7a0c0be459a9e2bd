"""What the example jobs must have saved: computed again, from the weights and inputs of the trial.

Each of the three functions checks the values of given steps of both ranks, and that each update of
the weights follows from what both ranks computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from smdist.trials import Trial

Array = np.ndarray[Any, np.dtype[Any]]

RANKS = (0, 1)
PARAMETERS = [f"{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
# Relative and absolute, of what is computed again by the same library, or by hand.
EXACT, CLOSE = (1e-4, 1e-6), (1e-3, 1e-4)
KERNEL, BIAS = "top/weights/top/kernel:0", "top/weights/top/bias:0"


def value(trial: Trial, name: str, step: int, worker: int = 0) -> Any:
    return trial.tensor(name).value(step, worker=worker)


def of_torch(trial: Trial, steps: Sequence[int], *, synced: bool = False) -> None:
    for step in steps:
        before = [{n: value(trial, f"Net_{n}", step, rank) for n in PARAMETERS} for rank in RANKS]
        inputs = [value(trial, "Net_input_0", step, rank) for rank in RANKS]
        local = [_by_torch(*given) for given in zip(before, inputs, strict=True)]
        for name in PARAMETERS:
            np.testing.assert_array_equal(before[0][name], before[1][name])
            gradient, computed = f"gradient/Net_{name}", [of_rank[name] for of_rank in local]
            mean = _check_gradients(trial, gradient, step, computed, EXACT, synced=synced)
            if step + 1 in steps:
                after = value(trial, f"Net_{name}", step + 1)
                np.testing.assert_allclose(after, before[0][name] - 0.125 * mean, atol=1e-5)


def _by_torch(weights: dict[str, Array], features: Array) -> dict[str, Array]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    parameters = dict(zip(PARAMETERS, model.parameters(), strict=True))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[name].copy()))
    inputs = torch.from_numpy(features.copy())
    loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(dim=1))
    found = torch.autograd.grad(loss, list(parameters.values()))
    return {name: gradient.numpy() for name, gradient in zip(parameters, found, strict=True)}


def of_keras(trial: Trial, steps: Sequence[int], *, synced: bool = False) -> None:
    """Under Horovod: each rank has data of its own, and the mean of its batch as loss."""
    data = [np.random.default_rng(rank).normal(size=(32, 16)).astype(np.float32) for rank in RANKS]

    def batch(step: int, rank: int) -> Array:
        start = step % 4 * 8
        return data[rank][start : start + 8]

    _check_keras(trial, steps, batch, share=1.0, synced=synced)
    if trial.has_tensor("inputs"):  # not in a traced loop
        for step, rank in product(steps, RANKS):
            np.testing.assert_array_equal(value(trial, "inputs", step, rank), batch(step, rank))


def of_multi_worker(trial: Trial, steps: Sequence[int], *, synced: bool = False) -> None:
    """The loss is the mean over the batches of both: each counts for half."""

    def batch(step: int, rank: int) -> Any:
        return value(trial, "inputs", step, rank)

    _check_keras(trial, steps, batch, share=0.5, synced=synced)


def _check_keras(
    trial: Trial,
    steps: Sequence[int],
    batch: Callable[[int, int], Array],
    *,
    share: float,
    synced: bool,
) -> None:
    for step in steps:
        np.testing.assert_array_equal(*(value(trial, KERNEL, step, rank) for rank in RANKS))
        local = [_by_hand(trial, step, rank, batch(step, rank), share) for rank in RANKS]
        for name, key in ((KERNEL, "kernel"), (BIAS, "bias")):
            gradient, computed = f"gradients/top/{key}Grad", [of_rank[key] for of_rank in local]
            mean = _check_gradients(trial, gradient, step, computed, CLOSE, synced=synced)
            if step + 1 in steps:
                after = value(trial, name, step) - 0.01 / share * mean
                np.testing.assert_allclose(value(trial, name, step + 1), after, atol=1e-4)


def _by_hand(trial: Trial, step: int, rank: int, x: Array, share: float) -> dict[str, Array]:
    out = x @ value(trial, KERNEL, step, rank) + value(trial, BIAS, step, rank)
    error = share * 2 * (out - x.sum(axis=1, keepdims=True)) / len(x)
    return {"kernel": x.T @ error, "bias": error.sum(axis=0)}


def _check_gradients(
    trial: Trial,
    name: str,
    step: int,
    local: Sequence[Array],
    tolerance: tuple[float, float],
    *,
    synced: bool,
) -> Array:
    """The mean over the ranks, after the saved ones turned out to be those, or the local ones."""
    mean: Array = (local[0] + local[1]) / 2
    if local[0].size > 1:  # one number may be the same by chance
        assert not np.allclose(local[0], local[1], rtol=1e-2), "ranks see different data"
    for rank in RANKS:
        saved, expected = value(trial, name, step, rank), mean if synced else local[rank]
        np.testing.assert_allclose(saved, expected, *tolerance)
    return mean
