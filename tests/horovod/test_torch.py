"""PyTorch under Horovod: two processes, what they saved, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

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
from tests.servers.s3 import Server, aws, rclone

__all__ = ["aws", "rclone"]  # fixtures

pytestmark = [*job_marks, pytest.mark.torch]

EXAMPLE = EXAMPLES / "horovod_torch.py"
NAMES = [f"{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
RATE = 0.125


def weights(trial: Trial, step: int, worker: int) -> dict[str, Any]:
    return {name: value(trial, f"Net_{name}", step, worker) for name in NAMES}


def computed(before: dict[str, Any], features: Any) -> dict[str, Any]:
    """The gradients of a rank by itself, and by nothing that the job used."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    parameters = dict(zip(NAMES, model.parameters(), strict=True))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(before[name].copy()))
    inputs = torch.from_numpy(features.copy())
    loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(dim=1))
    found = torch.autograd.grad(loss, list(parameters.values()))
    return {name: gradient.numpy() for name, gradient in zip(parameters, found, strict=True)}


def check(trial: Trial, steps: int, *, synced: bool) -> None:
    assert trial.workers() == ["worker_0", "worker_1"]
    assert trial.steps() == list(range(steps))
    assert trial.troubles() == {}
    for step in range(steps):
        assert trial.missing(step) == {}
        before = [weights(trial, step, worker) for worker in (0, 1)]
        features = [value(trial, "Net_input_0", step, worker) for worker in (0, 1)]
        local = [computed(before[worker], features[worker]) for worker in (0, 1)]
        for name in NAMES:
            np.testing.assert_array_equal(before[0][name], before[1][name])
            assert not np.allclose(local[0][name], local[1][name], rtol=1e-3)
            mean = (local[0][name] + local[1][name]) / 2
            for worker in (0, 1):
                saved = value(trial, f"gradient/Net_{name}", step, worker)
                expected = mean if synced else local[worker][name]
                np.testing.assert_allclose(saved, expected, rtol=1e-4, atol=1e-6)
            if step + 1 < steps:
                after = value(trial, f"Net_{name}", step + 1)
                np.testing.assert_allclose(after, before[0][name] - RATE * mean, atol=1e-5)


@pytest.mark.ray
@pytest.mark.s3
@pytest.mark.usefixtures("aws")
def test_on_s3_merged_by_a_coordinator(rclone: Server, driver: Driver, tmp_path: Path) -> None:
    url = bucket_url(rclone, "torch")
    coordinator = Coordinated(driver, url)
    with started(tmp_path) as job:
        horovodrun(job, EXAMPLE, "--out-dir", url, "--interval", "1", "--steps", "12")
        said = finish(job)
    assert all(f"worker_{rank} is done" in said for rank in (0, 1))
    status = coordinator.until_final()
    assert [line["status"] for line in status["ranks"]] == ["ended", "ended"]
    assert (status["complete_steps"], status["latest_complete"]["GLOBAL"]) == (12, 11)
    coordinator.check_merged()
    with create_trial(url) as trial:
        assert trial.loaded_all_steps
        check(trial, 12, synced=False)


def test_gradients_after_the_reduction(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with started(tmp_path) as job:
        words = ("--out-dir", place, "--interval", "1", "--steps", "6", "--stage", "synced")
        horovodrun(job, EXAMPLE, *words)
        finish(job)
    with create_trial(place) as trial:
        check(trial, 6, synced=True)


def test_a_rank_that_saves_beside_one_that_does_not(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with started(tmp_path) as job:
        horovodrun(job, EXAMPLE, "--out-dir", place, "--workers", "one")
        finish(job)
    with create_trial(place) as trial:
        assert trial.workers() == ["worker_0"]
        assert trial.steps() == list(range(0, 20, 2))
        assert trial.tensor("gradient/Net_fc2.weight").steps() == list(range(0, 20, 2))


@pytest.mark.ray
@pytest.mark.s3
@pytest.mark.usefixtures("aws")
def test_one_of_two_is_killed(rclone: Server, driver: Driver, tmp_path: Path) -> None:
    url = bucket_url(rclone, "torch-killed")
    coordinator = Coordinated(driver, url)
    with started(tmp_path) as job:
        horovodrun(job, EXAMPLE, "--out-dir", url, "--interval", "1", "--steps", "10000000")
        until(lambda: len(stored_steps(url)) > 3, "the first steps", 240)
        kill_rank(url, 1)
        (code,) = job.wait()
    assert code != 0
    until(lambda: ended(url), "both uploaders end the run", 120)
    with create_trial(url) as trial:
        assert trial.ranks()[1].status is RankStatus.LOST
        steps = trial.steps()
        assert steps == list(range(len(steps)))
        last = steps[-1]
        before = [weights(trial, last, worker) for worker in (0, 1)]
        for name in NAMES:
            np.testing.assert_array_equal(before[0][name], before[1][name])
    status = coordinator.until_final()
    assert status["ranks"][1]["status"] == "lost"
    assert status["complete_steps"] == len(steps)
    coordinator.check_merged()
