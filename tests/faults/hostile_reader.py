"""Reads runs, with little memory to do it: one path per line in, one JSON line of what happened out.

Every question is asked of each; few of one whose path begins with a "!". What is no error of smdist is
told as it is, with its traceback.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import smdist.cli.runs
from smdist import create_trial, modes
from smdist.errors import SmdistError
from smdist.format.manifest import Session
from smdist.storage import LocalStore
from smdist.storage import loop_thread as sync
from smdist.trials import Trial
from smdist.workers.join.enrolment import _read_run, _read_sessions
from smdist.workers.upload.commit import resume_point

MOST_BYTES = 3 << 30  # of addresses beyond what imports take


class Report:
    def __init__(self) -> None:
        self.told: list[str] = []  # errors of ours, troubles, what was printed
        self.raw: list[str] = []  # printed
        self.strange: list[str] = []

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except SmdistError as error:
            self.told.append(f"{what}: {type(error).__name__}: {error}")
        except BaseException:  # noqa: BLE001 (told, with all there is)
            self.strange.append(f"{what}: {traceback.format_exc()}")

    def command(self, run: Callable[[], int]) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            run()
        self.raw.append(out.getvalue())


def ask(trial: Trial, report: Report) -> None:
    steps: list[int] = []
    with report.asking("steps"):
        steps = trial.steps(show_incomplete_steps=True)[:8]
    questions: dict[str, Callable[[], Any]] = {
        "describe": trial.describe,
        "repr": lambda: repr(trial),
        "names": trial.tensor_names,
        "collections": trial.collections,
        "attempts": trial.attempts,
        "ranks": trial.ranks,
        "workers": lambda: (trial.workers(), trial.num_workers),
        "dropped": trial.dropped,
        "thinned": trial.thinned,
        "disagreements": trial.disagreements,
        "modes": lambda: [(trial.mode(s), trial.mode_step(s)) for s in steps],
        "missing": lambda: [trial.missing(s) for s in steps],
        "train": lambda: trial.steps(modes.TRAIN),
        "next": lambda: trial.next_saved_step(0, timeout_s=0.0),
        "passed": lambda: [trial.has_passed_step(s) for s in (*steps, 10**30)],
        "values": trial.values,
        "frame": trial.to_dataframe,
    }
    for what, question in questions.items():
        with report.asking(what):
            question()
    for name in ("w", "loss", "only_reduced"):
        with report.asking(f"tensor {name}"):
            tensor = trial.tensor(name)
            for step in steps:
                for worker in ("worker_0", "worker_1"):
                    with report.asking(f"value of {name}"):
                        tensor.value(step, worker=worker)
                    with report.asking(f"reduction of {name}"):
                        tensor.reduction_value(step, "mean", worker=worker)
                    with report.asking(f"shape of {name}"):
                        tensor.shape(step, worker=worker)
                with report.asking(f"{name} across ranks"):
                    tensor.across_ranks(step, "l2")
    with report.asking("troubles"):
        report.told += [text for texts in trial.troubles().values() for text in texts]


def resume(path: str) -> None:
    store = LocalStore(path)
    session = Session("0.0", 0, 2, 0, "all", 1.0, "host", 1, "")
    sync.run(_read_run(store))
    sync.run(_read_sessions(store, 0))
    sync.run(resume_point(store, session))


def ask_little(trial: Trial, report: Report) -> None:
    with report.asking("a few things"):
        steps = trial.steps(show_incomplete_steps=True)
        trial.missing(steps[-1])
        trial.tensor("w").value(steps[0], worker="worker_0")
        report.told += [text for texts in trial.troubles().values() for text in texts]


def read(path: str) -> Report:
    report, questions = Report(), ask_little if path.startswith("!") else ask
    path = path.lstrip("!")
    for what in ("as it is", "merged"):
        with report.asking(f"opening it {what}"), create_trial(path) as trial:
            questions(trial, report)
        with report.asking("smdist trial"):
            report.command(lambda: smdist.cli.runs.describe(path))
        if what == "as it is":
            with report.asking("smdist merge"):
                report.command(lambda: smdist.cli.runs.merge(path, take_over=True))
    with report.asking("resuming"):
        resume(path)
    return report


def main() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        began = time.monotonic()
        report = read(line.strip())
        answer = {**vars(report), "seconds": time.monotonic() - began}
        out.write(f"{json.dumps(answer)}\n")
        out.flush()


if __name__ == "__main__":
    main()
