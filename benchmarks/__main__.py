"""Every measurement of `capture_cost`, each in a process of its own, and one table of them all."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.machine import facts, load
from benchmarks.table import Row, markdown, plain

MEASUREMENTS = (
    "inside mlp full",
    "inside transformer full",
    "inside mlp five",
    "inside transformer five",
    "inside many full",
    "inside many five",
    "not_due",
    "ratio one",
    "ratio all",
    "memory",
)
PAGE = Path("docs/benchmarks.md")
_MEASURED = re.compile(r"(<!-- measured -->\n).*(<!-- /measured -->)", re.DOTALL)


def run(measurement: str, options: Sequence[str]) -> list[Row]:
    command = [sys.executable, "-m", "benchmarks.capture_cost", *measurement.split(), *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.json.decode(output.splitlines()[-1], type=list[Row])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__)
    parser.add_argument("--only", default="", help="a regex of measurements, of their names")
    parser.add_argument("--rounds", type=int, help="repeats of everything")
    parser.add_argument("--steps", type=int, help="steps per repeat")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="of what is short")
    parser.add_argument("--out", help="folder to store runs in; default: where temporary files go")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE}")
    given = parser.parse_args()
    quick = os.environ.get("QUICK", "") not in ("", "0")
    rounds, steps = given.rounds or 5, given.steps or (10 if quick else 40)
    options = ["--rounds", str(rounds), "--steps", str(steps), "--clock", given.clock]
    if given.out:
        options += ["--out", given.out]
    rows: list[Row] = []
    begun, load_before = time.monotonic(), load()
    for measurement in MEASUREMENTS:
        if re.search(given.only, measurement):
            print(f"{measurement} ...", file=sys.stderr, flush=True)
            rows += run(measurement, options)
    about = facts() | {
        "load average": f"{load_before} before, {load()} after (all that ran, this included)",
        "repeats": f"{rounds} rounds of {steps} steps, {given.clock} clock, "
        f"{time.monotonic() - begun:.0f} s in all",
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()), "", plain(rows), sep="\n")
    if given.write:
        lines = [f"- {key}: {value}" for key, value in about.items()]
        section = "\n".join([*lines, "", markdown(rows), ""])
        PAGE.write_text(_MEASURED.sub(lambda m: m[1] + section + m[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
