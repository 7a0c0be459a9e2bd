from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import smdist
from smdist.cli.app import app


def test_version() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert (result.exit_code, result.output) == (0, f"smdist {smdist.__version__}\n")


def test_a_path_without_a_run_is_said_plainly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(app, ["trial", str(tmp_path)])
    assert result.exit_code == 1
    assert "no run at" in result.output + capfd.readouterr().err


def test_help_loads_neither_trials_nor_workers() -> None:
    """Nothing is imported before it is needed: the command answers at once."""
    code = (
        "import sys, smdist.cli\n"
        "sys.exit(any(m in sys.modules for m in ('numpy', 'smdist.trials', 'asyncio')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
