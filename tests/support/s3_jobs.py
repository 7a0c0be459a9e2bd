"""Starts the jobs of s3_job.py and reads what they saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smdist import create_trial
from smdist.trials import Trial

__all__ = ["Ran", "assert_equals_copies", "cli", "run_job", "start_job"]

REPOSITORY = Path(__file__).parents[2]
JOB = REPOSITORY / "tests" / "support" / "s3_job.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


@dataclass
class Ran:
    """A job, its standard output as lines of JSON."""

    process: subprocess.Popen[str]
    kept: Path
    said: list[dict[str, Any]] = field(default_factory=list)
    errors: str = ""

    def wait(self, timeout_s: float = 120.0) -> Ran:
        try:
            output, self.errors = self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
        self.said = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return self

    @property
    def code(self) -> int:
        return self.process.returncode

    def told(self, key: str) -> list[Any]:
        return [line[key] for line in self.said if key in line]


def environment(**given: str) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SMDIST_RANK", "SMDIST_WORLD_SIZE")
    kept = {key: value for key, value in os.environ.items() if key not in names}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **given}


def start_job(
    folder: Path, out: str, *, ranks: int = 1, under: Sequence[str] = (), **order: Any
) -> Ran:
    """`under`: a command that runs the command which follows."""
    kept = folder / "kept"
    kept.mkdir(exist_ok=True)
    order = {"out": out, "kept": str(kept), "steps": 4, **order}
    order["hook"] = {"spool_dir": str(folder / "spools"), **order.get("hook", {})}
    (folder / "spools").mkdir(exist_ok=True)
    launcher = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [*under, sys.executable, *launcher, str(JOB), json.dumps(order)]
    process = subprocess.Popen(
        command,
        env=environment(PYTHONWARNINGS="always::ResourceWarning"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Ran(process, kept)


def run_job(folder: Path, out: str, **order: Any) -> Ran:
    """To its orderly end, and without a word about things left open."""
    ran = start_job(folder, out, **order).wait()
    assert ran.code == 0, ran.errors
    for word in ("Unclosed", "never awaited", "ResourceWarning"):
        assert word not in ran.errors, ran.errors
    return ran


def cli(*arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from smdist.cli import main; main()", *arguments]
    return subprocess.run(
        command,
        env=environment(**given),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_equals_copies(out: str, ran: Ran, ranks: int, steps: int) -> None:
    with create_trial(out) as trial:
        assert trial.workers() == [f"worker_{rank}" for rank in range(ranks)]
        assert trial.steps() == list(range(steps))
        for rank in range(ranks):
            _assert_rank(trial, ran.kept / f"{rank}.npz", rank)


def _assert_rank(trial: Trial, copies: Path, rank: int) -> None:
    worker = f"worker_{rank}"
    with np.load(copies) as archive:
        names = {name.partition("/")[2] for name in archive.files}
        assert len(names) == 4
        for name in names:
            values = trial.tensor(f"Net_{name}").values(worker=worker)
            assert values
            for step, value in values.items():
                kept = archive[f"{step}/{name}"]
                assert value.dtype == kept.dtype
                assert value.tobytes() == kept.tobytes(), (worker, name, step)
    scalars = trial.tensor("scalar/twice").values(worker=worker)
    assert {step: float(value) for step, value in scalars.items()} == {s: 2.0 * s for s in scalars}
