"""Arrow tables of a run, and SQL over them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smdist.cli.runs import ask
from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys
from smdist.storage import LocalStore
from smdist.trials import Trial
from tests.support.run_builder import RunBuilder, Saved
from tests.unit.smdist.trials.test_trial_snapshot import open_trial

pytest.importorskip("pyarrow", reason="the oldest environment has no extra `analysis`")
pytest.importorskip("duckdb", reason="the oldest environment has no extra `analysis`")

TRAIN = ModeKeys.TRAIN


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    run = RunBuilder(LocalStore(tmp_path))
    for rank in range(2):
        writer = run.rank(rank, 2)
        for step in range(3):
            bad = rank == 1 and step == 2
            tensors: dict[str, Any] = {
                "loss": Saved(
                    np.float32(10 * rank + step).reshape(()), collections=("losses", "b")
                ),
                "w": np.array([np.nan if bad else 1.0, 2.0]),
                "reduced": Saved(np.ones(3), raw=False, reductions=()),
            }
            writer.step(TRAIN, step, tensors)
        writer.end()
    return open_trial(LocalStore(tmp_path))


def test_the_table_has_the_rows(trial: Trial) -> None:
    rows, table = trial.rows(), trial.statistics()
    assert table.num_rows == len(rows) == 18
    found = table.to_pydict()
    assert found["tensor"] == [rows.names[t] for t in rows["tensor"]]
    assert set(found["mode"]) == {"TRAIN"}
    assert found["sum"][:6] == list(rows["sum"][:6])
    by_name = dict(zip(found["tensor"], found["collections"], strict=True))
    assert by_name["loss"] == "b,losses"
    for name, number in zip(found["tensor"], found["fingerprint"], strict=True):
        assert (number is None) == (name == "reduced")
    assert trial.statistics(tensors="^w$", steps=[1]).num_rows == 2


def test_views(trial: Trial) -> None:
    first = "SELECT step, rank, tensor FROM statistics WHERE nans > 0 ORDER BY step LIMIT 1"
    assert trial.sql(first).to_pylist() == [{"step": 2, "rank": 1, "tensor": "w"}]
    steps = trial.sql("SELECT step, ranks, tensors FROM steps").to_pylist()
    assert steps == [{"step": n, "ranks": 2, "tensors": 6} for n in range(3)]
    ranks = trial.sql("SELECT rank, last_step FROM ranks").to_pylist()
    assert ranks == [{"rank": 0, "last_step": 2}, {"rank": 1, "last_step": 2}]
    scalars = trial.sql("SELECT value FROM scalars ORDER BY rank, step").to_pydict()
    assert scalars == {"value": [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]}


@pytest.mark.parametrize(
    "text",
    [
        "SELEC 1",
        "SELECT * FROM nothing",
        "SELECT * FROM read_csv('/etc/hosts')",
        "COPY statistics TO 'out.csv'",
        "SET enable_external_access = true",
    ],
)
def test_wrong_queries_and_files_are_refused(trial: Trial, text: str) -> None:
    with pytest.raises(ConfigurationError, match="the query failed"):
        trial.sql(text)


def test_the_command(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    text = "SELECT rank, max, tensor FROM statistics WHERE step = 2 AND tensor = 'w' ORDER BY rank"
    path = trial.path.removeprefix("file://")
    assert ask(path, text, "json") == 0
    assert json.loads(capsys.readouterr().out) == [
        {"rank": 0, "max": 2.0, "tensor": "w"},
        {"rank": 1, "max": "nan", "tensor": "w"},
    ]
    assert ask(path, text, "csv") == 0
    assert next(csv.reader(io.StringIO(capsys.readouterr().out))) == ["rank", "max", "tensor"]
    assert ask(path, text, "table") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["0", "2", "w"]
    assert ask(path, text, "xml") == 2
    assert ask(path, "SELEC", "json") == 2
    assert "the query failed" in capsys.readouterr().err
