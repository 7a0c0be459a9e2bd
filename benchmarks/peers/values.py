"""The values of a run that is written in several formats, to be read back from each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Run", "checksum", "value"]


@dataclass(frozen=True)
class Run:
    ranks: int
    steps: int
    tensors: int
    size: int  # numbers in a tensor


def value(run: Run, rank: int, step: int, number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    seed = (rank * run.steps + step) * run.tensors + number
    return np.linspace(seed, seed + 1, run.size, dtype=np.float32)


def checksum(arrays: Iterable[Any]) -> float:
    return float(sum(float(np.sum(array, dtype=np.float64)) for array in arrays))
