"""What docs/tensorflow.md says is so: its code runs, names in it exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smdist.tensorflow as smd
from tests.support.document_names import check_names, python_blocks
from tests.tensorflow.keras_jobs import data, make_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "tensorflow.md"


def test_names_in_it_exist() -> None:
    check_names(DOCUMENT, smd, "KerasHook")


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks(DOCUMENT)
    x, y = data()
    names: dict[str, Any] = {"model": make_model(), "x": x, "y": y}
    exec(compile(block, str(DOCUMENT), "exec"), names)  # noqa: S102 (it is ours)
    with names["trial"] as trial:
        assert trial.steps(mode=smd.modes.TRAIN) == trial.steps(mode=smd.modes.EVAL) == [0]
        assert {"weights", "gradients", "losses"} <= set(trial.collections())
