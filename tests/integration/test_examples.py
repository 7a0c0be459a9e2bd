"""The examples as people run them: real processes, then what their runs hold."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smdist import create_trial, modes
from smdist.errors import TensorUnavailableForStep
from smdist.trials import Trial
from tests.support.example_runs import EXAMPLES, run_example

REPOSITORY = Path(__file__).parents[2]
RANKS = 2


def torchrun(folder: Path, *command: str | Path) -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    return run_example(folder, *launcher, *command)


Array = np.ndarray[Any, np.dtype[Any]]


def value(trial: Trial, name: str, step: int, worker: int = 0) -> Array:
    return trial.tensor(name).value(step, worker=worker)


@pytest.mark.ranks
def test_ddp_with_all_ranks(tmp_path: Path) -> None:
    """Each update follows from the gradients that the ranks computed, as the trial has them."""
    torchrun(tmp_path, EXAMPLES / "ddp.py", "--out-dir", "run", "--steps", "4", "--interval", "1")
    with create_trial(tmp_path / "run") as trial:
        assert trial.loaded_all_steps
        assert trial.workers() == ["worker_0", "worker_1"]
        assert trial.steps() == [0, 1, 2, 3]
        assert trial.missing(3) == {}
        assert trial.troubles() == {}
        assert trial.tensor_names(collection="losses") == ["CrossEntropyLoss_output_0"]
        for name in trial.tensor_names(collection="weights"):
            gradient = trial.tensor(f"gradient/{name}")
            for step in (0, 1, 2):
                weights, after = trial.tensor(name).stack(step), trial.tensor(name).stack(step + 1)
                np.testing.assert_array_equal(weights[0], weights[1])
                local = gradient.stack(step)
                assert not np.array_equal(local[0], local[1]), "not those before the reduction"
                expected = weights[0] - 0.125 * local.mean(axis=0)
                np.testing.assert_allclose(after[0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.ranks
def test_ddp_with_one_rank(tmp_path: Path) -> None:
    torchrun(tmp_path, EXAMPLES / "ddp.py", "--out-dir", "run", "--steps", "5", "--workers", "one")
    with create_trial(tmp_path / "run") as trial:
        assert trial.workers() == ["worker_0"]
        assert trial.steps() == [0, 2, 4]
    written = {path.name for path in (tmp_path / "run").glob("*/*") if path.is_dir()}
    assert written == {"worker_0"}, "a rank that does not save has written something"


def test_single_process(tmp_path: Path) -> None:
    run_example(tmp_path, EXAMPLES / "single_process.py", "--out-dir", "run", "--epochs", "2")
    with create_trial(tmp_path / "run") as trial:
        # Each epoch has 4 training steps and 1 of evaluation; of the former every second is due, and
        # the last has the learning rate.
        assert trial.steps(modes.TRAIN) == [0, 2, 3, 4, 6, 7]
        assert trial.steps(modes.EVAL) == [0, 1]
        assert trial.global_step(modes.EVAL, 1) == 9
        gradient = trial.tensor("gradient/Net_fc.weight")
        assert gradient.steps(modes.TRAIN) == [0, 2, 4, 6]
        assert gradient.steps(modes.EVAL) == []
        with pytest.raises(TensorUnavailableForStep) as caught:
            gradient.value(0, modes.TRAIN)
        assert caught.value.has_reductions
        assert gradient.reduction_value(0, "l2", modes.TRAIN) > 0
        assert gradient.reduction_value(0, "nans", modes.TRAIN) == 0
        assert gradient.reduction_value(0, "q0.99", modes.TRAIN) > gradient.reduction_value(
            0, "mean", modes.TRAIN
        )
        assert trial.tensor_names(collection="relus") == ["relu_output_0"]
        relu = trial.tensor("relu_output_0").value(1, modes.EVAL)
        assert relu.shape == (16, 4, 6, 6)
        assert relu.min() == 0
        assert trial.tensor("scalar/learning_rate").value(3, modes.TRAIN) == 0.001
        assert trial.tensor("scalar/epoch").value(1, modes.EVAL) == 1
        assert trial.tensor("predictions").value(0, modes.EVAL).shape == (16,)


def test_gradient_accumulation(tmp_path: Path) -> None:
    """A step is an update. Momentum and update follow from the gradients that were captured."""
    run_example(
        tmp_path, EXAMPLES / "gradient_accumulation.py", "--out-dir", "run", "--updates", "4"
    )
    with create_trial(tmp_path / "run") as trial:
        assert trial.steps() == [0, 1, 2, 3]
        assert len(trial.tensor_names(step=1, collection="losses")) == 4
        momentum = np.zeros((1, 8), np.float32)
        for step in (0, 1, 2):
            if step > 0:  # the optimizer has none before its first update
                stored = value(trial, "optimizer/Linear_weight/momentum_buffer", step)
                np.testing.assert_allclose(stored, momentum, rtol=1e-5)
            momentum = 0.5 * momentum + value(trial, "gradient/Linear_weight", step)
            expected = value(trial, "Linear_weight", step) - 0.125 * momentum
            after = value(trial, "Linear_weight", step + 1)
            np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-7)


def test_from_json(tmp_path: Path) -> None:
    config = json.loads((EXAMPLES / "config.json").read_text())
    run_example(tmp_path, EXAMPLES / "from_json.py", "--config", EXAMPLES / "config.json")
    with create_trial(tmp_path / config["LocalPath"]) as trial:
        assert trial.steps(modes.TRAIN) == [0, 2, 4, 6, 8]
        gradient = trial.tensor("gradient/Sequential_2.weight")
        assert gradient.steps(modes.TRAIN) == [0, 2, 4], "train.end_step of the collection is 6"
        assert gradient.reduction_value(4, "l2", modes.TRAIN) > 0
        names = trial.tensor_names(collection="activations")
        assert {"0_output_0", "1_output_0", "2_output_0", "Sequential_output_0"} <= set(names)
        assert trial.tensor("1_output_0").value(8, modes.TRAIN).shape == (4, 8)


def test_why_a_rank_ended_is_one_line() -> None:
    brief = runpy.run_path(str(EXAMPLES / "read_a_run.py"))["brief"]
    assert brief("ValueError: no\n\nDetected at node x\n") == "ValueError: no"
    assert brief("a" * 1000) == "a" * 120 + " ..."


def test_read_a_run(tmp_path: Path) -> None:
    run_example(
        tmp_path, EXAMPLES / "gradient_accumulation.py", "--out-dir", "run", "--updates", "3"
    )
    said = run_example(tmp_path, EXAMPLES / "read_a_run.py", "run")
    assert "steps: 3, 0 to 2; 3 complete, 0 partial" in said
    assert "worker_0: ended, last step 2" in said
    assert "gradient/Linear_weight: median" in said
    live = run_example(tmp_path, EXAMPLES / "read_a_run.py", "--live", "run")
    assert [line for line in live.splitlines() if line in ("step 0", "step 1", "step 2")] == [
        "step 0",
        "step 1",
        "step 2",
    ]


def test_reading_what_is_no_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "read_a_run.py", tmp_path],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("NoSuchRun: no run at")


# -- the README's own code -------------------------------------------------------------------------

BEFORE = """
import torch, torch.distributed as dist
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 4)

    def forward(self, features):
        return self.fc1(features)

