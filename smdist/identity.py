"""Modes, steps and worker names. Pure; imports nothing of smdist."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

__all__ = ["ModeKeys", "StepRef", "modes", "worker_name", "worker_rank"]


class ModeKeys(Enum):
    """The phase a step belongs to. GLOBAL is the default phase; in queries it means all phases."""

    TRAIN = 1
    EVAL = 2
    PREDICT = 3
    GLOBAL = 4


modes = ModeKeys


class StepRef(NamedTuple):
    """One step of one rank: `(mode, mode_step)` identifies it, `step` is its global number."""

    mode: ModeKeys
    mode_step: int
    step: int


_WORKER = re.compile(r"worker_(\d+)")


def worker_name(rank: int) -> str:
    return f"worker_{rank}"


def worker_rank(worker: str) -> int:
    """Return the rank in a worker's name. Raises ValueError for any other text."""
    found = _WORKER.fullmatch(worker)
    if found is None:
        raise ValueError(f"{worker!r} is not a worker name such as 'worker_0'")
    return int(found[1])
