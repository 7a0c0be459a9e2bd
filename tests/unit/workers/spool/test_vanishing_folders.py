"""The last spool that goes takes the folder of all spools along, while others look into it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smdist.workers.hook.buffer_location import check_spool
from smdist.workers.spool.private_files import private_root
from smdist.workers.spool.spool import remove_leftovers
from smdist.workers.upload.recover import find_spools

LOOKS = 5000  # many times as many as it takes to meet the moment


COME_AND_GO = """
import contextlib, os, sys
print(flush=True)
while True:
    with contextlib.suppress(OSError):
        os.mkdir(sys.argv[1], 0o700)
    with contextlib.suppress(OSError):  # somebody has put something into it
        os.rmdir(sys.argv[1])
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
    lambda root: remove_leftovers(private_root(root)),
    lambda root: check_spool(str(root), {}),
]


@pytest.mark.parametrize("look", LOOKING, ids=["find_spools", "remove_leftovers", "check_spool"])
@pytest.mark.slow
def test_who_looks_for_spools_meanwhile_is_not_disturbed(
    root: Path, look: Callable[[Path], object]
) -> None:
    for _ in range(LOOKS):
        look(root)
