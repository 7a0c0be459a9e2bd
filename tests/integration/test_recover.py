"""`smdist recover`: what both dead processes left is sent, once, and only when it may be."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from smdist.errors import SpoolBusy, SpoolUnavailable, TrainerAlive
from smdist.format.journal_records import End
from smdist.processes import is_alive, is_stopped
from smdist.workers.spool.private_files import private_root
from smdist.workers.upload.recover import find_spools, pending_bytes, recover
from smdist.workers.upload.retry import RetryDeadlineExceeded
from tests.support.uploader_rig import (
    REPOSITORY,
    Job,
    Rank,
    assert_exactly_once,
    leave_behind,
    make_spool,
    rank_process,
    read_store,
)
from tests.support.waiting import until


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(root=str(tmp_path / "spools"), out_dir=str(tmp_path / "out"))


def quiet(message: str) -> None:
    raise AssertionError(f"nothing to say, but: {message}")


# In the other usual places are spools of whatever else runs on this machine.
COMMAND = """
from smdist.cli import main, recover
all_roots = recover.default_roots
recover.default_roots = lambda: all_roots()[:1]
main()
"""


def run_command(*words: str, root: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "recover", *words],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "SMDIST_SPOOL_DIR": root,
            "COLUMNS": "300",
        },
    )


@pytest.mark.parametrize("seed", range(3))
def test_both_killed_then_recovered(job: Job, tmp_path: Path, seed: int) -> None:
    job = msgspec.structs.replace(job, steps=1_000_000, elements=5_000)
    with rank_process(job, tmp_path) as rank:
        until(lambda: rank.uploader_pid(), "the uploader")
        for _ in range(random.Random(seed).randrange(10, 150)):
            rank.next("raw")
        uploader = rank.uploader_pid()
        # The rank first, stopped in its tracks: its supervisor must not start another uploader.
        rank.popen.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(rank.popen.pid), "the rank to stand still")
        os.kill(uploader, signal.SIGKILL)
        rank.popen.kill()
        rank.rest()
        rank.popen.wait()
        until(lambda: not is_alive(uploader), "the uploader to die")
        done = recover(rank.spool, quiet)
    assert done.state == "lost"
    assert not rank.spool.exists()
    stored = read_store(tmp_path / "out", job.elements)
    assert_exactly_once(stored, rank)
    assert stored.last.state == "lost"


def test_what_was_sent_is_said(job: Job, tmp_path: Path) -> None:
    spool = leave_behind(job)
    assert pending_bytes(spool) == 3 * (4 * job.elements + 16)
    done = recover(spool.path, quiet)
    assert (done.worker, done.out_dir, done.state, done.steps) == (
        "worker_0",
        job.out_dir,
        "lost",
        3,
    )
    assert done.nbytes > 3 * 4 * job.elements
    assert not spool.path.exists()


def test_an_orderly_end_that_was_not_sent_is_still_one(job: Job, tmp_path: Path) -> None:
    assert recover(leave_behind(job, ended=True).path, quiet).state == "ended"
    assert read_store(tmp_path / "out", job.elements).last.state == "ended"


def test_nothing_at_all_becomes_lost(job: Job, tmp_path: Path) -> None:
    assert recover(leave_behind(job, steps=0).path, quiet).state == "lost"
    assert read_store(tmp_path / "out", job.elements).last.state == "lost"


def test_a_living_trainer_is_left_alone(job: Job) -> None:
    spool = make_spool(job)
    with pytest.raises(TrainerAlive, match=str(os.getpid())):
        recover(spool.path, quiet)
    assert spool.path.exists()


def test_a_living_process_whose_hook_is_closed_is_not_in_the_way(job: Job, tmp_path: Path) -> None:
    """The uploader gave up, and the process goes on: a notebook, an evaluation."""
    spool = make_spool(job)
    rank = Rank(spool, job)
    rank.step(0)
    with pytest.raises(TrainerAlive, match="once the hook is closed"):
        recover(spool.path, quiet)
    rank.append(End("", 0.0))
    rank.close()
    with spool.lock(), pytest.raises(SpoolBusy):
        recover(spool.path, quiet)
    done = recover(spool.path, quiet)
    assert (done.state, done.steps) == ("ended", 1)
    assert not spool.path.exists()
    assert read_store(tmp_path / "out", job.elements).last.state == "ended"


def test_a_later_process_of_the_same_number_is_not_the_trainer(job: Job) -> None:
    spool = make_spool(job)
    info = msgspec.structs.replace(spool.info, trainer_start=spool.info.trainer_start - 1)
    (spool.path / "spool.json").write_bytes(msgspec.json.encode(info))
    assert recover(spool.path, quiet).state == "lost"


def test_a_trainer_elsewhere_is_left_alone_unless_forced(job: Job) -> None:
    spool = leave_behind(job)
    session = msgspec.structs.replace(spool.info.session, host="elsewhere")
    info = msgspec.structs.replace(spool.info, session=session)
    (spool.path / "spool.json").write_bytes(msgspec.json.encode(info))
    with pytest.raises(TrainerAlive, match="--force"):
        recover(spool.path, quiet)
    assert recover(spool.path, quiet, force=True).steps == 3


def test_a_living_uploader_is_left_alone(job: Job) -> None:
    spool = leave_behind(job)
    with spool.lock(), pytest.raises(SpoolBusy):
        recover(spool.path, quiet)
    assert spool.path.exists()


def test_a_store_that_refuses_keeps_the_spool(job: Job, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    spool = leave_behind(job)
    said: list[str] = []
    with pytest.raises(RetryDeadlineExceeded):
        recover(spool.path, said.append, give_up_s=0.1)
    assert len(said) == 1
    assert pending_bytes(spool) == 3 * (4 * job.elements + 16)
    (tmp_path / "out").unlink()
    assert recover(spool.path, quiet).steps == 3


def test_no_spool(tmp_path: Path) -> None:
    with pytest.raises(SpoolUnavailable, match="not a spool"):
        recover(tmp_path, quiet)


def test_found_where_hooks_put_them(job: Job, tmp_path: Path) -> None:
    spool = leave_behind(job)
    assert find_spools([tmp_path / "spools", tmp_path / "nowhere"]) == [spool.path]


# -- the command -----------------------------------------------------------------------------------


def test_command_sends_what_it_finds(job: Job, tmp_path: Path) -> None:
    spool = leave_behind(job)
    done = run_command(str(spool.path), root=job.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"worker_0 -> {job.out_dir}: 3 steps, " in done.stdout
    assert "(lost: process" in done.stdout
    assert not spool.path.exists()


def test_command_without_spools_looks_for_them(job: Job, tmp_path: Path) -> None:
    dead, living = leave_behind(job), make_spool(job)
    done = run_command(root=job.root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"skipped: {living.path}" in done.stdout
    assert not dead.path.exists()
    assert living.path.exists()


def test_command_takes_a_spool_dir(job: Job, tmp_path: Path) -> None:
    """Of a hook that was given one: nobody would look there."""
    spool, elsewhere = leave_behind(job), str(tmp_path / "elsewhere")
    done = run_command(job.root, root=elsewhere)
    assert done.returncode == 0, done.stdout
    assert "3 steps" in done.stdout
    assert not spool.path.exists()
    done = run_command(str(tmp_path), root=elsewhere)
    assert (done.returncode, "not a spool" in done.stdout) == (1, True)


def test_command_fails_when_something_stays(job: Job, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    spool = leave_behind(job)
    done = run_command("--give-up-s", "0.1", str(spool.path), root=job.root)
    assert done.returncode == 1
    assert f"failed: {spool.path}" in done.stdout
    assert spool.path.exists()


def test_what_a_killed_uploader_did_not_remove_is_removed(tmp_path: Path) -> None:
    """Its spool has lost its journal, so everything is stored; other folders are not touched."""
    remnants = [private_root(tmp_path) / f"run-worker_0-{number}-abc" for number in range(2)]
    other = tmp_path / "mine"
    private_root(tmp_path).mkdir(mode=0o700)
    for folder in (*remnants, other):
        folder.mkdir(mode=0o700)
        (folder / "lock").touch(0o600)
    named = run_command(str(remnants[0]), root=str(tmp_path))
    assert (named.returncode, "nothing to recover" in named.stdout) == (0, True), named
    assert not remnants[0].exists()
    found = run_command(root=str(tmp_path))
    assert (found.returncode, "nothing to recover" in found.stdout) == (0, True), found
    assert not private_root(tmp_path).exists()
    refused = run_command(str(other), root=str(tmp_path))
    assert (refused.returncode, "not a spool" in refused.stdout) == (1, True)
    assert list(other.iterdir())


def killed_while_it_began(root: Path) -> None:
    """A process that is killed when all of its spool is there but what makes it one."""
    script = f"""
