"""Less usual ways to train under Horovod: gradients are those of the stage that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from smdist import create_trial
from tests.horovod.rig import finish, horovodrun, job_marks, started
from tests.horovod.values import value
from tests.horovod.variants_job import CLIP, STEPS

pytestmark = job_marks

JOB = Path(__file__).with_name("variants_job.py")


def check(folder: Path, name: str, tensor: str) -> None:
    copies = [np.load(folder / f"{rank}.npz") for rank in (0, 1)]
    for stage in ("local", "synced"):
        with create_trial(folder / f"{name}-{stage}") as trial:
            assert trial.steps() == list(range(STEPS))
            assert trial.troubles() == {}
            for step in range(STEPS):
                local = [copy[f"{name}/{step}"] for copy in copies]
                assert not np.allclose(*local)
                mean = (local[0] + local[1]) / 2
                if name == "clipped":
                    mean = mean.clip(-CLIP, CLIP)
                for rank in (0, 1):
                    expected = local[rank] if stage == "local" else mean
                    found = value(trial, tensor, step, rank)
                    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_torch(tmp_path: Path) -> None:
    with started(tmp_path) as job:
        horovodrun(job, JOB, "torch", tmp_path)
        assert job.wait() == [0], job.output
    for name in ("passes", "clipped", "late"):
        check(tmp_path, name, "gradient/Linear_weight")
    with create_trial(tmp_path / "unregistered-synced") as trial:
        assert "gradient/Linear_weight" not in trial.tensor_names()
        (said,) = trial.troubles()["worker_0"]
        assert "hook.register_optimizer(optimizer)" in said


def test_tapes(tmp_path: Path) -> None:
    with started(tmp_path) as job:
        horovodrun(job, JOB, "keras", tmp_path)
        finish(job)
    for name in ("inner", "outer", "traced"):
        check(tmp_path, name, "gradients/weightGrad")
