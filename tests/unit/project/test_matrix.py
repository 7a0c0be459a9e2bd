"""The parts of the test suite, summed up: nothing that failed is missed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.environments.matrix import PARTS, ROOT, Session, run, summary

TESTS = """
import pytest

def test_well():
    pass

@pytest.mark.parametrize("value", [1, 2])
def test_ill(value):
    assert value == 1

@pytest.fixture
def broken():
    raise OSError

def test_without_its_fixture(broken):
    pass

@pytest.mark.skip(reason="not here")
def test_left_out():
    pass
"""


def pytest_on(path: Path) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(path.parent), "-c", "/dev/null"]
    return [sys.executable, "-m", "pytest", *options, str(path)]


@pytest.mark.slow
def test_what_failed_is_named_and_all_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_good.py").write_text("def test_good():\n    pass\n")
    results = []
    for name in ("some", "good"):
        session = Session(name, ".venv")
        command = pytest_on(tmp_path / f"test_{name}.py")
        results.append(run(session, command, tmp_path / f"{name}.xml")[1])
    some, good, *failed, total = summary(results)
    assert some.startswith("some: 2 failed, 2 passed, 1 skipped in ")
    assert good.startswith("good: 1 passed in ")
    assert failed == [
        "FAILED test_some.py::test_ill[2] (some)",
        "FAILED test_some.py::test_without_its_fixture (some)",
    ]
    assert total.startswith("2 failed, 3 passed, 1 skipped in ")


@pytest.mark.parametrize(
    "text", ["import nothing_of_that_name", "import os\n\ndef test_it():\n    os._exit(3)\n"]
)
@pytest.mark.slow
def test_a_session_that_never_gets_to_its_end_has_failed(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_bad.py").write_text(text)
    code, result = run(
        Session("bad", ".venv"), pytest_on(tmp_path / "test_bad.py"), tmp_path / "report.xml"
    )
    assert code != 0
    assert result.counts["failed"] == 1
    assert len(result.failed) == 1
    assert summary([result])[-1].startswith("1 failed in ")


def test_named_files_are_run_instead_of_the_folder() -> None:
    (session,) = PARTS["horovod"]
    assert session.command("2", ["-x"])[-2:] == ["tests/horovod", "-x"]
    given = ["tests/horovod/test_jobs.py", "-k", "killed"]
    assert session.command("2", given)[-4:] == ["-n0", *given]


@pytest.mark.parametrize("part", ["main", "tensorflow"])
def test_parts_that_leave_cores_idle_use_all_workers(part: str) -> None:
    for session in PARTS[part]:
        command = session.command("5", ["-x"])
        assert {"-n5", "--dist=loadfile"} <= set(command)  # by file: fixtures are made once
        assert "-n0" not in command


def test_arguments_overrule_the_number_of_workers() -> None:
    for session in (session for part in PARTS.values() for session in part):
        command = session.command("5", ["-n", "0"])
        assert command[-2:] == ["-n", "0"]  # pytest takes the last


def test_what_pytest_leaves_out_by_itself_is_a_part(pytestconfig: pytest.Config) -> None:
    left_out = {path for path in pytestconfig.getini("norecursedirs") if path.startswith("tests/")}
    assert left_out == {session.folder for part in PARTS.values() for session in part} - {""}
    assert all(list((ROOT / folder).glob("test_*.py")) for folder in left_out)
