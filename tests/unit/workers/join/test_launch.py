"""What identifies a launch, and facts about real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from smdist.errors import ConfigurationError
from smdist.workers.join.launcher_identity import (
    ParentProcess,
    is_running,
    launch_identity,
    machine,
    parent_process,
    process_started,
)

PARENT = ParentProcess(50, 1234, "b00t")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("parent:node:b00t:50:1234", 0)),
        ({"SMDIST_LAUNCH": "mine", "TORCHELASTIC_RUN_ID": "r"}, ("given:mine", 0)),
        (
            {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "2", "SLURM_JOB_ID": "7"},
            ("torchelastic:r", 2),
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"},
            ("agent:node:b00t:50:1234", 1),
        ),
        (
            {"TORCHELASTIC_RESTART_COUNT": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
            ("torchelastic:slurm-7.0", 1),
        ),
        (
            {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_JOB_ID": "7"},
            ("agent:node:b00t:50:1234", 0),
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_RESTART_COUNT": "2"},
            ("slurm:7.3", 2000),
        ),
        ({"SLURM_JOB_ID": "7"}, ("slurm:7.", 0)),
        ({"PMIX_NAMESPACE": "prterun-n-9@1"}, ("pmix:prterun-n-9@1", 0)),
        (
            {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "77"},
            ("horovod:10.0.0.1:77", 0),
        ),
        ({"TRAINING_JOB_NAME": "job-1"}, ("sagemaker:job-1", 0)),
        ({"SMDIST_RESTART": "4"}, ("parent:node:b00t:50:1234", 4)),
    ],
)
def test_identity(environ: dict[str, str], expected: tuple[str, int]) -> None:
    launch = launch_identity(environ, PARENT, "node")
    assert (launch.id, launch.restart) == expected


def test_an_adopted_process_has_no_telling_parent() -> None:
    assert launch_identity({}, ParentProcess(1, 1, "b00t"), "node").id == ""


def test_a_restart_count_that_is_none_is_named() -> None:
    with pytest.raises(ConfigurationError, match="SMDIST_RESTART='-1'"):
        launch_identity({"SMDIST_RESTART": "-1"}, PARENT, "node")


def test_siblings_share_their_parent() -> None:
    code = (
        "import os; from smdist.workers.join.launcher_identity import *;"
        "print(launch_identity({}, parent_process(), machine()).id)"
    )
    ids = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    }
    assert len(ids) == 1
    assert f":{os.getpid()}:" in ids.pop()


def test_a_process_runs_until_it_ends() -> None:
    before = time.time()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = time.time()
    try:
        assert before - 0.5 <= process_started(child.pid) <= seen + 0.5
        assert is_running(child.pid, seen)
        # The number belonged to another process an hour ago.
        assert not is_running(child.pid, seen - 3600)
    finally:
        child.communicate(b"\n")
    assert not is_running(child.pid, seen)


def test_facts_of_this_process() -> None:
    assert machine()
    assert parent_process().pid == os.getppid()
    assert 0 < process_started(os.getpid()) <= time.time()
