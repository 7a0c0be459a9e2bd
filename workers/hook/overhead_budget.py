"""How much of what is due fits into a budget of training time. Pure: costs and times are told to it.

A capture costs the training thread what it spends in it, and everybody the uploader's processor
time, which is taken from all processors alike: that is an estimate from above where one is idle.
From costs per capture and time per due step follows the *stride*, a power of two: of the due
positions those are kept that it divides. Ranks choose their stride each for itself, without a
word to each other; as strides divide each other, the steps that the slowest rank keeps are kept by all.

When even one in `MOST_STRIDE` positions is too dear, raw tensors become statistics for the rest of
the session, and the stride is found anew.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

__all__ = ["MOST_STRIDE", "Budget", "Spent"]

MOST_STRIDE = 64
_START_STRIDE = 4
_WARM_UP = 2  # captures that pay for memory and processes, not for tensors
_LEAST, _MOST = 4, 32  # captures that an estimate is made of
_AIM = 0.75  # of the budget: what is not measured (caches, torch's own calls) needs some, too
_EASE = 0.9  # a stride is halved when it would do with this much of the aim


class Spent(NamedTuple):
    """Up to now: by the clock, and seconds that captures took from training and the uploader used."""

    now: float
    training_s: float
    uploader_s: float


class _Sample(NamedTuple):
    positions: int
    captures: int
    spent: Spent


class Budget:
    """Asked once for every step that is due."""

    def __init__(self, share: float, processors: int) -> None:
        self._share, self._processors = share, max(1, processors)
        self.stride, self.reduced = _START_STRIDE, False
        self._positions = self._captures = 0
        self._samples: deque[_Sample] = deque(maxlen=_MOST + 1)
        self.expected = 0.0  # share that the present setting should cost, 0 while unknown

    def keeps(self, position: int, spent: Spent) -> bool:
        """Whether the due step at `position` (its step over the interval) is to be captured."""
        self._positions += 1
        if position % self.stride:
            return False
        if self._captures >= _WARM_UP:
            self._samples.append(_Sample(self._positions, self._captures, spent))
            self._adapt()
        if position % self.stride:
            return False
        self._captures += 1
        return True

    def _adapt(self) -> None:
        first, last = self._samples[0], self._samples[-1]
        captures = last.captures - first.captures
        if captures < _LEAST:
            return
        training_s = last.spent.training_s - first.spent.training_s
        uploader_s = last.spent.uploader_s - first.spent.uploader_s
        wall_s = last.spent.now - first.spent.now
        cost_s = (training_s + uploader_s / self._processors) / captures
        per_position_s = max(wall_s - training_s, 1e-9) / (last.positions - first.positions)
        needed = cost_s / (per_position_s * self._share * _AIM)
        self.expected = cost_s / (per_position_s * self.stride)
        if needed > MOST_STRIDE and not self.reduced:
            self.reduced = True
            self._move_to(MOST_STRIDE)
        elif needed > self.stride:
            self._move_to(1 << math.ceil(math.log2(needed)))
        elif self.stride > 1 and needed <= _EASE * self.stride / 2:
            self._move_to(self.stride // 2)

    def _move_to(self, stride: int) -> None:
        """What was measured so far was measured under other conditions."""
        self.expected *= self.stride / stride
        self.stride = stride
        self._samples.clear()
