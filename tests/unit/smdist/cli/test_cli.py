from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import smdist
from smdist import kernel
from smdist.cli.app import app
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.storage import LocalStore
from smdist.storage import loop_thread as sync
from tests.support.run_builder import RunBuilder
from tests.unit.coordination.service.test_merge_once import finish, work


def test_version() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert result.exit_code == 0
    first, second = result.output.splitlines()
    assert first == f"smdist {smdist.__version__}"
    assert second.startswith("kernel: compiled" if kernel.compiled else "kernel: numpy")


def test_path_without_a_run_gives_a_plain_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(app, ["trial", str(tmp_path)])
    assert result.exit_code == 1
    assert "no run at" in result.output + capfd.readouterr().err


def merge(path: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-c", "from smdist.cli import main; main()", "merge", str(path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_merge_prints_its_result(tmp_path: Path) -> None:
    assert merge(tmp_path)[0] == 1
    run = RunBuilder(LocalStore(tmp_path))
    writers = [work(run.rank(rank, 3), range(4)) for rank in range(3)]
    for writer in writers[:2]:
        finish(writer, lost=writer is writers[1])
    code, text = merge(tmp_path)
    assert (code, "4 of 4 steps complete, 3 ranks" in text) == (0, True), text
    assert "wrote snapshot 1 (as of now" in text
    assert "nothing was written" in merge(tmp_path)[1]
    finish(work(writers[2], range(4, 5)))
    assert "4 of 5 steps complete" in (text := merge(tmp_path)[1])
    assert "(final: " in text


def test_merge_skips_missing_manifests_and_names_them(tmp_path: Path) -> None:
    run = RunBuilder(LocalStore(tmp_path))
    for rank in range(2):
        work(run.rank(rank, 2), range(9))
        for seq in (0, 1, 2, 6):
            (tmp_path / f"manifests/worker_{rank}/000000-{seq:08d}.json").unlink()
    code, text = merge(tmp_path)
    assert (code, "5 of 5 steps complete, 2 ranks" in text) == (0, True), text
    for rank in range(2):
        gone = f"trouble: manifests/worker_{rank}/000000-0000000"
        assert f"{gone}0.json and 2 after it were skipped" in text
        assert f"{gone}6.json was skipped" in text


def test_merge_refuses_beside_an_active_coordinator(tmp_path: Path) -> None:
    finish(work(RunBuilder(LocalStore(tmp_path)).rank(0, 2), range(2)))
    watcher = RunWatcher(str(tmp_path))
    sync.run(watcher.open())
    code, text = merge(tmp_path)
    assert code == 1
    assert "is being merged by" in text
    assert "Traceback" not in text
    code, text = merge(tmp_path, "--take-over")
    assert (code, "wrote snapshot 1" in text) == (0, True), text
    sync.run(watcher.close())


def test_help_loads_neither_trials_nor_workers() -> None:
    """Nothing is imported before it is needed: the command answers at once."""
    code = (
        "import sys, smdist.cli\n"
        "sys.exit(any(m in sys.modules for m in ('numpy', 'smdist.trials', 'asyncio')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
