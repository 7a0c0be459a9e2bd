"""Names of things: modes, workers, steps. Pure; imports nothing of smdist."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

__all__ = ["ModeKeys", "StepRef", "encodable", "modes", "printable", "worker_name", "worker_rank"]


class ModeKeys(Enum):
    """The phase a step belongs to. GLOBAL is both the default phase and 'all phases' in queries."""

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


def encodable(text: str) -> str:
    """Half a surrogate pair, which no file and no terminal takes, is shown as an escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """`text` for a terminal or a log: what does not show, steers it or turns it around is escaped.

    Control characters, line breaks and marks of direction among them. For the rim, where text is
    printed: what is stored stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_WORKER = re.compile(r"worker_(\d+)")


def worker_name(rank: int) -> str:
    return f"worker_{rank}"


def worker_rank(worker: str) -> int:
    """Rank of a worker's name; ValueError for anything else."""
    found = _WORKER.fullmatch(worker)
    if found is None:
        raise ValueError(f"{worker!r} is not the name of a worker, such as 'worker_0'")
    return int(found[1])
