"""Rows as a Parquet file, as other tools read it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smdist.identity import ModeKeys
from smdist.storage import MemoryStore
from smdist.tables.parquet_file import write_parquet
from tests.support.run_builder import RunBuilder
from tests.unit.smdist.trials.test_trial_snapshot import open_trial

pq = pytest.importorskip("pyarrow.parquet", reason="the oldest environment has no `analysis`")


def test_a_row_group_per_tensor_and_the_same_values(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = RunBuilder(store).rank(0)
    for step in range(4):
        writer.step(ModeKeys.TRAIN, step, {"a": np.full(2, step), "b": np.ones(3)})
    writer.end()
    trial = open_trial(store)
    write_parquet(trial.rows(), tmp_path / "rows.parquet")
    with pq.ParquetFile(tmp_path / "rows.parquet") as file:
        assert [file.metadata.row_group(i).num_rows for i in range(2)] == [4, 4]
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"
        assert file.read().to_pylist() == trial.statistics().to_pylist()
