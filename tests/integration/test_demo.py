"""`make demo`: it finds what was planted, and leaves no process behind, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from smdist import create_trial

REPOSITORY = Path(__file__).parents[2]
MARKER = "SMDIST_TEST_TOKEN"
RUN = "demo-out/s3/demo/run"  # the S3 server's files


class Demo:
    """The demo as a process, and every process that descends from it, known by its environment."""

    def __init__(self, folder: Path, *arguments: str, **more: str) -> None:
        self.token = uuid.uuid4().hex
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), MARKER: self.token, **more}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "examples.demo", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> str:
        output, _ = self.popen.communicate(timeout=200)
        return output

    def processes(self) -> list[int]:
        """Descendants that run; one that has ended and was not waited for has no environment."""
        wanted, found = f"{MARKER}={self.token}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


@contextmanager
def demo(folder: Path, *arguments: str, **more: str) -> Iterator[Demo]:
    started = Demo(folder, *arguments, **more)
    try:
        yield started
    finally:
        for pid in started.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.popen.communicate()


@pytest.mark.ranks
def test_it_finds_the_rank_the_tensor_and_the_step(tmp_path: Path) -> None:
    # An account that has used Ray, which leaves a token there. The other demos run in one's own.
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text(uuid.uuid4().hex)
    arguments = ("--ranks", "3", "--steps", "20", "--seed", "5", "--svg", "demo.svg")
    with demo(tmp_path, *arguments, HOME=str(tmp_path / "home")) as one:
        said = one.finish()
        assert one.popen.returncode == 0, said
        assert one.processes() == []
    assert "the analysis was right" in said
    assert "the coordinator says: step 19 is complete" in said
    assert "\x1b" not in said, "colours and cursor movements in a file"
    told = dict(re.findall(r"^ *(rank|tensor) (\S+)$", said, re.MULTILINE))
    (step,) = re.findall(r"^ *step (\d+), the first$", said, re.MULTILINE)
    assert told["tensor"].startswith("gradient/Net_")
    assert f"drawn {told['rank']} from step {step} on" in said
    with create_trial(tmp_path / RUN) as trial:
        assert trial.workers() == ["worker_0", "worker_1", "worker_2"]
        assert trial.steps() == list(range(20))
        assert trial.troubles() == {}
    assert list((tmp_path / RUN).glob("merged/heads/*")), "the coordinator wrote no snapshot"
    svg = (tmp_path / "demo.svg").read_text()
    assert told["tensor"] in svg
    assert "font-face" not in svg


@pytest.mark.ranks
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_takes_everything_with_it(how: signal.Signals, tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--steps", "2000")
    with demo(tmp_path, *arguments) as one:
        deadline = time.monotonic() + 120
        # Far enough for the coordinator to have merged something, too.
        while not (tmp_path / RUN / "merged" / "current.json").exists() or not list(
            tmp_path.glob(f"{RUN}/manifests/*/*")
        ):
            assert time.monotonic() < deadline
            assert one.popen.poll() is None
            time.sleep(0.1)
        before = set(Path("/tmp").glob("smdemo-*"))
        one.popen.send_signal(how)
        said = one.finish()
        assert one.popen.returncode == 130, said
        assert one.processes() == [], "something runs on"
        assert before - set(Path("/tmp").glob("smdemo-*")), "the folder of its Ray stays"
    with create_trial(tmp_path / RUN) as trial:
        assert trial.steps(show_incomplete_steps=True)
        assert trial.loaded_all_steps, "every rank's end is told"
    if how is signal.SIGTERM:
        return
    # What it left is a demo's, so the next one may remove it.
    with demo(tmp_path, "--ranks", "2", "--steps", "10") as again:
        said = again.finish()
        assert again.popen.returncode == 0, said


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo-out").mkdir()
    (tmp_path / "demo-out" / "thesis.tex").write_text("all of it")
    with demo(tmp_path) as one:
        said = one.finish()
        assert one.popen.returncode == 1
    assert "no demo made it" in said
    assert (tmp_path / "demo-out" / "thesis.tex").read_text() == "all of it"
