"""Several replicas in one process: which of them is which worker, and who saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import smdist.tensorflow as smd
from smdist.trials import Trial
from tests.example_runs import run_example
from tests.tensorflow import mirrored_job
from tests.tensorflow.keras_jobs import GRADIENTS, WEIGHTS, Step, close, data, initial, read
from tests.tensorflow.mirrored_job import FITS, SAMPLES, SHARE

TRAIN, EVAL = smd.modes.TRAIN, smd.modes.EVAL


def run(folder: Path, wanted: Any, replicas: int = 2, start: int = 0) -> Trial:
    given = {
        "--out-dir": "run",
        "--include-workers": json.dumps(wanted),
        "--replicas": str(replicas),
        "--start-step": str(start),
    }
    words = [word for pair in given.items() for word in pair]
    run_example(folder, mirrored_job.__file__, *words)
    return read(folder / "run")


def by_hand(replicas: int) -> list[list[Step]]:
    """What each replica does in each step of training."""
    x, y = data(SAMPLES)
    size, weights, found = SHARE * replicas, initial(), []
    for start in list(range(0, SAMPLES, size)) * FITS:
        shares = [slice(start + SHARE * r, start + SHARE * (r + 1)) for r in range(replicas)]
        found.append([Step(weights, x[share], y[share]) for share in shares])
        weights = Step(weights, x[start : start + size], y[start : start + size]).updated
    return found


def check(trial: Trial, wanted: list[int], replicas: int, start: int = 0) -> None:
    assert trial.workers() == [f"worker_{rank}" for rank in wanted]
    assert trial.troubles() == {}
    steps = by_hand(replicas)
    assert trial.steps(mode=TRAIN) == list(range(start, len(steps)))
    assert trial.steps(mode=EVAL) == list(range(start, FITS))
    for number in range(start, len(steps)):
        assert trial.missing(number, mode=TRAIN) == {}
        for worker in wanted:
            step = steps[number][worker]

            def value(name: str, number: int = number, worker: int = worker) -> Any:
                return trial.tensor(name).value(number, mode=TRAIN, worker=worker)

            close(value("inputs"), step.x)
            for name, key in WEIGHTS.items():
                if "bias" not in name:
                    close(value(name), step.weights[key])
            for name, key in GRADIENTS.items():  # of the mean over all
                close(value(name), step.gradients[key] / replicas)
    for number in range(start, FITS):  # the same batch each time
        for worker in wanted:
            inputs = trial.tensor("inputs").value(number, mode=EVAL, worker=worker)
            close(inputs, steps[0][worker].x)


@pytest.mark.parametrize("start", [0, 3], ids=["at once", "in the second fit"])
def test_one(tmp_path: Path, start: int) -> None:
    """However many phases begin before something is due, the ranks are what they were."""
    with run(tmp_path, "one", start=start) as trial:
        check(trial, [0], 2, start)


@pytest.mark.parametrize(("wanted", "replicas"), [([1], 2), ([0, 2], 3)], ids=str)
def test_some(tmp_path: Path, wanted: list[int], replicas: int) -> None:
    with run(tmp_path, wanted, replicas) as trial:
        check(trial, wanted, replicas)
        # A value of the script's own is the first one's.
        last = len(by_hand(replicas)) - 1
        assert trial.tensor("scalar/done").workers(last, mode=TRAIN) == [f"worker_{wanted[0]}"]
