"""A worker of a MultiWorkerMirrored job is killed: what it captured is there, and so is its end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from smdist import create_trial, modes
from smdist.errors import SmdistError
from tests.integration.keras_jobs import KERAS_3
from tests.integration.rig import until
from tests.integration.test_keras_examples import EXAMPLES, free_ports, start, value

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.ranks,
    pytest.mark.skipif(KERAS_3, reason="fit of Keras 3 fails under this strategy, hook or not"),
]

TRAIN = modes.TRAIN


def steps_of(folder: Path) -> list[int]:
    """Those that all workers have stored."""
    try:
        with create_trial(folder) as trial:
            return list(trial.steps(TRAIN)) if len(trial.workers()) == 2 else []
    except SmdistError:
        return []


def test_one_of_two_workers_is_killed(tmp_path: Path) -> None:
    workers = [f"localhost:{port}" for port in free_ports(2)]
    command = (EXAMPLES / "keras_multiworker.py", "--out-dir", "run", "--interval", "1")
    jobs = [
        start(
            tmp_path,
            *command,
            "--epochs",
            "100000",
            TF_CONFIG=json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            ),
        )
        for index in (0, 1)
    ]
    try:
        until(lambda: len(steps_of(tmp_path / "run")) > 3, "the first steps", timeout_s=200)
        jobs[1].send_signal(signal.SIGKILL)
        jobs[1].wait()
        # The other waits for it in a collective operation, or fails there; it is no matter of ours.
        jobs[0].send_signal(signal.SIGKILL)
    finally:
        for job in jobs:
            job.kill()
            job.communicate()

    def over() -> bool:
        with create_trial(tmp_path / "run") as trial:
            return trial.loaded_all_steps

    until(over, "both uploaders to end the run", timeout_s=60)
    with create_trial(tmp_path / "run") as trial:
        complete = trial.steps(TRAIN)
        assert complete == list(range(len(complete)))
        for step in (complete[0], complete[-1]):
            assert trial.missing(step, mode=TRAIN) == {}
            weights = [value(trial, "top/weights/top/kernel:0", step, w) for w in (0, 1)]
            np.testing.assert_array_equal(weights[0], weights[1])
            local = [value(trial, "gradients/top/kernelGrad", step, w) for w in (0, 1)]
            assert not np.array_equal(local[0], local[1])
