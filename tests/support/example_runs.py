"""Runs an example as people do, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["EXAMPLES", "run_example"]

_REPOSITORY = Path(__file__).parents[2]
EXAMPLES = _REPOSITORY / "examples"


def run_example(folder: Path, *command: str | Path) -> str:
    """The output of an example, run in `folder`; it must end well and say nothing of ours on stderr."""
    own = {"PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {**os.environ, **own}
    environment.pop("USE_SMDIST", None)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smdist" not in done.stderr, done.stderr
    return done.stdout
