"""MultiWorkerMirrored jobs of the same environment, on S3 and merged by a coordinator in this one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smdist import create_trial
from smdist.trials import RankStatus, Trial
from tests.horovod.rig import (
    EXAMPLES,
    Coordinated,
    bucket_url,
    ended,
    finish,
    job_marks,
    kill_rank,
    multi_worker,
    started,
    stored_steps,
    until,
    value,
)
from tests.servers.ray_cluster import Driver
from tests.servers.s3 import Server, aws, rclone

__all__ = ["aws", "rclone"]  # fixtures

pytestmark = [*job_marks, pytest.mark.ray, pytest.mark.s3, pytest.mark.usefixtures("aws")]

EXAMPLE = EXAMPLES / "keras_multiworker.py"
KERNEL, GRADIENT = "top/weights/top/kernel:0", "gradients/top/kernelGrad"


def check(trial: Trial, steps: list[int]) -> None:
    """Each update follows from the gradients that the workers computed, each for half the batch."""
    assert trial.workers() == ["worker_0", "worker_1"]
    for step in steps:
        assert trial.missing(step) == {}
        before = [value(trial, KERNEL, step, worker) for worker in (0, 1)]
        np.testing.assert_array_equal(*before)
        local = [value(trial, GRADIENT, step, worker) for worker in (0, 1)]
        assert not np.array_equal(local[0], local[1]), "not those before the reduction"
        if step == 0:  # the bias is zero
            for worker in (0, 1):
                x = value(trial, "inputs", step, worker)
                error = x @ before[worker] - x.sum(axis=1, keepdims=True)
                by_hand = x.T @ (2 * error / len(x)) / 2
                np.testing.assert_allclose(local[worker], by_hand, rtol=1e-3, atol=1e-4)
        if step + 1 in steps:
            after = value(trial, KERNEL, step + 1)
            np.testing.assert_allclose(after, before[0] - 0.01 * sum(local), rtol=1e-4)


def test_on_s3_merged_by_a_coordinator(rclone: Server, driver: Driver, tmp_path: Path) -> None:
    url = bucket_url(rclone, "multi")
    coordinator = Coordinated(driver, url)
    with started(tmp_path) as job:
        multi_worker(job, EXAMPLE, "--out-dir", url, "--interval", "1")
        finish(job)
    status = coordinator.until_final()
    assert [line["status"] for line in status["ranks"]] == ["ended", "ended"]
    assert (status["complete_steps"], status["latest_complete"]["TRAIN"]) == (8, 7)
    coordinator.check_merged()
    with create_trial(url) as trial:
        assert trial.steps() == list(range(8))
        assert trial.troubles() == {}
        check(trial, list(range(8)))


def test_one_of_two_is_killed(rclone: Server, driver: Driver, tmp_path: Path) -> None:
    url = bucket_url(rclone, "multi-killed")
    coordinator = Coordinated(driver, url)
    with started(tmp_path) as job:
        multi_worker(job, EXAMPLE, "--out-dir", url, "--interval", "1", "--epochs", "100000")
        until(lambda: len(stored_steps(url)) > 3, "the first steps", 240)
        kill_rank(url, 1)
        # The other one waits for it in a collective operation, or fails there.
        kill_rank(url, 0)
        job.wait()
    until(lambda: ended(url), "both uploaders end the run", 120)
    with create_trial(url) as trial:
        assert all(rank.status is RankStatus.LOST for rank in trial.ranks().values())
        steps = list(trial.steps())
        assert steps == list(range(len(steps)))
        check(trial, steps[:2] + steps[-2:])
    status = coordinator.until_final()
    assert [line["status"] for line in status["ranks"]] == ["lost", "lost"]
    assert status["complete_steps"] == len(steps)
    coordinator.check_merged()
