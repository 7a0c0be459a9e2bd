"""Runs parts of the test suite, each in its environment, one after the other, and sums them up.

    python tests/environments/matrix.py main kernel tensorflow horovod [-- arguments for pytest]

All of them run, whatever fails before. What failed is named again at the end, and the last line
counts everything. The environments must be there: `make test` makes them.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("failed", "passed", "skipped")
INTERRUPTED, NO_TESTS = 2, 5  # exit codes of pytest


@dataclass(frozen=True)
class Session:
    """One call of pytest."""

    title: str
    environment: str
    folder: str = ""
    parallel: bool = False
    program: str = ""  # runs pytest, where that takes preparation

    def command(self, workers: str, more: Sequence[str]) -> list[str]:
        options = [f"-n{workers}", "--dist=loadfile"] if self.parallel else ["-n0"]
        # Whoever names files means those, not the whole folder.
        named = any(word.startswith(("tests/", "./tests/")) for word in more)
        folder = [self.folder] if self.folder and not named else []
        python = ROOT / self.environment / "bin" / "python"
        program = [self.program] if self.program else ["-m", "pytest"]
        return [str(python), *program, *options, *folder, *more]


@dataclass(frozen=True)
class Result:
    title: str
    took_s: float
    counts: dict[str, int]
    failed: tuple[str, ...]


# What pytest collects by itself leaves the other folders out (pyproject.toml). Jobs under Horovod are
# watched from the main environment: all that the two share is the store.
PARTS = {
    "main": [Session("main", ".venv", parallel=True)],
    "kernel": [
        Session("kernel, sanitized", ".venv", program="tests/environments/sanitized_kernel.py")
    ],
    "tensorflow": [
        Session("TensorFlow, Keras 3", ".venv", "tests/tensorflow", parallel=True),
        Session("TensorFlow, Keras 2", ".venv-horovod", "tests/tensorflow", parallel=True),
    ],
    "horovod": [Session("Horovod", ".venv", "tests/horovod")],
}


def call(command: Sequence[str]) -> int:
    if not Path(command[0]).exists():
        sys.exit(f"{command[0]} is not there; make test makes it")
    process = subprocess.Popen(command, cwd=ROOT)
    while process.returncode is None:
        with contextlib.suppress(KeyboardInterrupt):  # pytest has it too, and has to clean up
            process.wait()
    return process.returncode


def run(session: Session, command: Sequence[str], report: Path) -> tuple[int, Result]:
    began = time.monotonic()
    code = call([*command, f"--junit-xml={report}", "-o", "junit_family=xunit1"])  # names files
    counts, failed = read(report) if report.exists() else (dict.fromkeys(KINDS, 0), ())
    if code not in (0, NO_TESTS) and not failed:
        counts["failed"], failed = 1, (f"all of it: pytest ended with {code}",)
    return code, Result(session.title, time.monotonic() - began, counts, failed)


def read(report: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """How many tests came out how, and which failed."""
    counts = dict.fromkeys(KINDS, 0)
    failed: list[str] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome = {child.tag for child in case}
        if outcome & {"failure", "error"}:
            counts["failed"] += 1
            failed.append(f"{case.get('file') or case.get('classname')}::{case.get('name')}")
        else:
            counts["skipped" if "skipped" in outcome else "passed"] += 1
    return counts, tuple(dict.fromkeys(failed))


def summary(results: Sequence[Result]) -> list[str]:
    total = {kind: sum(result.counts[kind] for result in results) for kind in KINDS}
    return [
        *(f"{result.title}: {_counted(result.counts, result.took_s)}" for result in results),
        *(f"FAILED {name} ({result.title})" for result in results for name in result.failed),
        _counted(total, sum(result.took_s for result in results)),
    ]


def _counted(counts: dict[str, int], took_s: float) -> str:
    said = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]) or "no tests"
    return f"{said} in {took_s:.0f}s ({timedelta(seconds=round(took_s))})"


def main(arguments: Sequence[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--workers", default="2", help="processes that run tests, where it helps")
    given, more = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    sessions = [session for part in given.parts for session in PARTS[part]]
    if len(sessions) == 1:
        return call(sessions[0].command(given.workers, more))
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, session in enumerate(sessions):
            place = f"{number + 1} of {len(sessions)}, in {session.environment}"
            _say(f"{session.title} ({place})")
            command = session.command(given.workers, more)
            code, result = run(session, command, Path(folder, f"{number}.xml"))
            results.append(result)
            _say("")
            if code == INTERRUPTED:
                break
    _say("\n".join(summary(results)))
    return 1 if any(result.failed for result in results) else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
