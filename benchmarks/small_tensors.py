"""1000 tensors of 4 KB each (and their gradients) in every step: what counts is the cost of each.

    python -m benchmarks.small_tensors full|five

Beside step times as in `step_time`: what capture adds to the time of the training thread alone, be it
in callbacks or in torch on the way to them. Prints rows as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec

from benchmarks.cases import Case
from benchmarks.step_time import labels_of, over, play, rows_of
from benchmarks.table import Row
from benchmarks.timing import median

HOW = {
    "full": Case(
        "many",
        "full, every step, 1000 tensors of 4 KB",
        model="many",
        peers=("none", "smdist", "smdebug", "dcp", "safetensors", "memcpy"),
        at_most={"smdebug": 0.1},
        slow={"dcp": 3, "smdebug": 5},
        figure=True,
    ),
    "five": Case(
        "many_five",
        "five reductions, every step, 1000 tensors of 4 KB",
        model="many",
        how="five",
        slow={"smdebug": 2},
        at_most={"smdebug": 0.1},
    ),
}


def measure(case: Case, rounds: int, out: str | None) -> list[Row]:
    visits, missing, facts = play(case, rounds, out)
    rows = rows_of(case, visits, missing, facts["nbytes"])
    base = f"training thread, {case.title}"
    labels = labels_of(case)
    for peer in ("smdist", "smdebug", "memcpy"):
        if made := visits.get(peer):
            added = [one.added_cpu for one in made]
            per_tensor = f"{1e3 * median(added) / facts['tensors']:.1f} us per tensor"
            spread = (min(added), max(added))
            what = f"{base}: added by {labels[peer]}"
            rows.append(Row(what, median(added), "ms", note=per_tensor, spread=spread))
    if visits.get("smdist") and visits.get("smdebug"):
        what = f"{base}: smdist / {labels['smdebug']}"
        rows.append(over(what, visits, "smdebug", 0.1, "added_cpu"))
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.small_tensors")
    parser.add_argument("how", choices=sorted(HOW))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="per visit; fewer than there are")
    parser.add_argument("--out", help="folder to store runs in")
    given = parser.parse_args(arguments)
    case = HOW[given.how].shorter(given.steps) if given.steps else HOW[given.how]
    rows = measure(case, given.rounds, given.out)
    sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
