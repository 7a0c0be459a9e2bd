"""The training thread's two primitives against the physical limit and against what else there is.

For the same bytes of float32, interleaved so that a busy machine hits all alike, medians:

    memcpy        ctypes.memmove, warm memory: the limit everything is divided by
    copy          smdist.kernel.copy
    statistics    smdist.kernel.statistics: all ten columns, from which every reduction follows
    torch x5      min, max, mean, std, norm as five calls per tensor
    numpy x5      the same in numpy

Run: python benchmarks/kernel.py [--rounds 31]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from smdist import kernel

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

Array = np.ndarray[Any, np.dtype[Any]]
Contender = tuple[str, "Callable[[], object]"]

SHAPES = {
    "25 MB in 1 tensor": [6_250_000],
    "25 MB in 92 tensors": [67_934] * 92,
    "1000 tensors of 4 KB": [1024] * 1000,
}


def contenders(counts: list[int], source: Array, target: Array, rows: Array) -> list[Contender]:
    """They know the three arrays by address only: the caller keeps them."""
    total = sum(counts)
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    arrays = [source[a:b] for a, b in itertools.pairwise(starts)]
    sources = [source.ctypes.data + 4 * at for at in starts[:-1]]
    targets = [target.ctypes.data + 4 * at for at in starts[:-1]]
    sizes, dtypes = [4 * n for n in counts], ["F32"] * len(counts)
    out, stride = rows.ctypes.data, rows.strides[0]
    numpy_kernel = kernel.NumpyKernel.statistics
    found: list[Contender] = [
        ("memcpy", lambda: ctypes.memmove(targets[0], sources[0], 4 * total)),
        ("copy", lambda: kernel.copy(targets, sources, sizes, targets[0])),
        ("statistics", lambda: kernel.statistics(sources, counts, dtypes, out, stride)),
        ("statistics, numpy", lambda: numpy_kernel(sources, counts, dtypes, out, stride)),
        ("numpy x5", lambda: [_five_of_numpy(array) for array in arrays]),
    ]
    if torch is not None:
        torch.set_num_threads(1)
        tensors = [torch.from_numpy(array) for array in arrays]
        found.append(("torch x5", lambda: [_five_of_torch(tensor) for tensor in tensors]))
    return found


def _five_of_numpy(x: Array) -> tuple[Any, ...]:
    return x.min(), x.max(), x.mean(), x.std(), np.linalg.norm(x)


def _five_of_torch(x: Any) -> tuple[Any, ...]:
    return x.min(), x.max(), x.mean(), x.std(correction=0), x.norm()


def measure(functions: list[Contender], rounds: int) -> dict[str, float]:
    """Median seconds of each. Every timed call follows an untimed one, so its memory is warm."""
    seconds: dict[str, list[float]] = {name: [] for name, _ in functions}
    for _ in range(rounds):
        for name, function in functions:
            function()
            begin = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="copies and statistics, as ratios to memcpy")
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    print("kernel:", "compiled" if kernel.compiled else "numpy fallback")
    for title, counts in SHAPES.items():
        source = np.random.default_rng(0).standard_normal(sum(counts)).astype(np.float32)
        target, rows = np.zeros_like(source), np.zeros((len(counts), len(kernel.COLUMNS)))
        medians = measure(contenders(counts, source, target, rows), rounds)
        print(f"\n{title}")
        for name, value in medians.items():
            print(f"  {name:<18} {value * 1e3:9.3f} ms   {value / medians['memcpy']:7.2f} x memcpy")


if __name__ == "__main__":
    main()
