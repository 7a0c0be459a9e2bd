"""Steps, modes and workers as people give them: alike in every question to a trial or a tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smdist import errors
from smdist.identity import ModeKeys
from smdist.storage import LocalStore
from smdist.trials import Trial, create_trial
from tests.support.run_builder import RunBuilder, Saved

TRAIN = ModeKeys.TRAIN
STEP = {"step", "step_num", "mode_step", "global_step"}
STEPS = {"steps", "required_steps"}
PLAIN: dict[str, Any] = {
    **dict.fromkeys(STEP, 1),
    **{name: [1] for name in STEPS},
    "mode": TRAIN,
    "worker": 1,
    "workers": [1],
    "reduction_name": "max",
    "tname": "loss",
    "coll_name": "losses",
    "timeout_s": 5.0,
}
SAME: list[tuple[set[str], list[Any]]] = [
    (STEP, [np.int64(1), np.uint8(1), 1.0, np.float64(1)]),
    (STEPS, [np.array([1]), (1.0,), range(1, 2), 1, np.int64(1)]),
    ({"mode"}, ["TRAIN", "train"]),
    ({"worker"}, ["worker_1", np.int64(1)]),
    ({"workers"}, ["worker_1", 1, ("worker_1",), np.array([1])]),
]
NO_STEP, NO_WORKER = "is no step; give its number", "is no worker; give its name"
WRONG: list[tuple[set[str], list[Any], str]] = [
    (STEP, ["1", 1.5, [1], b"1"], NO_STEP),
    (STEPS, ["1", ["1"], [None], 1.5], NO_STEP),
    ({"mode"}, ["TRAINING", None, 1], r"is no mode; give one of smdist's modes\.TRAIN"),
    ({"worker"}, [1.0, b"worker_1", [1]], NO_WORKER),
    ({"workers"}, [1.0, [None]], NO_WORKER),
]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    run = RunBuilder(LocalStore(tmp_path))
    for rank in range(2):
        writer = run.rank(rank, 2)
        for step in range(3):
            value = np.full((), rank + step, np.float32)
            writer.step(TRAIN, step, {"loss": Saved(value, collections=("losses",))})
        writer.end()
    return create_trial(tmp_path)


def questions(trial: Trial) -> list[tuple[str, Callable[..., Any], set[str]]]:
    """Every public method, with the names of what it takes."""
    return [
        (f"{type(one).__name__}.{name}", method, set(inspect.signature(method).parameters))
        for one in (trial, trial.tensor("loss"))
        for name, method in inspect.getmembers(one, inspect.ismethod)
        if not name.startswith("_") and name not in ("prepare", "ask", "close")
    ]


def answer(method: Callable[..., Any], **given: Any) -> str:
    """With plain values for what is not given."""
    values = {**PLAIN, **given}
    parameters = inspect.signature(method).parameters
    return repr(method(**{name: values[name] for name in parameters if name in values}))


def test_whatever_is_plainly_a_step_a_mode_or_a_worker_is_taken(trial: Trial) -> None:
    asked = 0
    for label, method, parameters in questions(trial):
        for names, same in SAME:
            for name, value in [(name, value) for name in names & parameters for value in same]:
                asked += 1
                assert answer(method, **{name: value}) == answer(method), (label, name, value)
    assert asked > 100


def test_what_is_no_step_no_mode_and_no_worker_is_said_to_be_none(trial: Trial) -> None:
    asked = 0
    for label, method, parameters in questions(trial):
        for names, wrong, message in WRONG:
            for name, value in [(name, value) for name in names & parameters for value in wrong]:
                asked += 1
                with pytest.raises(TypeError, match=f"{name}=.*{message}"):
                    pytest.fail(f"{label}: {answer(method, **{name: value})}")
    assert asked > 100


def test_arguments_may_stand_in_their_places(trial: Trial) -> None:
    tensor: Any = trial.tensor("loss")
    assert tensor.value(np.int64(1), "train", np.int64(1)) == 2.0
    assert tensor.value(1, TRAIN, None) == 1.0
    with pytest.raises(TypeError, match="step_num='1' is no step"):
        tensor.value("1", TRAIN)


def test_a_worker_that_there_is_not_is_not_of_a_wrong_type(trial: Trial) -> None:
    tensor: Any = trial.tensor("loss")
    for worker in ("x", 7, np.int64(7), -1):
        with pytest.raises(errors.InvalidWorker):
            tensor.value(1, TRAIN, worker)
