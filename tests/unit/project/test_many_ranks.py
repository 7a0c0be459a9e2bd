"""The simulator of many ranks, in small: it runs, and requests do not grow with ranks or steps."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.many_ranks import Size, main, measure
from benchmarks.table import Row


def requests(size: Size) -> float:
    (row,) = [row for row in measure(size, "memory") if row.what == "trial: requests to open"]
    assert row.value is not None
    return row.value


def test_opening_takes_as_many_requests_for_many_ranks_as_for_few() -> None:
    assert requests(Size(2, 5, 3, 2)) == requests(Size(40, 200, 3, 10)) <= 6


def test_it_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "4", "--steps", "7", "--tensors", "2", "--batch", "3"]
    main([*sizes, "--store", "directory", "--json"])
    rows = msgspec.json.decode(capsys.readouterr().out, type=list[Row])
    assert {row.verdict for row in rows if row.bar is not None and row.unit == ""} == {"met"}
    main([*sizes, "--store", "memory"])
    assert "merge: one new step of all ranks" in capsys.readouterr().out
