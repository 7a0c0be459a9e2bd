"""Samples, and what is divided by what."""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from smdist.workers.torch_adapter.callbacks import Callback, Counting

__all__ = ["CLOCKS", "Clock", "HookClock", "Memcpy", "median", "p99"]

Clock = Callable[[], int]

# On a busy machine a thread's own time says more; a small call is dearer to measure with it.
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}

median = statistics.median


def p99(samples: Sequence[float]) -> float:
    """The sample that 99 in 100 do not exceed: of fewer than 100, the largest."""
    ordered = sorted(samples)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


class HookClock:
    """Nanoseconds inside every callback that smdist hangs on modules, parameters and optimizers.

    Within the `with`, that is everything the hook does on the training thread; what torch itself
    does to call a hook is not in it, and shows in the step times only.
    """

    def __init__(self, now: Clock) -> None:
        self._now = now
        self.ns = 0
        self.calls = 0

    def __enter__(self) -> Self:
        now = self._now
        self._originals = {kind: kind.__call__ for kind in (Callback, Counting)}

        def timing(original: Callable[..., None]) -> Callable[..., None]:
            def timed(callback: Callback, *arguments: Any) -> None:
                begin = now()
                original(callback, *arguments)
                self.ns += now() - begin
                self.calls += 1

            return timed

        for kind, original in self._originals.items():
            kind.__call__ = timing(original)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for kind, original in self._originals.items():
            kind.__call__ = original  # type: ignore[method-assign]

    def take(self) -> int:
        """Nanoseconds since the last call."""
        ns, self.ns, self.calls = self.ns, 0, 0
        return ns


class Memcpy:
    """The physical limit: the same bytes with one memcpy from warm memory into warm memory.

    Between tensors, as training has them. numpy would ask for huge pages (`huge=True`): those are
    faster, and neither tensors nor (by default) shared memory have them.
    """

    def __init__(self, nbytes: int, now: Clock, *, huge: bool = False) -> None:
        self._now, self._nbytes = now, nbytes
        if huge:
            source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            self._kept: tuple[object, object] = (source, target)
            self._source, self._target = source.ctypes.data, target.ctypes.data
        else:
            tensors = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
            self._kept = tensors
            self._source, self._target = tensors[0].data_ptr(), tensors[1].data_ptr()

    def __call__(self) -> int:
        """Nanoseconds of the second of two in a row."""
        ctypes.memmove(self._target, self._source, self._nbytes)
        begin = self._now()
        ctypes.memmove(self._target, self._source, self._nbytes)
        return self._now() - begin