dist.init_process_group("gloo")
model, loss_function = nn.parallel.DistributedDataParallel(Net()), nn.MSELoss()
"""
TRAINING = """
for _ in range(101):
    loss_function(model(torch.randn(2, 4)), torch.zeros(2, 4)).backward()
"""
AFTER = """
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_the_code_of_the_readme(tmp_path: Path) -> None:
    text = (REPOSITORY / "README.md").read_text()
    capture, *reading = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert "# your training loop, unchanged" in capture
    script = BEFORE + capture.replace("# your training loop, unchanged", TRAINING) + AFTER
    (tmp_path / "train.py").write_text(script)
    torchrun(tmp_path, "train.py")
    # Every line that is a question answers it.
    (tmp_path / "read.py").write_text("\n".join(reading))
    said = run_example(tmp_path, "-W", "error", "read.py")
    assert "steps: 2, 0 to 100; 2 complete, 0 partial" in said
    assert [line.split()[0] for line in said.splitlines() if line[0].isdigit()] == ["0", "100"]
    (tmp_path / "ask.py").write_text(
        reading[0]
        + "\nprint(trial.workers(), trial.steps(), trial.missing(0), gradient.stack(0).shape)"
    )
    said = run_example(tmp_path, "ask.py")
    assert said.endswith("['worker_0', 'worker_1'] [0, 100] {} (2, 4, 4)\n")


def test_every_example_is_run_by_a_test() -> None:
    """Here, or where its framework is."""
    tests = [path.read_text() for path in (REPOSITORY / "tests").rglob("*.py")]
    for example in EXAMPLES.glob("*.py"):
        assert any(f'"{example.name}"' in text for text in tests), example.name
