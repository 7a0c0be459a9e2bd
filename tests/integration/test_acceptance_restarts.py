"""A job that starts again, by its launcher or by hand, continues in the same run, or is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smdist.coordination.view.membership import RankStatus
from smdist.identity import modes
from smdist.processes import is_alive
from smdist.trials import create_trial
from tests.faults.audit import assert_in_run, audit
from tests.faults.job import Order
from tests.faults.launcher import REPOSITORY, Launcher, Started, drained, ended, launching
from tests.support.waiting import until

pytestmark = pytest.mark.ranks

TRAIN = modes.TRAIN


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with launching() as launcher:
        yield launcher


# The first start fails before it makes a process group: what gloo does with the remains of one is
# not ours to test.
ELASTIC = """
import os, sys
from pathlib import Path
from tests.faults.job import Order, train, wait_for

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
steps = 5 if restart else 3
own = folder / f"{rank}-{restart}"
own.mkdir()
hook = {"out_dir": str(folder / "out"), "rank": None, "world_size": None, "linger_s": 0.01}
order = Order("", str(own), {"rank": rank, "seed": 10 * restart, "steps": steps, "hook": hook})
if restart == 0:
    def before_step(step):
        if step == 2:
            (own / "came").touch()
            wait_for(folder / f"{1 - rank}-0" / "came")  # both have something to lose
            if rank == 1:
                raise RuntimeError("as planned")
            wait_for(folder / "never")
    train(order, before_step=before_step)
else:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    train(order, wrap=DistributedDataParallel)
    dist.destroy_process_group()
"""


def test_an_elastic_restart_is_another_attempt(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(ELASTIC)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += ["--nproc-per-node=2", "--monitor-interval=0.1", str(script), str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environ["SMDIST_SPOOL_DIR"] = str(tmp_path / "spools")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=140, check=False, env=environ
    )
    assert done.returncode == 0, f"{tmp_path}\n{done.stderr}"
    drained(tmp_path / "spools")
    out_dir = tmp_path / "out"
    audit(out_dir)
    with create_trial(out_dir, lost_after_s=0.0) as trial:
        assert [(a.number, a.world_size, a.steps) for a in trial.attempts()] == [
            (0, 2, 2),
            (1, 2, 5),
        ]
        first = trial.attempts()[0].ranks
        assert first[0].status is RankStatus.LOST  # its launcher ended it
        assert (first[1].status, first[1].reason) == (RankStatus.ENDED, "RuntimeError: as planned")
        assert trial.steps(TRAIN) == [0, 1, 2, 3, 4]
        assert trial.workers() == ["worker_0", "worker_1"]
        assert trial.loaded_all_steps
    for attempt in (0, 1):
        with create_trial(out_dir, attempt=attempt) as trial:
            for rank in (0, 1):
                started = Started(launcher, 0, Order("", str(tmp_path / f"{rank}-{attempt}")))
                assert len({one.step for one in started.evidence()}) == (5 if attempt else 2)
                assert_in_run(trial, started, rank, started.evidence())


def test_a_second_start_is_refused_and_a_resumed_one_goes_on(
    launcher: Launcher, tmp_path: Path
) -> None:
    out_dir, root = tmp_path / "out", tmp_path / "spools"
    hook = {"out_dir": str(out_dir), "spool_dir": str(root)}

    def start(folder: str, **more: object) -> list[Started]:
        return [
            launcher.start(
                tmp_path / f"{folder}-{rank}",
                rank=rank,
                world=2,
                steps=3,
                seed=len(folder),
                hook={**hook, **more},
            )
            for rank in range(2)
        ]

    first = start("first")
    assert [started.wait() for started in first] == [0, 0], first
    ended(root)
    before = {path: path.read_bytes() for path in sorted(out_dir.rglob("*")) if path.is_file()}
    for started in start("second"):
        assert started.wait() == 1
        assert "RunExists" in started.stderr
        assert "resume=True" in started.stderr
        assert not started.evidence()
    after = {path: path.read_bytes() for path in sorted(out_dir.rglob("*")) if path.is_file()}
    assert after == before, "a refused start has left a trace"
    third = start("resumed", resume=True)
    assert [started.wait() for started in third] == [0, 0], third
    drained(root)
    audit(out_dir)
    with create_trial(out_dir) as trial:
        assert [(a.number, a.steps) for a in trial.attempts()] == [(0, 3), (1, 3)]
        for rank, started in enumerate(third):
            assert_in_run(trial, started, rank, started.evidence())
    with create_trial(out_dir, attempt=0) as trial:
        for rank, started in enumerate(first):
            assert_in_run(trial, started, rank, started.evidence())


def test_a_second_start_beside_a_living_one_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    """Even by the same launcher: it has not started that rank again, the rank still runs."""
    out_dir, root, go = tmp_path / "out", tmp_path / "spools", tmp_path / "go"
    script = """
from pathlib import Path
train(order, before_step=lambda step: step == 2 and wait_for(Path(order.arguments["go"])))
"""
    hook = {"out_dir": str(out_dir), "spool_dir": str(root)}
    living = launcher.start(tmp_path / "living", script, steps=4, go=str(go), hook=hook)
    living.wait_for("step 1")
    until(lambda: list(out_dir.glob("sessions/*/*.json")), "its uploader to enter the run")
    second = launcher.start(tmp_path / "second", steps=4, hook=hook)
    assert second.wait() == 1
    assert "RunExists" in second.stderr
    assert is_alive(living.pid)
    go.touch()
    assert living.wait() == 0, repr(living)
    drained(root)
    audit(out_dir)
    with create_trial(out_dir) as trial:
        assert trial.steps(TRAIN) == [0, 1, 2, 3]
        assert_in_run(trial, living, 0, living.evidence())
