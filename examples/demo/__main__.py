"""`make demo`: the whole way of a tensor, and the question it is captured for.

Starts an S3 server and a Ray of its own, trains a small job on several ranks that all capture to S3,
shows live what the coordinator has merged, then asks the trial which rank went wrong. A rank and a
step are drawn by lot and told to the job alone. What is printed as the answer comes from the stored
run; at the end it is held against the lot, and the exit code is 1 if they differ.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from examples.demo.answer import (
    Finding,
    answer,
    draw,
    find_outlier,
    gradient_norms,
    losses,
    picture,
    whereabouts,
)
from examples.demo.processes import BUCKET, coordinator, job, s3_server
from smdist import create_trial
from smdist.coordinator import CoordinatorClient, RunStatus
from smdist.errors import NoSuchRun
from smdist.messages import printable

HERE = Path(__file__).resolve().parent
MARK = ".smdist-demo"
GIVE_UP_S = 180.0


def fresh_folder(out: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    if out.exists() and any(out.iterdir()):
        if not (out / MARK).exists():
            sys.exit(f"{out} exists and no demo made it: remove it, or choose another with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


# -- live ----------------------------------------------------------------------------------------


def watch(
    console: Console,
    running: subprocess.Popen[bytes],
    asked: CoordinatorClient,
    ranks: int,
    steps: int,
) -> RunStatus | None:
    """Show what the coordinator has merged, until the job has ended; the last it said."""
    deadline = time.monotonic() + GIVE_UP_S
    status: RunStatus | None = None
    told = ""
    with Live(console=console, transient=True, refresh_per_second=8) as live:
        while running.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job did not end within {GIVE_UP_S:.0f} s")
            with suppress(NoSuchRun):
                status = asked.status()
            if console.is_terminal:
                live.update(grid(status, ranks, steps))
            elif (line := progress_line(status)) and line != told:
                told = line
                console.print(f"      {line}")
            time.sleep(0.2 if console.is_terminal else 1.5)
    return status


def grid(status: RunStatus | None, ranks: int, steps: int) -> Group:
    """Ranks down, steps across: merged and complete on all ranks, merged, or not there yet."""
    complete = status.latest_complete["GLOBAL"] if status is not None else -1
    lines = {line.rank: line for line in status.ranks} if status is not None else {}
    rows = []
    for rank in range(ranks):
        line = lines.get(rank)
        own = line.step if line is not None else -1
        row = Text(f"      worker_{rank} ", style="dim")
        row.append("█" * (min(own, complete) + 1), style="green")
        row.append("█" * max(0, own - complete), style="yellow")
        row.append("·" * (steps - 1 - max(own, -1)), style="grey50")
        row.append(f" {own + 1:3d}/{steps} {line.status if line is not None else 'starting'}")
        rows.append(row)
    until = f"steps 0 to {complete} are there from every rank" if complete >= 0 else "no step yet"
    number = f"snapshot {status.number}; " if status is not None and status.number else ""
    return Group(*rows, Text(f"      {number}{until}", style="dim"))


def progress_line(status: RunStatus | None) -> str:
    if status is None or status.latest_complete["GLOBAL"] < 0:
        return ""
    each = ", ".join(f"worker_{line.rank} {line.step}" for line in status.ranks)
    return f"complete up to step {status.latest_complete['GLOBAL']} (last step stored: {each})"


# -- all of it -----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--ranks", type=int, default=4, choices=range(2, 65), metavar="N")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, help="draw the same lot again")
    parser.add_argument("--svg", type=Path, help="also draw the answer into this file")
    args = parser.parse_args()

    console = Console(highlight=False, soft_wrap=True)
    seed = random.randrange(10_000) if args.seed is None else args.seed
    lot = random.Random(seed)
    bad_rank = lot.randrange(1, args.ranks)
    bad_step = lot.randrange(args.steps * 2 // 5, args.steps * 7 // 10)
    fresh_folder(args.out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        finding = story(console, args, seed, bad_rank, bad_step)
    except KeyboardInterrupt:
        console.print(
            f"interrupted; everything has ended, what was captured is in {stored(args.out)}"
        )
        return 130
    if finding is None:
        return 1
    console.print("\n[4/4] where it is\n")
    console.print(whereabouts(stored(args.out), finding))
    right = (finding.worker, finding.step) == (f"worker_{bad_rank}", bad_step)
    console.print(
        f"\nThe lot had drawn worker_{bad_rank} from step {bad_step} on: "
        f"{'the analysis was right' if right else 'THE ANALYSIS WAS WRONG'}."
    )
    return 0 if right else 1


def stored(out: Path) -> Path:
    """Return where the run is: the S3 server keeps objects as files, so it can be read without it."""
    return Path(out, "s3", BUCKET, "run")


def story(
    console: Console, args: argparse.Namespace, seed: int, bad_rank: int, bad_step: int
) -> Finding | None:
    log = args.out / "job.log"
    began = time.monotonic()
    console.print("[1/4] starting an S3 server and Ray, both of this demo alone")
    with s3_server(args.out) as endpoint:
        url = f"s3://{BUCKET}/run?endpoint_url={endpoint}"
        with coordinator(url) as asked:
            took = time.monotonic() - began
            where = asked.info()
            console.print(
                f"      after {took:.0f} s: S3 at {endpoint}, the coordinator is process {where.pid} "
                "on Ray"
            )
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            # Without a place of its own, torchrun leaves a folder among the temporary ones.
            command += ["--log-dir", str(args.out / "torchrun")]
            command += ["--nproc-per-node", str(args.ranks), str(HERE / "job.py")]
            command += ["--out-dir", url, "--steps", str(args.steps), "--pause", "0.1"]
            command += ["--bad-rank", str(bad_rank), "--bad-step", str(bad_step)]
            console.print(
                f"[2/4] training on {args.ranks} ranks, {args.steps} steps; weights, gradients and "
                "losses of every rank go to S3.\n      One rank goes wrong on the way (drawn by lot, "
                f"seed {seed}; not told to the analysis)."
            )
            began = time.monotonic()
            with job(command, log) as running:
                watch(console, running, asked, args.ranks, args.steps)
            if running.returncode:
                console.print(f"the job failed with exit code {running.returncode}; {log} ends:")
                lines = log.read_text().splitlines()[-20:]
                console.print("\n".join(map(printable, lines)), markup=False)
                return None
            last = asked.wait_for_step(args.steps - 1)
            console.print(
                f"      the job has ended, after {time.monotonic() - began:.0f} s; "
                f"the coordinator says: step {last.step} is {last.standing}"
            )
            return ask(console, url, args.svg)


def ask(console: Console, url: str, svg: Path | None) -> Finding | None:
    console.print("[3/4] asking the rules of smdist check: which rank went wrong first, and where?")
    with create_trial(url) as trial:
        norms = gradient_norms(trial)
        finding = find_outlier(trial, norms)
        if finding is None:
            console.print("no rank stands out; the demo failed")
            return None
        shown = Group(answer(finding), picture(norms, finding.tensor))
        console.print()
        console.print(shown)
        console.print()
        console.print(losses(trial, finding))
    if svg is not None:
        draw(shown, svg)
    return finding


if __name__ == "__main__":
    sys.exit(main())
