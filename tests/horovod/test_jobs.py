"""The examples of jobs with two processes: what they saved, merged by a coordinator, or with one killed.

PyTorch and Keras under Horovod, and Keras with MultiWorkerMirroredStrategy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from smdist import create_trial
from smdist.trials import RankStatus
from tests.horovod import values
from tests.horovod.rig import (
    EXAMPLES,
    Coordinated,
    Job,
    bucket_url,
    finish,
    horovodrun,
    job_marks,
    kill_rank,
    multi_worker,
    started,
    stored_steps,
    until,
)
from tests.servers.ray_cluster import Driver
from tests.servers.s3 import Server, aws, moto, rclone

__all__ = ["aws", "moto", "rclone"]  # fixtures

pytestmark = job_marks

SYNCED = ("--stage", "synced")


@dataclass(frozen=True)
class Kind:
    script: str
    launch: Callable[..., None]
    check: Callable[..., None]
    steps: int
    mode: str
    gradient: str
    for_ever: tuple[str, ...]
    server: str
    options: tuple[str, ...] = ()

    def start(self, job: Job, place: str | Path, *options: str) -> None:
        words = ("--out-dir", place, *self.options, *options)
        self.launch(job, EXAMPLES / self.script, *words)


TORCH = Kind(
    "horovod_torch.py",
    horovodrun,
    values.of_torch,
    20,
    "GLOBAL",
    "gradient/Net_fc2.weight",
    ("--steps", "10000000"),
    "rclone",
)
KERAS = Kind(
    "horovod_keras.py",
    horovodrun,
    values.of_keras,
    8,
    "TRAIN",
    "gradients/top/kernelGrad",
    ("--epochs", "1000000"),
    "moto",
)
TAPE = replace(KERAS, options=("--tape",))
MULTI_WORKER = replace(
    KERAS,
    script="keras_multiworker.py",
    launch=multi_worker,
    check=values.of_multi_worker,
    server="rclone",
)
EVERY_STEP = ("--interval", "1")

jobs = pytest.mark.parametrize(
    "kind", [TORCH, KERAS, MULTI_WORKER], ids=["torch", "keras", "multi-worker"]
)


@pytest.fixture
def bucket(kind: Kind, moto: Server, rclone: Server, aws: Any) -> str:
    return bucket_url({"moto": moto, "rclone": rclone}[kind.server], "job")


@pytest.mark.ray
@pytest.mark.s3
@jobs
def test_on_s3_merged_by_a_coordinator(
    kind: Kind, bucket: str, driver: Driver, tmp_path: Path
) -> None:
    coordinator = Coordinated(driver, bucket)
    with started(tmp_path) as job:
        kind.start(job, bucket, *EVERY_STEP)
        said = finish(job)
    assert all(f"worker_{rank} is done" in said for rank in (0, 1))
    status = coordinator.until_final()
    assert [line["status"] for line in status["ranks"]] == ["ended", "ended"]
    assert status["complete_steps"] == kind.steps
    assert status["latest_complete"][kind.mode] == kind.steps - 1
    coordinator.check_merged()
    with create_trial(bucket) as trial:
        assert trial.loaded_all_steps
        assert trial.workers() == ["worker_0", "worker_1"]
        assert trial.steps() == list(range(kind.steps))
        assert trial.troubles() == {}
        assert all(trial.missing(step) == {} for step in trial.steps())
        kind.check(trial, trial.steps())


@pytest.mark.parametrize(
    ("kind", "options"),
    [(TORCH, SYNCED), (KERAS, SYNCED), (TAPE, ()), (TAPE, SYNCED)],
    ids=["torch synced", "keras synced", "tape", "tape synced"],
)
def test_gradients(kind: Kind, options: tuple[str, ...], tmp_path: Path) -> None:
    """Local ones of the others are those of the test above."""
    with started(tmp_path) as job:
        kind.start(job, tmp_path / "run", *EVERY_STEP, *options)
        finish(job)
    with create_trial(tmp_path / "run") as trial:
        assert trial.steps() == list(range(kind.steps))
        assert trial.troubles() == {}
        kind.check(trial, trial.steps(), synced="synced" in options)


@pytest.mark.parametrize(
    "kind", [TORCH, KERAS, TAPE, MULTI_WORKER], ids=["torch", "keras", "tape", "multi-worker"]
)
def test_a_rank_that_saves_beside_one_that_does_not(kind: Kind, tmp_path: Path) -> None:
    """They meet in every step, and find by names of operations what belongs together."""
    place = tmp_path / "run"
    with started(tmp_path) as job:
        kind.start(job, place, "--workers", "one")
        finish(job)
    with create_trial(place) as trial:
        assert trial.loaded_all_steps
        assert trial.workers() == ["worker_0"]
        assert trial.steps() == list(range(0, kind.steps, 2))
        assert trial.tensor(kind.gradient).steps() == list(range(0, kind.steps, 2))
    assert {path.name for path in map(Path, glob(f"{place}/*/*")) if path.is_dir()} == {"worker_0"}


@pytest.mark.ray
@pytest.mark.s3
@jobs
def test_one_of_two_is_killed(kind: Kind, bucket: str, driver: Driver, tmp_path: Path) -> None:
    """The other fails in the collective operation where they would have met."""
    # That long it waits for another attempt, once all ranks have said their last word.
    coordinator = Coordinated(driver, bucket, lost_after_s=15.0)
    with started(tmp_path) as job:
        kind.start(job, bucket, *EVERY_STEP, *kind.for_ever)
        until(lambda: len(stored_steps(bucket)) > 3, "the first steps", 240)
        kill_rank(bucket, 1)
        assert 0 not in job.wait()
    with create_trial(bucket) as trial:
        until(lambda: trial.loaded_all_steps, "both uploaders end the run", 120)
        assert trial.ranks()[1].status is RankStatus.LOST
        steps = list(trial.steps())
        assert steps == list(range(len(steps)))
        assert trial.missing(steps[-1]) == {}
        kind.check(trial, steps[:2] + steps[-2:])
    status = coordinator.until_final()
    assert status["ranks"][1]["status"] == "lost"
    assert status["complete_steps"] == len(steps)
    coordinator.check_merged()
