"""Choose how much of the long randomised tests runs: a rotating share, or all in `make soak`.

Everything is drawn from one seed. It is taken from `SMDIST_TEST_SEED`, or made from the day and
the commit, so that successive days and commits run different shares. tests/conftest.py prints it
in the header, hands it to the workers of pytest-xdist, and prints with each failure of a test that
used it the command that repeats the test.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SEED_VARIABLE = "SMDIST_TEST_SEED"
SOAK_VARIABLE = "SMDIST_SOAK"
SOAK = os.environ.get(SOAK_VARIABLE, "") not in ("", "0")
_ROOT = Path(__file__).parents[2]


def set_seed() -> int:
    """Choose the seed unless the environment has one, and put it there for child processes."""
    if not os.environ.get(SEED_VARIABLE):
        os.environ[SEED_VARIABLE] = str(_seed_of_today())
    return seed()


def seed() -> int:
    """Return the seed of this run of the tests."""
    return int(os.environ[SEED_VARIABLE])


def generator(*names: object) -> random.Random:
    """Return a generator that depends on the seed and on `names` alone."""
    return random.Random(" ".join(map(str, (seed(), *names))))


def _seed_of_today() -> int:
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short=6", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        commit = "0"
    return int(commit, 16) + int(time.time() // 86400)


def rotating_share(
    cases: Sequence[T], one_in: int, kind: Callable[[T], object] | None = None
) -> list[T]:
    """Return every `one_in`-th case of each kind, beginning at the seed; in a soak return all.

    Successive seeds return the other cases in turn. At least one case of each kind is returned.
    """
    if SOAK:
        return list(cases)
    kinds: dict[object, list[T]] = {}
    for case in cases:
        kinds.setdefault(kind and kind(case), []).append(case)
    return [
        case
        for members in kinds.values()
        for case in members[seed() % min(one_in, len(members)) :: one_in]
    ]


def at_most(soak: int, otherwise: int) -> int:
    """Return how often to repeat something random: `soak` times in a soak, else `otherwise`."""
    return soak if SOAK else otherwise


def repeat_command(nodeid: str) -> str:
    """Return the command that runs one test again with the same choices."""
    soak = f"{SOAK_VARIABLE}=1 " if SOAK else ""
    python = os.path.relpath(sys.executable, _ROOT)
    return f"{soak}{SEED_VARIABLE}={seed()} {python} -m pytest -n 0 '{nodeid}'"
