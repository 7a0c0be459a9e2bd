"""The supervisor in a training process, with real uploaders under it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from smdist.format.journal_records import End
from smdist.processes import is_alive
from smdist.workers.upload.process import Supervisor
from tests.support.uploader_rig import REPOSITORY, Job, Rank, make_spool, read_store
from tests.support.waiting import until


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(root=str(tmp_path / "spools"), out_dir=str(tmp_path / "out"), elements=100)


@pytest.fixture
def rank(job: Job) -> Rank:
    return Rank(make_spool(job), job)


def finish(rank: Rank) -> None:
    rank.append(End("", 0.0))
    rank.doorbell.ring()


def run_script(
    folder: Path, body: str, job: Job, **environ: str
) -> subprocess.CompletedProcess[str]:
    """A training script of its own, in which any warning is an error."""
    head = f"""
    import os, sys, time
    from pathlib import Path
    import msgspec
    from smdist.format.journal_records import End
    from smdist.workers.upload.process import Supervisor
    from tests.support.uploader_rig import (Job, Rank, make_spool)
    from tests.support.waiting import until
    job = msgspec.json.decode({msgspec.json.encode(job)!r}, type=Job)
    spool = make_spool(job)
    rank = Rank(spool, job)
    supervisor = Supervisor(spool, trouble=print)
    """
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
    )


def test_one_uploader_in_a_session_of_its_own(job: Job, rank: Rank, tmp_path: Path) -> None:
    supervisor = Supervisor(rank.spool)
    assert (supervisor.running, supervisor.pid, supervisor.join(0)) == (False, 0, True)
    supervisor.start()
    pid = supervisor.pid
    supervisor.start()  # once more: nothing
    assert (supervisor.running, supervisor.pid) == (True, pid)
    until(lambda: os.getsid(pid) == pid, "its session")
    rank.step(0)
    finish(rank)
    assert supervisor.join(60)
    assert (supervisor.running, supervisor.pid, supervisor.restarts) == (False, 0, 0)
    assert read_store(tmp_path / "out", job.elements).last.state == "ended"
    rank.close()


@pytest.mark.slow
def test_a_killed_uploader_is_replaced(job: Job, rank: Rank, tmp_path: Path) -> None:
    supervisor = Supervisor(rank.spool)
    supervisor.start()
    killed: list[int] = []
    for step in range(3):
        until(lambda: rank.ack_page.uploader_pid not in (0, *killed), "an uploader at work")
        killed.append(rank.ack_page.uploader_pid)
        os.kill(killed[-1], signal.SIGKILL)
        rank.step(step)
    until(lambda: supervisor.restarts == 3 and supervisor.pid not in (0, *killed), "a new one")
    finish(rank)
    assert supervisor.join(60)
    assert sorted(read_store(tmp_path / "out", job.elements).closed) == [0, 1, 2]
    rank.close()


def test_one_that_cannot_live_is_given_up_with_a_word(rank: Rank) -> None:
    said: list[str] = []
    supervisor = Supervisor(
        rank.spool, python="/bin/false", trouble=said.append, most_rapid_deaths=3
    )
    supervisor.start()
    assert supervisor.join(60)
    assert len(said) == 1
    assert "ended 3 times at once (last: exit code 1)" in said[0]
    assert str(rank.spool.path) in said[0]
    assert rank.spool.path.exists()
    rank.close()


def test_an_interpreter_that_is_not_there_does_no_harm(rank: Rank) -> None:
    said: list[str] = []
    supervisor = Supervisor(rank.spool, "/no/such/python", said.append, most_rapid_deaths=2)
    supervisor.start()
    assert supervisor.join(60)
    assert "cannot start the uploader with '/no/such/python'" in said[0]
    rank.close()


def test_a_store_that_stays_closed_is_told(job: Job, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    upload = msgspec.structs.replace(job.upload, drain_deadline_s=0.2)
    rank = Rank(make_spool(msgspec.structs.replace(job, upload=upload)), job)
    said: list[str] = []
    supervisor = Supervisor(rank.spool, trouble=said.append)
    supervisor.start()
    finish(rank)
    assert supervisor.join(60)
    assert said == [f"the uploader gave up; run `smdist recover {rank.spool.path}`"]
    rank.close()


def test_an_exit_code_that_somebody_else_took_is_no_riddle(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(_pid: int, _options: int) -> tuple[int, int]:
        until(lambda: not rank.spool.path.exists(), "the uploader to finish")
        raise ChildProcessError

    monkeypatch.setattr(os, "waitpid", taken)
    supervisor = Supervisor(rank.spool)
    supervisor.start()
    pid = supervisor.pid
    finish(rank)
    assert supervisor.join(60)
    assert supervisor.restarts == 0
    monkeypatch.undo()
    os.waitpid(pid, 0)
    rank.close()


# -- in scripts ------------------------------------------------------------------------------------


def test_the_interpreter_exits_at_once_and_quietly(job: Job, tmp_path: Path) -> None:
    """The uploader is still at work then, and finishes alone."""
    began = time.monotonic()
    done = run_script(
        tmp_path / "job",
        """
        supervisor.start()
        rank.step(0)
        print(supervisor.pid, spool.path)
        rank.close()
        """,
        job,
    )
    said = [line for line in done.stderr.splitlines() if "in the background" not in line]
    assert (done.returncode, said) == (0, [])
    assert time.monotonic() - began < 30
    _, path = done.stdout.split()
    until(lambda: not Path(path).exists(), "the uploader to finish")
    assert read_store(tmp_path / "out", job.elements).last.state == "lost"


def test_modules_of_the_job_do_not_get_in_the_way(job: Job, tmp_path: Path) -> None:
    """Neither those beside the script nor those in the working directory."""
    done = run_script(
        tmp_path / "job",
        """
        names = ["json", "asyncio", "selectors", "numpy", "msgspec", "google_crc32c", "ml_dtypes"]
        for name in [*names, "sitecustomize", "usercustomize"]:
            Path(f"{name}.py").write_text("raise SystemExit(9)")
        for name in ("smdist", "workers"):
            Path(name).mkdir()
            Path(name, "__init__.py").write_text("raise SystemExit(9)")
        supervisor.start()
        rank.append(End("", 0.0))
        assert supervisor.join(60)
        assert supervisor.restarts == 0
        rank.close()
        """,
        job,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert read_store(tmp_path / "out", job.elements).last.state == "ended"


def test_a_forked_child_has_no_uploader(job: Job, tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "job",
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside a thread: as jobs do
        supervisor.start()
        pid = supervisor.pid
        child = os.fork()
        if child == 0:
            supervisor.start()
            asked = (supervisor.running, supervisor.pid, supervisor.join(60))
            os._exit(0 if asked == (False, 0, True) else 9)
        assert os.waitpid(child, 0)[1] == 0
        assert supervisor.running and supervisor.pid == pid
        rank.append(End("", 0.0))
        assert supervisor.join(60)
        rank.close()
        """,
        job,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_descriptors_of_the_job_are_not_inherited(job: Job, tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "job",
        """
        read, write = os.pipe()
        os.set_inheritable(write, True)
        supervisor.start()
        until(lambda: rank.ack_page.uploader_pid, "the uploader")
        os.close(write)
        assert os.read(read, 1) == b"", "the end of the pipe is held by nobody"
        rank.append(End("", 0.0))
        assert supervisor.join(60)
        rank.close()
        """,
        job,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_uploader_loads_only_what_it_needs(job: Job, rank: Rank) -> None:
    supervisor = Supervisor(rank.spool)
    supervisor.start()
    until(lambda: rank.ack_page.uploader_pid, "the uploader")
    maps = Path(f"/proc/{supervisor.pid}/maps").read_text()
    assert not [
        name for name in ("torch", "tensorflow", "pandas", "aiohttp") if f"/{name}/" in maps
    ]
    finish(rank)
    assert supervisor.join(60)
    assert not is_alive(rank.ack_page.uploader_pid)
    rank.close()


def test_the_uploader_stands_in_a_directory_that_exists(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    supervisor = Supervisor(rank.spool)
    supervisor.start()
    first = supervisor.pid
    until(lambda: os.getsid(first) == first, "its session")
    assert os.readlink(f"/proc/{first}/cwd") == str(work)
    work.rmdir()
    os.kill(first, signal.SIGKILL)
    until(lambda: supervisor.pid not in (0, first), "the next one")
    second = supervisor.pid
    until(lambda: os.getsid(second) == second, "its session")
    assert os.readlink(f"/proc/{second}/cwd") == "/"
    finish(rank)
    assert supervisor.join(60)
    rank.close()
