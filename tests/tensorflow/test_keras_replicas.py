"""Several replicas in one process: which of them is which worker, and who saves."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import smdist.tensorflow as smd
from smdist import kernel
from smdist.coordination.view.membership import RankStatus
from smdist.trials import Trial
from tests.support.example_runs import run_example
from tests.tensorflow import mirrored_job
from tests.tensorflow.keras_jobs import (
    BATCH,
    GRADIENTS,
    WEIGHTS,
    Step,
    close,
    data,
    hooked,
    initial,
    make_model,
    read,
)
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


@pytest.fixture
def own_signal() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def two_lanes(folder: Path) -> smd.KerasHook:
    """What a hook is in a process with two replicas; the model need not have them for that."""
    hook = hooked(folder, include_collections=["weights", "gradients"], include_workers="all")
    devices = SimpleNamespace(worker_devices=["CPU:0", "CPU:1"])
    hook._assign_ranks(SimpleNamespace(num_replicas_in_sync=2, extended=devices))
    return hook


def interrupt_a_save(
    monkeypatch: pytest.MonkeyPatch, lane: int, handler: Callable[..., object]
) -> None:
    """A signal comes in the middle of a save of that lane: they take turns."""
    copy, left = kernel.copy, lane
    signal.signal(signal.SIGUSR1, handler)

    def interrupted(*args: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            monkeypatch.setattr(kernel, "copy", copy)
            signal.raise_signal(signal.SIGUSR1)
        return copy(*args)

    monkeypatch.setattr(kernel, "copy", interrupted)


@pytest.mark.usefixtures("own_signal")
@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("then", ["a step", "close"])
def test_closed_by_a_signal_handler_within_a_save_of_any_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: int, then: str
) -> None:
    """All of them go on with the step that was interrupted, and end with it."""
    x, y = data(BATCH)
    model, given = make_model(), {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    with two_lanes(tmp_path / "run") as hook:
        model.fit(x, y, callbacks=[hook], **given)
        interrupt_a_save(monkeypatch, lane, lambda *_: hook.close())
        model.fit(x, y, callbacks=[hook], **given)
        assert hook.usage() is not None
        if then == "close":
            hook.close()
            assert hook.usage() is None
        model.fit(x, y, callbacks=[hook], **given)
        assert hook.usage() is None
    with read(tmp_path / "run") as trial:
        assert trial.workers() == ["worker_0", "worker_1"]
        assert trial.steps(mode=TRAIN) == [0, 1]
        assert trial.missing(1, mode=TRAIN) == {}
        assert {rank.status for rank in trial.ranks().values()} == {RankStatus.ENDED}
        assert trial.troubles() == {}
        first = Step(initial(), x, y)
        for number, step in enumerate((first, Step(first.updated, x, y))):
            for name, key in GRADIENTS.items():
                assert trial.tensor(name).workers(number, mode=TRAIN) == trial.workers()
                for worker in (0, 1):
                    found = trial.tensor(name).value(number, mode=TRAIN, worker=worker)
                    close(found, step.gradients[key])


@pytest.mark.usefixtures("own_signal")
@pytest.mark.parametrize("lane", [0, 1])
def test_a_signal_handler_cannot_wait_for_a_save_of_any_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: int
) -> None:
    x, y = data(BATCH)
    flushed: list[bool] = []
    with two_lanes(tmp_path / "run") as hook:
        interrupt_a_save(monkeypatch, lane, lambda *_: flushed.append(hook.flush(timeout=2.0)))
        make_model().fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
        assert flushed == [False]
        assert hook.flush(timeout=60.0)
    assert read(tmp_path / "run").steps(mode=TRAIN) == [0]
