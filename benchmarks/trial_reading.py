"""Open a run of 8 ranks and read one tensor over 100 steps, from all of them: smdist and smdebug.

    python -m benchmarks.trial_reading local|s3

Both runs hold the same values. Both processes stay, open the run anew each time, and take turns; what
they read is compared. smdebug sleeps for a second before it believes that a run has ended: there is a
row with that and one without. On S3 a part of its work is extrapolated, see SPARED. Prints rows as
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from benchmarks.environments import Unavailable, interpreter
from benchmarks.peers.values import Run
from benchmarks.pipe import Answer, Failed, Worker
from benchmarks.stage import Place, left_out, places
from benchmarks.table import Row
from benchmarks.timing import median, p99

RUN = Run(ranks=8, steps=100, tensors=20, size=4096)
NUMBER = 7  # of the tensor that is read
BAR = 0.1
# For each value smdebug lists all objects of the run, over a minute in all: it reads every tenth
# step, and that counts ten times.
SPARED = {"local": 1, "s3": 10}
PLACES = {"local": "local", "s3": "loopback S3"}
AT_ONCE, SINGLY = "smdist, at once", "smdist, value by value"
THEIRS, AWAKE = "smdebug 1.0.34", "smdebug 1.0.34 less its sleep"
WRITERS = ("smdist", "smdebug")
WAYS = {
    AT_ONCE: ("smdist", "at_once"),
    SINGLY: ("smdist", "one_by_one"),
    THEIRS: ("smdebug", "one_by_one"),
}


def measure(where: str, rounds: int, run: Run, out: str | None) -> list[Row]:
    missing: dict[str, str] = {}

    def before(folder: Path, logs: Path) -> None:
        # Its files are what it would put into a bucket; with a client for each, that takes minutes.
        folder.mkdir(parents=True)
        worker = _start("smdebug", Place(folder, str(folder), {}, 0), logs, run)
        if isinstance(worker, str):
            missing["smdebug"] = worker
        else:
            worker.end()

    found: dict[str, list[Answer]] = {way: [] for way in WAYS}
    with places(where, out, before) as (place, logs), contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name in WRITERS if not missing else WRITERS[:1]:
            worker = _start(name, place, logs, run if name == "smdist" else None)
            if isinstance(worker, str):
                missing[name] = worker
            else:
                workers[name] = worker
                stack.callback(worker.end)
        for _ in range(rounds + 1):
            for way, (name, how) in WAYS.items():
                if name in workers:
                    theirs = (where, name) == ("s3", "smdebug")
                    url = "s3://before/smdebug" if theirs else place.run(name)[0]
                    details = {"every": SPARED[where] if theirs else 1, "how": how}
                    found[way].append(
                        workers[name].ask("read", place=url, number=NUMBER, **details)
                    )
    _compare(found, run, SPARED[where])
    return _rows(where, run, found, missing)


def _start(name: str, place: Place, logs: Path, run: Run | None = None) -> Worker | str:
    """A process, which writes `run` first."""
    worker: Worker | None = None
    environment = place.environment | {"SMDIST_LAUNCH": "trial"}
    try:
        python = interpreter("main" if name == "smdist" else name)
        worker = Worker(python, "benchmarks.reader", [name], logs / f"{name}.log", environment)
        if run is not None:
            worker.ask("write", place=place.run(name)[0], **asdict(run))
    except (Unavailable, Failed) as problem:
        if worker is not None:
            worker.end()
        return left_out(name, problem)
    return worker


def _compare(found: dict[str, list[Answer]], run: Run, every: int) -> None:
    for way, made in found.items():
        steps = len(range(0, run.steps, every if way == THEIRS else 1))
        counts = {one["values"] for one in made}
        assert counts <= {run.ranks * steps}, f"{way}: {counts} values, not {run.ranks * steps}"
    if every == 1:
        sums = {one["checksum"] for made in found.values() for one in made}
        assert len(sums) <= 1, f"different values were read: {sums}"


def _rows(
    where: str, run: Run, found: dict[str, list[Answer]], missing: dict[str, str]
) -> list[Row]:
    base = f"trial, {run.steps} steps x {run.ranks} ranks, {PLACES[where]}"
    rows: list[Row] = []
    taken: dict[str, list[float]] = {}
    for way, (name, _) in WAYS.items():
        what = f"{base}: {way}"
        if name in missing:
            rows.append(Row(what, None, "ms", note=f"not measured: {missing[name]}"))
            continue
        first, *made = found[way]
        taken[way] = [1e3 * (one["open_s"] + one["read_s"]) for one in made]
        spared = SPARED[where] if way == THEIRS else 1
        if way == THEIRS:
            slept = [1e3 * one["slept_s"] for one in made]
            read = [1e3 * one["read_s"] - nap for one, nap in zip(made, slept, strict=True)]
            opened = [1e3 * one["open_s"] for one in made]
            taken[AWAKE] = [a + spared * b for a, b in zip(opened, read, strict=True)]
            taken[way] = [a + b for a, b in zip(taken[AWAKE], slept, strict=True)]
        rows.append(_row(what, taken[way], first, made, spared))
    if {AT_ONCE, SINGLY, THEIRS} <= set(taken):
        for ours in (AT_ONCE, SINGLY):
            for theirs in (THEIRS, AWAKE):
                pairs = [a / b for a, b in zip(taken[ours], taken[theirs], strict=True)]
                what, spread = f"{base}: {ours} / {theirs}", (min(pairs), max(pairs))
                rows.append(Row(what, median(pairs), "x", p99(pairs), BAR, "", spread))
    return rows


def _row(
    what: str, milliseconds: list[float], first: Answer, made: list[Answer], spared: int
) -> Row:
    opened = median([1e3 * one["open_s"] for one in made])
    note = f"{made[0]['values']} values; opened in {opened:.0f} ms; "
    note += f"the first in a process {1e3 * (first['open_s'] + first['read_s']):.0f} ms"
    if spared > 1:
        note += f"; reading them is counted {spared} times"
    spread = (min(milliseconds), max(milliseconds))
    return Row(what, median(milliseconds), "ms", p99(milliseconds), None, note, spread)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.trial_reading")
    parser.add_argument("where", choices=sorted(SPARED))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of the run that is read")
    parser.add_argument("--out", help="folder to store runs in")
    given = parser.parse_args(arguments)
    run = replace(RUN, steps=given.steps) if given.steps else RUN
    rows = measure(given.where, given.rounds, run, given.out)
    sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
