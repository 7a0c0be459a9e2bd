"""SIGKILL the uploader: training goes on, another one takes over, every value is stored once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from operator import itemgetter
from pathlib import Path

import pytest

from smdist.coordination.view.membership import RankStatus
from smdist.identity import modes
from smdist.processes import is_alive, is_stopped
from smdist.trials import create_trial
from tests.faults.audit import assert_in_run, audit, unexplained
from tests.faults.launcher import (
    REPOSITORY,
    Launcher,
    Started,
    ack_page_of,
    drained,
    spools,
    uploader_of,
    uploaders,
)
from tests.faults.places import Place, at
from tests.support.sampling import at_most, generator, rotating_share
from tests.support.waiting import until

pytestmark = pytest.mark.ranks

TRAIN = modes.TRAIN
MOST_IN_A_ROW = 4  # without progress in between; after 8 nobody is started any more

# Goes on until it is told to stop, so that uploaders can be killed as long as a test likes.
ENDLESS = """
import sys, time
from pathlib import Path

stop = Path(order.arguments["stop"])

def before_step(step):
    time.sleep(0.01)  # so as not to fill the disk
    if stop.exists():
        sys.exit(0)

train(order, before_step=before_step)
"""


def spool_of(root: Path, started: Started) -> Path:
    found: list[Path] = []

    def there() -> bool:
        assert started.code is None, repr(started)
        found[:] = [path for path in spools(root) if f"-{started.pid}-" in path.name]
        return bool(found)

    until(there, "the spool", about=lambda: started)
    return found[0]


def all_begun(pid: int, spool: Path) -> bool:
    """Is all that `pid` has started by now what it was started as?"""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent != pid or not is_alive(int(path.parent.name)):
                continue
            if str(spool).encode() not in (path.parent / "cmdline").read_bytes():
                return False
    return True


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was done
        os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), f"uploader {pid} to die")


@pytest.mark.parametrize(
    ("place", "times"),
    at(("directory", at_most(6, 3)), ("rclone", at_most(4, 2)), ("moto", at_most(3, 2))),
    indirect=["place"],
)
def test_killed_uploaders(launcher: Launcher, place: Place, tmp_path: Path, times: int) -> None:
    chance = generator("uploaders", place.name)
    root, stop = tmp_path / "spools", tmp_path / "stop"
    print(f"run in {tmp_path}")  # noqa: T201
    ranks = [
        launcher.start(
            tmp_path / f"rank-{rank}",
            ENDLESS,
            place.environ,
            rank=rank,
            world=2,
            steps=100_000,
            width=(64, 256)[rank],
            stop=str(stop),
            hook={
                "out_dir": place.out_dir,
                "spool_dir": str(root),
                "linger_s": 0.02,
                "segment_bytes": 1 << 20,
                "buffer_bytes": 8 << 20,
            },
        )
        for rank in range(2)
    ]
    folders = [spool_of(root, started) for started in ranks]
    kills = [0, 0]
    rows = [0, 0]  # kills since the last progress
    acked = [0, 0]
    while min(kills) < times:
        which = chance.randrange(2)
        spool, started = folders[which], ranks[which]
        with ack_page_of(spool) as ack_page:
            if ack_page.acked > acked[which]:
                acked[which], rows[which] = ack_page.acked, 0
            if rows[which] >= MOST_IN_A_ROW:
                until(lambda: ack_page.acked > acked[which], "progress")  # noqa: B023
                continue
        until(lambda: uploaders(spool), "another uploader", about=lambda: started)  # noqa: B023
        if chance.random() < 0.8:  # else while it starts
            until(lambda: uploader_of(spool), "it to begin", about=lambda: started)  # noqa: B023
        time.sleep(chance.uniform(0.0, 0.1))  # a moment, not a synchronisation
        for pid in uploaders(spool):
            kill(pid)
            kills[which] += 1
            rows[which] += 1
    reached = [len(started.evidence()) for started in ranks]
    until(
        lambda: all(len(s.evidence()) > n for s, n in zip(ranks, reached, strict=True)),
        "training to go on",
    )
    stop.touch()
    for started in ranks:
        assert started.wait() == 0, repr(started)
    drained(root)
    found = audit(place.objects())
    with create_trial(place.out_dir) as trial:
        assert trial.loaded_all_steps
        assert trial.workers() == ["worker_0", "worker_1"]
        for rank, started in enumerate(ranks):
            assert_in_run(trial, started, rank, started.evidence())
            assert not unexplained(found, rank, started.evidence())
            assert trial.ranks()[rank].status is RankStatus.ENDED
            steps = {one.step for one in started.evidence()}
            assert not any(rank in trial.missing(step, TRAIN) for step in steps)
    shutil.rmtree(tmp_path)


BOTH_KILLED = [
    ("directory", "rank"),
    ("directory", "uploader"),
    ("rclone", "rank"),
    ("moto", "uploader"),
]


@pytest.mark.parametrize(
    ("place", "first"),
    at(*rotating_share(BOTH_KILLED, 2, kind=itemgetter(1))),
    indirect=["place"],
)
def test_both_killed_and_recovered(
    launcher: Launcher, place: Place, tmp_path: Path, first: str
) -> None:
    chance = generator(first, place.name)
    root = tmp_path / "spools"
    print(f"run in {tmp_path}")  # noqa: T201
    ranks = [
        launcher.start(
            tmp_path / f"rank-{rank}",
            environ=place.environ,
            rank=rank,
            world=3,
            steps=10_000,
            width=256,
            hook={
                "out_dir": place.out_dir,
                "spool_dir": str(root),
                "linger_s": chance.choice((0.01, 30.0)),
                "buffer_bytes": 16 << 20,
            },
        )
        for rank in range(3)
    ]
    for started in ranks:
        spool = spool_of(root, started)
        started.wait_for(f"step {chance.randrange(8)}")
        # Stopped, it cannot start another uploader.
        started.kill(signal.SIGSTOP)
        until(lambda: is_stopped(started.pid) or started.code is not None, "it to stop")  # noqa: B023
        until(lambda: all_begun(started.pid, spool), "its uploader to be one")  # noqa: B023
        if first == "rank":
            started.kill()
        for pid in uploaders(spool):
            kill(pid)
        started.kill()
        assert started.wait() == -signal.SIGKILL
        assert not uploaders(spool)
    left = spools(root)
    assert left, "all of them were quicker than the kill: nothing was tried"
    # By name: without names it would also send what others have left on this machine.
    command = [
        sys.executable,
        "-c",
        "from smdist.cli import main; main()",
        "recover",
        *map(str, left),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("(lost: ") == len(left), done.stdout
    assert not list(root.rglob("*")), "something stayed in the spool"
    audit(place.objects())
    with create_trial(place.out_dir) as trial:
        assert trial.loaded_all_steps
        for rank, started in enumerate(ranks):
            assert_in_run(trial, started, rank, started.evidence())
            assert trial.ranks()[rank].status is RankStatus.LOST
    shutil.rmtree(tmp_path)
