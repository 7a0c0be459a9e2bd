"""Keras under Horovod: two processes, what they saved, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    horovodrun,
    job_marks,
    kill_rank,
    started,
    stored_steps,
    until,
    value,
)
from tests.servers.ray_cluster import Driver
from tests.servers.s3 import Server, aws, moto

__all__ = ["aws", "moto"]  # fixtures

pytestmark = job_marks

EXAMPLE = EXAMPLES / "horovod_keras.py"
KERNEL, BIAS = "top/weights/top/kernel:0", "top/weights/top/bias:0"
RATE, BATCH, PER_EPOCH = 0.01, 8, 4

Array = np.ndarray[Any, np.dtype[Any]]


def batch(rank: int, step: int) -> Array:
    x = np.random.default_rng(rank).normal(size=(32, 16)).astype(np.float32)
    start = step % PER_EPOCH * BATCH
    return x[start : start + BATCH]


def computed(trial: Trial, rank: int, step: int) -> dict[str, Array]:
    """The gradients of a rank by hand, from its weights and its data."""
    x = batch(rank, step)
    out = x @ value(trial, KERNEL, step, rank) + value(trial, BIAS, step, rank)
    error = 2 * (out - x.sum(axis=1, keepdims=True)) / BATCH
    return {"kernel": x.T @ error, "bias": error.sum(axis=0)}


def check(trial: Trial, steps: list[int], *, synced: bool) -> None:
    assert trial.workers() == ["worker_0", "worker_1"]
    assert trial.steps() == steps
    assert trial.troubles() == {}
    for step in steps:
        assert trial.missing(step) == {}
        np.testing.assert_array_equal(*(value(trial, KERNEL, step, rank) for rank in (0, 1)))
        local = [computed(trial, rank, step) for rank in (0, 1)]
        for kind in ("kernel", "bias"):
            mean = (local[0][kind] + local[1][kind]) / 2
            assert not np.allclose(local[0][kind], local[1][kind], rtol=1e-2)
            for rank in (0, 1):
                saved = value(trial, f"gradients/top/{kind}Grad", step, rank)
                expected = mean if synced else local[rank][kind]
                np.testing.assert_allclose(saved, expected, rtol=1e-3, atol=1e-4)
            if step + 1 in steps:
                name = KERNEL if kind == "kernel" else BIAS
                expected = value(trial, name, step) - RATE * mean
                np.testing.assert_allclose(value(trial, name, step + 1), expected, atol=1e-4)


@pytest.mark.ray
@pytest.mark.s3
@pytest.mark.usefixtures("aws")
def test_on_s3_merged_by_a_coordinator(moto: Server, driver: Driver, tmp_path: Path) -> None:
    url = bucket_url(moto, "keras")
    coordinator = Coordinated(driver, url)
    with started(tmp_path) as job:
        horovodrun(job, EXAMPLE, "--out-dir", url, "--interval", "1")
        said = finish(job)
    assert all(f"worker_{rank} is done" in said for rank in (0, 1))
    status = coordinator.until_final()
    assert [line["status"] for line in status["ranks"]] == ["ended", "ended"]
    assert (status["complete_steps"], status["latest_complete"]["TRAIN"]) == (8, 7)
    coordinator.check_merged()
    with create_trial(url) as trial:
        assert trial.loaded_all_steps
        check(trial, list(range(8)), synced=False)
        np.testing.assert_array_equal(value(trial, "inputs", 5, 1), batch(1, 5))


@pytest.mark.parametrize(
    "options",
    [["--stage", "synced"], ["--tape"], ["--tape", "--stage", "synced"]],
    ids=["synced", "tape", "tape-synced"],
)
def test_gradients(tmp_path: Path, options: list[str]) -> None:
    place = tmp_path / "run"
    with started(tmp_path) as job:
        horovodrun(job, EXAMPLE, "--out-dir", place, "--interval", "1", *options)
        finish(job)
    with create_trial(place) as trial:
        check(trial, list(range(8)), synced="synced" in options)


@pytest.mark.parametrize("options", [[], ["--tape"]], ids=["fit", "tape"])
def test_a_rank_that_saves_beside_one_that_does_not(tmp_path: Path, options: list[str]) -> None:
    """Horovod matches what ranks send by the names of operations: they must not differ."""
    place = tmp_path / "run"
    with started(tmp_path) as job:
        horovodrun(job, EXAMPLE, "--out-dir", place, "--workers", "one", *options)
        finish(job)
    with create_trial(place) as trial:
        assert trial.workers() == ["worker_0"]
        assert trial.steps() == [0, 2, 4, 6]
        assert trial.tensor("gradients/top/kernelGrad").steps() == [0, 2, 4, 6]


@pytest.mark.ray
@pytest.mark.s3
@pytest.mark.usefixtures("aws")
def test_one_of_two_is_killed(moto: Server, driver: Driver, tmp_path: Path) -> None:
    url = bucket_url(moto, "keras-killed")
    coordinator = Coordinated(driver, url)
    with started(tmp_path) as job:
        horovodrun(job, EXAMPLE, "--out-dir", url, "--interval", "1", "--epochs", "1000000")
        until(lambda: len(stored_steps(url)) > 3, "the first steps", 240)
        kill_rank(url, 1)
        (code,) = job.wait()
    assert code != 0
    until(lambda: ended(url), "both uploaders end the run", 120)
    with create_trial(url) as trial:
        assert trial.ranks()[1].status is RankStatus.LOST
        steps = list(trial.steps())
        assert steps == list(range(len(steps)))
        for step in (steps[0], steps[-1]):
            np.testing.assert_array_equal(*(value(trial, KERNEL, step, rank) for rank in (0, 1)))
    status = coordinator.until_final()
    assert status["ranks"][1]["status"] == "lost"
    assert status["complete_steps"] == len(steps)
    coordinator.check_merged()
