"""Every measurement, each in processes of its own, and one table of them all."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.cases import CASES
from benchmarks.machine import facts, load
from benchmarks.picture import draw
from benchmarks.table import Row, markdown, plain

PAGE, PICTURE, ROWS = (Path("docs", f"benchmarks.{kind}") for kind in ("md", "svg", "json"))
_MEASURED = re.compile(r"(<!-- measured -->\n).*(<!-- /measured -->)", re.DOTALL)


class Measurement(NamedTuple):
    name: str
    module: str
    arguments: tuple[str, ...]
    steps: int | None = None  # None: its own number
    quick: bool = False
    quick_steps: int | None = None
    times: int = 1  # as many rounds as others have, if not quick


def _of_cost(name: str, *, quick: bool = False) -> Measurement:
    return Measurement(name, "capture_cost", tuple(name.split()), 20, quick, 5)


MEASUREMENTS = (
    *(
        Measurement(
            f"step_time {case.name}", "step_time", (case.name,), None, case.quick, 4, case.times
        )
        for case in CASES
    ),
    Measurement("step_time s3_rate", "step_time", ("s3_rate",)),
    Measurement("small_tensors full", "small_tensors", ("full",), None, True, 4),
    Measurement("small_tensors five", "small_tensors", ("five",)),
    Measurement("keras", "keras_cost", (), 20, False, 5, 5),  # a model is at times twice as slow
    Measurement("keras xla", "keras_cost", ("--xla",), 20, False, 5, 3),
    Measurement("trial_reading local", "trial_reading", ("local",), None, True),
    Measurement("trial_reading s3", "trial_reading", ("s3",)),
    *(
        Measurement(
            f"s3_store {size} {server}", "s3_store", (size, "--server", server), 40, False, 8
        )
        for size, server in (("1", "rclone"), ("8", "rclone"), ("32", "rclone"), ("8", "moto"))
    ),
    Measurement("s3_requests", "s3_requests", (), 40, False, 4),
    Measurement("s3_latency", "s3_latency", ("narrow",), 40, False, 10),
    Measurement("many_ranks", "many_ranks", ("--json",), 1000),
    Measurement("visibility", "visibility", ("--json",), 30),
    _of_cost("inside mlp full", quick=True),
    _of_cost("inside transformer full"),
    _of_cost("inside mlp five"),
    _of_cost("inside transformer five"),
    _of_cost("inside many full"),
    _of_cost("inside many five"),
    _of_cost("not_due"),
    _of_cost("memory", quick=True),
)


def run(measurement: Measurement, options: Sequence[str]) -> list[Row]:
    """One that fails is a row too, which says so: the others are worth having."""
    module = f"benchmarks.{measurement.module}"
    command = [sys.executable, "-m", module, *measurement.arguments, *options]
    made = subprocess.run(command, check=False, stdout=subprocess.PIPE)
    if made.returncode:
        found = [Row(measurement.name, None, "", note=f"it ended with {made.returncode}")]
    else:
        found = msgspec.json.decode(made.stdout.splitlines()[-1], type=list[Row])
    return [msgspec.structs.replace(row, measurement=measurement.name) for row in found]


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """`new`, and of `old` what was not measured again, in the order of the measurements."""
    names = [each.name for each in MEASUREMENTS]
    again = {row.measurement for row in new}
    kept = [row for row in old if row.measurement in names and row.measurement not in again]
    return sorted([*kept, *new], key=lambda row: names.index(row.measurement))


def write(about: dict[str, str], new: Sequence[Row]) -> None:
    old = msgspec.json.decode(ROWS.read_bytes(), type=list[Row]) if ROWS.exists() else []
    rows = merge(old, new)
    if len(rows) > len(new):
        about = about | {"repeats": f"{about['repeats']}; other rows are of runs before that"}
    lines = [f"- {key}: {value}" for key, value in about.items()]
    shown = [f"![Step time with capture over without]({PICTURE.name})", ""]
    if not any(row.group for row in rows):
        shown = []
    section = "\n".join([*lines, "", *shown, markdown(rows), ""])
    PAGE.write_text(_MEASURED.sub(lambda m: m[1] + section + m[2], PAGE.read_text()))
    ROWS.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    caption = f"Dashed: the bar. Whiskers: all rounds. {about['processor']}; {about['versions']}"
    if picture := draw(rows, caption):
        PICTURE.write_text(picture)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__)
    parser.add_argument("--only", default="", help="a regex of names of measurements")
    parser.add_argument("--list", action="store_true", help="print the names, measure nothing")
    parser.add_argument("--rounds", type=int, help="repeats of everything")
    parser.add_argument("--steps", type=int, help="steps per repeat; steps of the run of a trial")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="of capture_cost")
    parser.add_argument("--out", help="folder to store runs in; default: where temporary files go")
    parser.add_argument(
        "--write",
        action=argparse.BooleanOptionalAction,
        help=f"put it into {PAGE} and {PICTURE}, where rows of what was not measured this time stay; "
        "default: if everything was measured, and not QUICK",
    )
    given = parser.parse_args()
    quick = os.environ.get("QUICK", "") not in ("", "0")
    selected = [
        each
        for each in MEASUREMENTS
        if re.search(given.only, each.name) and (each.quick or given.only or not quick)
    ]
    if given.list:
        print("\n".join(each.name for each in selected))
        return
    rounds = given.rounds or (3 if quick else 5)
    complete = len(selected) == len(MEASUREMENTS) and not quick
    writes = given.write if given.write is not None else complete
    rows: list[Row] = []
    about: dict[str, str] = {}
    begun, load_before = time.monotonic(), load()
    for each in selected:
        at = time.monotonic()
        print(f"{each.name} ...", file=sys.stderr, end=" ", flush=True)
        rows += run(each, _options(each, given, rounds, quick))
        print(f"{time.monotonic() - at:.0f} s", file=sys.stderr, flush=True)
        about = facts() | {
            "load average": f"{load_before} before, {load()} after (all that ran, this included)",
            "repeats": f"{rounds} rounds, {time.monotonic() - begun:.0f} s in all",
        }
        if writes:  # it may be interrupted
            write(about, rows)
    print("\n".join(f"{key}: {value}" for key, value in about.items()), "", plain(rows), sep="\n")


def _options(each: Measurement, given: argparse.Namespace, rounds: int, quick: bool) -> list[str]:
    steps = given.steps or (each.quick_steps if quick else each.steps)
    options = ["--rounds", str(rounds if quick or given.rounds else rounds * each.times)]
    options += ["--steps", str(steps)] if steps else []
    options += ["--clock", given.clock] if each.module == "capture_cost" else []
    options += ["--out", given.out] if given.out else []
    return options


if __name__ == "__main__":
    main()
