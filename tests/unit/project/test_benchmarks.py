"""What the benchmarks make of their samples; the measuring itself is not for tests."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import MEASUREMENTS, merge
from benchmarks.cases import Case, chosen
from benchmarks.picture import draw
from benchmarks.pipe import Failed, Worker
from benchmarks.table import Row, markdown


def test_the_median_decides_and_rounds_on_both_sides_are_told() -> None:
    assert Row("a", 1.05, "x", bar=1.08, spread=(1.01, 1.07)).verdict == "met"
    assert Row("a", 1.05, "x", bar=1.08, spread=(1.01, 1.09)).verdict == "met, not in all rounds"
    assert Row("a", 1.09, "x", bar=1.08, spread=(1.07, 1.1)).verdict == "MISSED, not in all rounds"
    assert Row("a", 1.10, "x", bar=1.08, spread=(1.09, 1.11)).verdict == "MISSED"


def test_what_was_not_measured_stays_in_the_table() -> None:
    row = Row("smdebug / none", None, "x", bar=1.08, note="not measured: no network")
    assert row.verdict == "not measured"
    assert "no network" in markdown([row])


def test_measuring_again_replaces_rows_of_that_measurement_alone() -> None:
    first, second, third = (each.name for each in MEASUREMENTS[:3])
    old = [
        Row("a", 1.0, "x", measurement=first),
        Row("b", 1.0, "x", measurement=second),
        Row("gone", 1.0, "x", measurement="no longer there"),
    ]
    new = [Row("c", 1.0, "x", measurement=third), Row("a2", 2.0, "x", measurement=first)]
    assert [row.what for row in merge(old, new)] == ["a2", "b", "c"]


def test_the_picture_has_a_bar_for_each_row_of_a_group() -> None:
    rows = [
        Row("", 1.05, "x", bar=1.08, spread=(1.0, 1.1), group="MLP <full>", label="smdist"),
        Row("", 9.0, "x", group="MLP <full>", label="TensorBoard"),
        Row("", None, "x", group="MLP <full>", label="smdebug"),
        Row("", 1.0, "x"),
    ]
    picture = ElementTree.fromstring(draw(rows, "2 processors"))
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in picture.iter(f"{name}text")]
    bars = [element for element in picture.iter(f"{name}rect") if element.get("height") == "16"]
    assert len(bars) == 2
    assert {"MLP <full>", "smdist", "1.050", "9.00 (cut off)"} <= set(texts)
    assert draw([], "") == ""


@pytest.mark.torch
def test_what_a_save_costs_is_told_by_the_steps_around_it() -> None:
    from benchmarks.step_time import cost_of_a_save

    case = Case("", "", interval=10, steps=20, warm_up=5)
    steps = [100.0] * 20
    steps[5] = steps[15] = 108.0  # due
    steps[6] = steps[16] = 102.0
    assert cost_of_a_save(steps, case) == pytest.approx(1.01)


def test_a_shorter_case_still_has_a_step_that_is_due() -> None:
    case = Case("", "", interval=10, steps=30, warm_up=6).shorter(4)
    assert any(step % 10 == 0 for step in range(case.warm_up, case.warm_up + case.steps))
    assert chosen("mlp_not_due").shorter(4).steps == 4


def test_a_worker_answers_whatever_it_prints(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(
        "import sys\n"
        "from benchmarks.pipe import own_output, serve\n"
        "answers = own_output()\n"
        "print('noise')\n"
        "serve(answers, {'add': lambda a, b: {'sum': a + b}, 'fail': lambda: 1 / 0})\n"
    )
    log = tmp_path / "log"
    more = {"PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    worker = Worker(Path(sys.executable), "echo", [], log, more)
    try:
        assert worker.ask("add", a=1, b=2) == {"sum": 3}
        assert log.read_text() == "noise\n"
        with pytest.raises(Failed, match="division by zero"):
            worker.ask("fail")
    finally:
        worker.end()


@pytest.mark.torch
def test_a_ratio_is_of_one_visit_and_the_median_of_them() -> None:
    from benchmarks.step_time import Visit, rows_of

    def visit(plain: float, captured: float) -> Visit:
        return Visit([plain] * 2, [captured] * 2, [1.0], [1.0], 0.0, 0.0, 0.0, 0.0, 10)

    case = Case("", "mlp", peers=("smdist", "smdebug", "dcp"), bar=1.08, at_most={"smdebug": 0.2})
    visits = {
        "smdist": [visit(100, 105), visit(200, 212), visit(100, 107)],
        "smdebug": [visit(100, 200), visit(200, 300), visit(100, 180)],
    }
    rows = {row.what: row for row in rows_of(case, visits, {"dcp": "no such thing"}, 10)}
    ours = rows["step time, mlp: smdist / none"]
    assert ours.value == pytest.approx(1.06)
    assert ours.spread == pytest.approx((1.05, 1.07))
    assert ours.verdict == "met"
    assert rows["step time, mlp: torch DCP async_save / none"].value is None
    added = rows["step time, mlp: added by smdist / by smdebug 1.0.34"]
    assert added.value == pytest.approx(0.07)


@pytest.mark.torch
def test_what_a_peer_did_not_store_is_told() -> None:
    from benchmarks.step_time import Visit, rows_of

    def stored(megabytes: int) -> list[Visit]:
        return [Visit([1.0], [1.0], [1.0], [1.0], 0.0, 0.0, 0.0, 0.0, megabytes * 1_000_000)]

    case = Case("", "mlp", peers=("smdist", "dcp", "smdebug"), steps=6, warm_up=4, slow={"dcp": 2})
    visits = {"smdist": stored(50), "dcp": stored(20), "smdebug": stored(20)}
    _, smdist, dcp, smdebug = rows_of(case, visits, {}, nbytes=5_000_000)
    assert "STORED" not in smdist.note
    assert "STORED" not in dcp.note, "it had two steps to warm up and two that count"
    assert "STORED 20 MB OF 50" in smdebug.note


@pytest.mark.torch
def test_a_budget_says_how_much_was_saved() -> None:
    from benchmarks.step_time import Visit, rows_of

    visit = Visit([1.0], [1.0], [1.0], [1.0], 0.0, 0.0, 0.0, 0.0, 5, kept=7)
    case = Case("", "mlp", peers=("smdist",), steps=6, warm_up=4, budget=0.03)
    assert "7 of 10 steps were saved" in rows_of(case, {"smdist": [visit]}, {}, 5)[-1].note
