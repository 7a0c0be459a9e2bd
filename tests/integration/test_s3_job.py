"""Jobs whose out_dir is a bucket: captured, read back, recovered, as into a directory."""

from __future__ import annotations

import subprocess
import sys
import uuid
from glob import glob
from pathlib import Path

import numpy as np
import pytest

from smdist import create_trial
from smdist.identity import ModeKeys
from smdist.storage import loop_thread as sync
from smdist.storage import open_store
from smdist.trials import RankStatus
from tests.servers.s3 import Server, aws, moto, rclone
from tests.support.leaks import no_leaks
from tests.support.run_builder import RunBuilder
from tests.support.s3_jobs import assert_equals_copies, cli, environment, run_job, start_job
from tests.support.waiting import until

__all__ = ["aws", "moto", "no_leaks", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws", "no_leaks")]


@pytest.fixture(params=["rclone", "moto"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def bucket(server: Server) -> str:
    return server.make_bucket(f"job-{uuid.uuid4().hex[:12]}")


@pytest.mark.ranks
def test_two_ranks_are_read_back_bit_for_bit(server: Server, bucket: str, tmp_path: Path) -> None:
    url = server.url(bucket, "team/run 1")
    ran = run_job(tmp_path, url, ranks=2)
    assert_equals_copies(url, ran, ranks=2, steps=4)
    told = cli("trial", url)
    assert told.returncode == 0, told.stderr
    assert "trial run 1 at" in told.stdout
    assert "4 complete, 0 partial" in told.stdout
    assert "2 ended" in told.stdout
    assert told.stderr == ""
    until(lambda: not glob(f"{tmp_path}/spools/*/*"), "spools to go")
    assert server.uploads(bucket) == []


def test_the_usual_environment_reaches_the_uploader(
    rclone: Server, aws: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = rclone.make_bucket(f"env-{uuid.uuid4().hex[:12]}")
    aws.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    aws.setenv("AWS_REGION", "eu-west-1")
    url = f"s3://{bucket}/run"
    ran = run_job(tmp_path, url)
    assert_equals_copies(url, ran, ranks=1, steps=4)


def test_a_script_that_closes_nothing_ends_in_silence(rclone: Server, tmp_path: Path) -> None:
    bucket = rclone.make_bucket(f"lax-{uuid.uuid4().hex[:12]}")
    url = rclone.url(bucket)
    store = open_store(url)
    RunBuilder(store).rank(0).step(ModeKeys.TRAIN, 0, {"x": np.zeros(3)}).end()
    sync.run(store.close())
    script = (
        f"from smdist import create_trial; trial = create_trial({url!r}); print(trial.steps());"
        f"create_trial({url!r}).tensor('x').value(0); print(trial.name)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[0]\nrun\n"
    assert done.stderr == ""


def test_what_a_killed_pair_left_is_recovered(server: Server, bucket: str, tmp_path: Path) -> None:
    url = server.url(bucket)
    ran = start_job(tmp_path, url, dies=True, hook={"linger_s": 600}).wait()
    assert ran.code == -9, ran.errors
    (spool,) = ran.told("spool")
    store = open_store(url)
    assert sync.run(store.list("manifests/")) == []
    sync.run(store.close())
    told = cli("recover", spool)
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"worker_0 -> {url}: 4 steps" in told.stdout
    assert told.stderr == ""
    assert not Path(spool).exists()
    assert_equals_copies(url, ran, ranks=1, steps=4)
    with create_trial(url) as trial:
        assert trial.ranks()[0].status is RankStatus.LOST
    again = cli("recover", spool)
    assert again.returncode == 1