import os, signal
from pathlib import Path
from smdist.workers.spool.journal import JournalWriter
from smdist.workers.spool.spool import Spool
from tests.support.uploader_rig import Job, make_spool
Spool.create = classmethod(lambda cls, *given: cls.creating(*given))
with make_spool(Job(root={str(root)!r}, out_dir="/nowhere")) as spool:
    JournalWriter(spool)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, check=False, cwd=REPOSITORY).returncode == -signal.SIGKILL
    assert list(private_root(root).glob("*/journal-000000"))


def test_what_was_never_a_spool_is_removed(tmp_path: Path) -> None:
    for name in ("here", "elsewhere"):
        killed_while_it_began(tmp_path / name)
    done = run_command(root=str(tmp_path / "here"))
    assert (done.returncode, "nothing to recover" in done.stdout) == (0, True), done
    assert not private_root(tmp_path / "here").exists()
    make_spool(Job(root=str(tmp_path / "elsewhere"), out_dir="/nowhere")).remove()
    assert not private_root(tmp_path / "elsewhere").exists()


def test_a_deadline_without_end_that_was_written_down_is_no_obstacle(
    job: Job, tmp_path: Path
) -> None:
    endless = msgspec.structs.replace(job.upload, drain_deadline_s=float("inf"))
    spool = leave_behind(msgspec.structs.replace(job, upload=endless))
    assert b'"drain_deadline_s":null' in (spool.path / "spool.json").read_bytes()
    assert recover(spool.path, quiet).steps == 3
