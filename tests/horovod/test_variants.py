"""Less usual ways to train under Horovod: gradients are those of the stage that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smdist import create_trial, modes
from smdist.trials import Trial
from tests.horovod.rig import finish, horovodrun, job_marks, multi_worker, started
from tests.horovod.values import value
from tests.horovod.variants_job import CLIP, EPOCHS, MOMENTUM, RATE, STEPS

pytestmark = job_marks

RANKS = (0, 1)
GRADIENT = "gradients/top/kernelGrad"
FIT_STEPS = 2 * EPOCHS
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


def test_fit(tmp_path: Path) -> None:
    with started(tmp_path) as job:
        horovodrun(job, JOB, "fit", tmp_path)
        assert job.wait() == [0], job.output
    for name in ("mixed", "legacy", "eager", "passes"):
        check_fit(tmp_path, name)
    with create_trial(tmp_path / "own-local") as trial:
        (said,) = trial.troubles()["worker_0"]
        assert "as its optimizer gets them" in said
        for step in range(FIT_STEPS):
            np.testing.assert_array_equal(*(trained(trial, GRADIENT, step, r) for r in RANKS))


@pytest.mark.parametrize("launch", [horovodrun, multi_worker], ids=["horovod", "multi-worker"])
def test_one_rank_comes_to_ask_for_more(launch: Any, tmp_path: Path) -> None:
    """Its function is traced anew, that of the other is not, and they still meet in every step."""
    with started(tmp_path) as job:
        launch(job, JOB, "late", tmp_path)
        finish(job)
    kernels = [np.load(tmp_path / f"{rank}.npz")["kernel"] for rank in RANKS]
    np.testing.assert_array_equal(*kernels)
    for name in ("first", "second"):
        with create_trial(tmp_path / name) as trial:
            assert trial.workers() == ["worker_0"]
            steps = trial.steps(mode=modes.TRAIN)
            assert trial.tensor(GRADIENT).steps(mode=modes.TRAIN) == steps[len(steps) // 2 :]


def trained(trial: Trial, name: str, step: int, rank: int) -> Any:
    found = trial.tensor(name).value(step, mode=modes.TRAIN, worker=rank)
    return np.asarray(found, np.float32)


def check_fit(folder: Path, name: str) -> None:
    trials = {stage: create_trial(folder / f"{name}-{stage}") for stage in ("local", "synced")}
    tolerance = (2e-2, 2e-3) if name == "mixed" else (1e-3, 1e-5)
    local, sums = [], [0.0, 0.0]
    for step in range(FIT_STEPS):
        local.append([by_hand(trials["local"], step, rank) for rank in RANKS])
        sums = [total + one for total, one in zip(sums, local[step], strict=True)]
        assert not np.allclose(local[step][0], local[step][1], rtol=0.1)
        applies = name != "passes" or step % 2 == 1
        mean = (sums[0] + sums[1]) / 2
        for rank in RANKS:
            synced = mean if applies else sums[rank]
            for stage, expected in (("local", local[step][rank]), ("synced", synced)):
                found = trained(trials[stage], GRADIENT, step, rank)
                np.testing.assert_allclose(found, expected, *tolerance, err_msg=f"{name} {stage}")
        if applies:
            sums = [0.0, 0.0]
    for stage, trial in trials.items():
        assert trial.troubles() == {}
        check_kept(trial, name, stage, tolerance)
        check_modes(trial)
        trial.close()


def by_hand(trial: Trial, step: int, rank: int) -> Any:
    """The gradient of the kernel of `top`, from what went in and came out."""
    inputs, out, labels = (
        trained(trial, n, step, rank) for n in ("top/inputs", "predictions", "labels")
    )
    return inputs.T @ (2 * (out - labels) / len(out))


def check_kept(trial: Trial, name: str, stage: str, tolerance: tuple[float, float]) -> None:
    """What the optimizer keeps is there after its first update, and follows from gradients."""
    slot = f"optimizer/top/kernel/{'m' if name == 'legacy' else 'momentums'}"
    kept = trial.tensor(slot)
    assert set(kept.steps(mode=modes.TRAIN)) >= set(range(1, FIT_STEPS))
    assert not [n for n in trial.tensor_names() if "base" in n and n.startswith("optimizer/")]
    if name == "passes" or stage == "local":
        return
    for step in range(1, FIT_STEPS - 1):
        before, gradient = trained(trial, slot, step, 0), trained(trial, GRADIENT, step, 0)
        share = -RATE if name == "mixed" else 1 - MOMENTUM
        after = MOMENTUM * before + share * gradient
        np.testing.assert_allclose(trained(trial, slot, step + 1, 0), after, *tolerance)


def check_modes(trial: Trial) -> None:
    assert trial.workers() == ["worker_0", "worker_1"]
    assert trial.steps(mode=modes.TRAIN) == list(range(FIT_STEPS))
    assert trial.steps(mode=modes.EVAL) == list(range(EPOCHS + 2))
    assert trial.steps(mode=modes.PREDICT) == [0, 1]
    for mode, steps in ((modes.EVAL, EPOCHS + 2), (modes.PREDICT, 2)):
        for rank in RANKS:
            inputs, kernel, out = (
                np.asarray(trial.tensor(n).value(steps - 1, mode=mode, worker=rank), np.float32)
                for n in ("top/inputs", "top/weights/top/kernel:0", "top/outputs")
            )
            bias = out - inputs @ kernel
            np.testing.assert_allclose(bias, np.full_like(bias, bias.mean()), atol=0.02)
