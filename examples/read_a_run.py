"""What to ask of a run first: who is there, who is missing, which rank is unlike the others.

    python examples/read_a_run.py runs/ddp
    python examples/read_a_run.py --live runs/ddp        while the job runs

Needs no framework: it reads a laptop's copy of a run as well.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

from smdist import create_trial
from smdist.errors import SmdistError
from smdist.messages import printable
from smdist.trials import Trial


def brief(text: str, most: int = 120) -> str:
    """Shorten the error that ended a rank: it may be a page long."""
    line = text.strip().partition("\n")[0]
    return printable(line if len(line) <= most else f"{line[:most]} ...")


def print_ranks(trial: Trial) -> None:
    for rank, report in trial.ranks().items():
        reason = f" ({brief(report.reason)})" if report.reason else ""
        print(f"  worker_{rank}: {report.status}, last step {report.step}{reason}")


def print_missing(trial: Trial, most: int = 5) -> None:
    complete = set(trial.steps())
    partial = [s for s in trial.steps(show_incomplete_steps=True) if s not in complete]
    for step in partial[:most]:
        missing = [f"worker_{r}: {why}" for r, why in trial.missing(step).items()]
        more = f" and {len(missing) - most} more" if len(missing) > most else ""
        print(f"  step {step} is partial: {', '.join(missing[:most])}{more}")
    if len(partial) > most:
        print(f"  ... and {len(partial) - most} more partial steps")


def print_step(trial: Trial, step: int) -> None:
    """For each gradient of a step, the rank that is farthest from the others."""
    for name in trial.tensor_names(step=step, collection="gradients"):
        norms = trial.tensor(name).across_ranks(step, "l2")
        middle = median(norms.values())
        worker = max(norms, key=lambda w: abs(norms[w] - middle))
        print(f"  {printable(name)}: median {middle:.4g}, farthest {norms[worker]:.4g} on {worker}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--live", action="store_true", help="go on until the job has ended")
    args = parser.parse_args()

    with create_trial(args.path, wait_s=60.0 if args.live else 0.0) as trial:
        print(trial.describe())
        if args.live:
            step = trial.next_saved_step(0)
            while step is not None:
                print(f"step {step}")
                print_step(trial, step)
                step = trial.next_saved_step(step + 1)
        print_ranks(trial)
        print_missing(trial)
        if trial.steps():
            last = trial.steps()[-1]
            print(f"step {last}, the last that is complete")
            print_step(trial, last)
        for worker, messages in trial.troubles().items():
            for message in messages:
                print(f"  trouble on {worker}: {printable(message)}")


if __name__ == "__main__":
    try:
        main()
    except SmdistError as error:
        sys.exit(printable(f"{type(error).__name__}: {error}"))
