"""Losses over steps: the mean over the ranks of each step, as short arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import Place
from smdist.rules.builtin.selection import newest

if TYPE_CHECKING:
    from smdist.tables.rows import Rows

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["Series", "series_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One number per step, in the order of steps. `modes` and `mode_steps` name the steps."""

    steps: Array  # the numbers by which steps are ordered and compared
    values: Array
    modes: Array
    mode_steps: Array
    attempts: Array

    def __len__(self) -> int:
        return len(self.steps)

    def place(self, at: int, ranks: tuple[int, ...] = ()) -> Place:
        """Return a place for a finding."""
        return Place(
            row=at,
            attempt=int(self.attempts[at]),
            mode=ModeKeys(int(self.modes[at])),
            mode_step=int(self.mode_steps[at]),
            step=int(self.steps[at]),
            order=0,
            ranks=ranks,
        )


def series_of(part: Rows, *, by_global_step: bool = False) -> Series:
    """Return the mean over ranks of a tensor's mean at each step, of its newest attempt."""
    at = newest(part)
    at = at[part["count"][at] > 0]
    with np.errstate(all="ignore"):
        means = part["sum"][at] / part["count"][at]
    steps = part["step" if by_global_step else "mode_step"][at]
    unique, first, inverse = np.unique(steps, return_index=True, return_inverse=True)
    inverse = inverse.ravel()
    with np.errstate(all="ignore"):
        values = np.bincount(inverse, means, len(unique)) / np.bincount(inverse, None, len(unique))
    rows = at[first]
    return Series(
        unique, values, part["mode"][rows], part["mode_step"][rows], part["attempt"][rows]
    )
