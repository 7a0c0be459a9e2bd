"""The code in docs/tensorflow.md runs, and the names in it exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.support.document_names import check_names, python_blocks
from tests.tensorflow.keras_jobs import data, hooked, make_model, read

DOCUMENT = Path(__file__).parents[2] / "docs" / "tensorflow.md"


def test_names_in_it_exist() -> None:
    check_names(DOCUMENT, smd, "KerasHook")


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block, _ = python_blocks(DOCUMENT)
    x, y = data()
    names: dict[str, Any] = {"model": make_model(), "x": x, "y": y}
    exec(compile(block, str(DOCUMENT), "exec"), names)  # noqa: S102 (it is ours)
    with names["trial"] as trial:
        assert trial.steps(mode=smd.modes.TRAIN) == trial.steps(mode=smd.modes.EVAL) == [0]
        assert {"weights", "gradients", "losses"} <= set(trial.collections())


def test_its_loop_runs(tmp_path: Path) -> None:
    _, block = python_blocks(DOCUMENT)
    with hooked(tmp_path / "run", include_collections=["gradients", "layers"]) as hook:
        names: dict[str, Any] = {
            "tf": tf,
            "hook": hook,
            "model": make_model(compiled=False),
            "batches": [data(4), data(4)],
            "loss_function": tf.keras.losses.MeanSquaredError(),
            "optimizer": tf.keras.optimizers.SGD(0.1),
        }
        exec(compile(block, str(DOCUMENT), "exec"), names)  # noqa: S102 (it is ours)
    trial = read(tmp_path / "run")
    for name in ("loss", "top/outputs", "gradients/top/kernelGrad"):
        assert trial.tensor(name).steps(mode=smd.modes.TRAIN) == [0, 1]
