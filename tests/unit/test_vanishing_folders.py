"""The last spool that goes takes the folder of all spools along, while others look into it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smdist.workers.memory import check_spool
from smdist.workers.recover import find_spools
from smdist.workers.spool import private_root, sweep_rehearsals

LOOKS = 5000  # many times as many as it takes to meet the moment


COME_AND_GO = """
import contextlib, os, sys
print(flush=True)
while True:
    for come_or_go in (os.mkdir, os.rmdir):
        with contextlib.suppress(OSError):  # somebody has put something into it
            come_or_go(sys.argv[1])
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Its folder of spools comes and goes all the time."""
    command = [sys.executable, "-c", COME_AND_GO, str(private_root(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield tmp_path
        finally:
            process.kill()


LOOKING: list[Callable[[Path], object]] = [
    lambda root: find_spools([root]),
    lambda root: sweep_rehearsals(private_root(root)),
    lambda root: check_spool(str(root), {}),
]


@pytest.mark.parametrize("look", LOOKING, ids=["find_spools", "sweep_rehearsals", "check_spool"])
def test_who_looks_for_spools_meanwhile_is_not_disturbed(
    root: Path, look: Callable[[Path], object]
) -> None:
    for _ in range(LOOKS):
        look(root)
