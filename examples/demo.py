"""`make demo`: capture every rank of a small distributed job, then ask the run which rank went wrong.

A rank and a step are drawn by lot and told to the job alone. What is printed as the answer comes
from the stored run; at the end it is held against the lot, and the exit code is 1 if they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from smdist import create_trial, modes
from smdist.errors import NoSuchRun
from smdist.trials import Trial

HERE = Path(__file__).resolve().parent
MARK = ".smdist-demo"
OUTLIER = 10.0  # so many times the median of the other ranks
GIVE_UP_S = 180.0

Norms = Mapping[str, Mapping[int, Mapping[str, float]]]  # tensor -> step -> worker -> norm


class Finding(NamedTuple):
    step: int
    worker: str
    tensor: str
    norm: float
    others: float  # median of the other ranks

    @property
    def ratio(self) -> float:
        return ratio(self.norm, self.others)


# -- the job -------------------------------------------------------------------------------------


def fresh_folder(out: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    if out.exists() and any(out.iterdir()):
        if not (out / MARK).exists():
            sys.exit(f"{out} exists and no demo made it: remove it, or choose another with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: no worse than without
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The job, and the end of all its processes when the block is left, by whatever way."""
    set_child_subreaper, set_parent_death_signal = 36, 1
    # Uploaders are meant to outlive their ranks: adopt them, to see them end.
    _prctl(set_child_subreaper, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        job = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours alone, and passed on in order
            # No thread of ours runs yet.
            preexec_fn=lambda: _prctl(set_parent_death_signal, signal.SIGTERM),  # noqa: PLW1509
        )
    try:
        yield job
    finally:
        end_all(job)


def end_all(job: subprocess.Popen[bytes]) -> None:
    """Torchrun ends its ranks, and each rank's uploader ends once it has stored what is left."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C must not cut this short
        signal.signal(number, signal.SIG_IGN)
    if job.poll() is None:
        job.terminate()
    for signal_number, patience_s in ((None, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if signal_number is not None:
            for pid in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            job.poll()
            for pid in children():
                if pid != job.pid:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            if not children():
                return
            time.sleep(0.05)


def children() -> list[int]:
    """Processes of ours that have not ended, adopted ones too."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in lists for pid in path.read_text().split()]


# -- live ----------------------------------------------------------------------------------------


def watch(
    console: Console, job: subprocess.Popen[bytes], run: Path, ranks: int, steps: int
) -> None:
    """Show how far each rank has come, from the store, until the job has ended."""
    deadline = time.monotonic() + GIVE_UP_S
    trial: Trial | None = None
    told = ""
    with Live(console=console, transient=True, refresh_per_second=8) as live:
        while job.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job did not end within {GIVE_UP_S:.0f} s")
            if trial is None:
                with contextlib.suppress(NoSuchRun):
                    trial = create_trial(run)
            else:
                trial.refresh()
            if console.is_terminal:
                live.update(progress(trial, ranks, steps))
            elif (line := progress_line(trial)) and line != told:
                told = line
                console.print(f"      {line}")
            time.sleep(0.25 if console.is_terminal else 1.5)
    if trial is not None:
        trial.close()


def progress(trial: Trial | None, ranks: int, steps: int) -> Group:
    table = Table.grid(padding=(0, 2))
    reports = trial.ranks() if trial is not None else {}
    for rank in range(ranks):
        report = reports.get(rank)
        done = report.step + 1 if report is not None else 0
        state = str(report.status) if report is not None else "starting"
        bar = ProgressBar(total=steps, completed=done, width=steps)
        table.add_row(f"      worker_{rank}", bar, f"{done:3d}/{steps} steps stored", state)
    complete = trial.last_complete_step if trial is not None else -1
    until = f"steps 0 to {complete} are complete on all ranks" if complete >= 0 else "no step yet"
    return Group(table, Text(f"      {until}", style="dim"))


def progress_line(trial: Trial | None) -> str:
    if trial is None or trial.last_complete_step < 0:
        return ""
    each = ", ".join(f"worker_{rank} {report.step}" for rank, report in trial.ranks().items())
    return f"complete up to step {trial.last_complete_step} (last step stored: {each})"


# -- the question --------------------------------------------------------------------------------


def gradient_norms(trial: Trial) -> Norms:
    names = trial.tensor_names(collection="gradients")
    return {
        name: {
            step: {
                w: float(n)
                for w, n in trial.tensor(name).across_ranks(step, "l2", modes.TRAIN).items()
            }
            for step in trial.steps(modes.TRAIN)
        }
        for name in names
    }


def ratio(norm: float, others: float) -> float:
    if not math.isfinite(norm):
        return math.inf if math.isfinite(others) else 1.0
    return norm / max(others, 1e-30)


def others_median(norms: Mapping[str, float], worker: str) -> float:
    return median(norm for other, norm in norms.items() if other != worker)


def find_outlier(norms: Norms) -> Finding | None:
    """The first step at which all gradients of a rank together are far above the other ranks'.

    Of its tensors, the one that shows it most.
    """
    for step in next(iter(norms.values()), {}):
        here = {name: by_step[step] for name, by_step in norms.items()}
        total = {w: math.hypot(*(n[w] for n in here.values())) for w in next(iter(here.values()))}
        worker = max(total, key=lambda w: ratio(total[w], others_median(total, w)))
        if ratio(total[worker], others_median(total, worker)) >= OUTLIER:
            found = [
                Finding(step, worker, name, n[worker], others_median(n, worker))
                for name, n in here.items()
            ]
            return max(found, key=lambda one: one.ratio)
    return None


# -- the answer ----------------------------------------------------------------------------------


def answer(finding: Finding) -> Text:
    rows = {
        "rank": finding.worker,
        "step": f"{finding.step}, the first",
        "tensor": finding.tensor,
        "norm": f"{finding.norm:.4g}, {finding.ratio:.0f} times the median of the other ranks",
    }
    text = Text()
    for key, value in rows.items():
        text.append(f"{key:>8} ", style="dim").append(f"{value}\n", style="bold")
    return text


SHADES = (  # from so many times the median on: a glyph that needs no colour, and a colour
    (0.0, "·", "grey50"),
    (2.0, "░", "yellow3"),
    (4.0, "▒", "dark_orange"),
    (OUTLIER, "▓", "red1"),
    (100.0, "█", "red3"),
)


def shade(value: float) -> tuple[str, str]:
    if math.isnan(value):
        return " ", "default"
    return next((glyph, style) for least, glyph, style in reversed(SHADES) if value >= least)


def picture(norms: Norms, tensor: str) -> Text:
    """Ranks down, steps across: each rank's gradient norm over the median of the other ranks."""
    by_step = norms[tensor]
    workers = list(next(iter(by_step.values())))
    width = max(map(len, workers))
    text = Text(f"{'':>{width}} {tensor}: norm over the median of the other ranks\n")
    for worker in workers:
        text.append(f"{worker:>{width}} ", style="dim")
        for by_worker in by_step.values():
            here = by_worker.get(worker)
            value = math.nan if here is None else ratio(here, others_median(by_worker, worker))
            text.append(*shade(value))
        text.append("\n")
    axis = "".join(f"{step:<10d}" for step in list(by_step)[::10])
    text.append(f"{'step':>{width}} {axis.rstrip()}\n", style="dim")
    text.append(f"{'':>{width}}")
    for least, glyph, style in SHADES:
        text.append(f" {glyph} ", style=style)
        text.append("under 2x" if not least else f"{least:.0f}x", style="dim")
    return text


def losses(trial: Trial, finding: Finding) -> Text:
    """What rank 0 saw, whose loss is the one that jobs usually print, and what the other one saw."""
    (name,) = trial.tensor_names(collection="losses")
    numbers = [finding.step + offset for offset in (-2, -1, 0, 1, 2)]
    text = Text("loss at step ", style="dim")
    text.append("".join(f"{number:>9d}" for number in numbers))
    for worker in ("worker_0", finding.worker):
        loss = trial.tensor(name)
        values = [loss.value(number, modes.TRAIN, worker).item() for number in numbers]
        text.append(f"\n{worker:<13}", style="dim")
        text.append("".join(f"{value:9.2f}" for value in values))
    return text


def whereabouts(run: Path, finding: Finding) -> Text:
    segments = list(run.glob("segments/*/*.safetensors"))
    nbytes = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    where, commands = os.path.relpath(run), Path(sys.executable).parent
    # As typed here: without activating the environment of `make`.
    prefix = f"{os.path.relpath(commands)}/" if HERE.parent in commands.parents else ""
    text = Text(
        f"{where}: {nbytes / 1e6:.1f} MB in {len(segments)} segments of plain safetensors\n"
    )
    text.append("\nAsk it yourself:\n")
    text.append(
        f"  {prefix}smdist trial {where}\n"
        f"  {prefix}python examples/read_a_run.py {where}\n"
        f"  {prefix}python -i -c \"from smdist import create_trial; run = create_trial('{where}')\"\n"
        f"  >>> gradient = run.tensor('{finding.tensor}')\n"
        f"  >>> gradient.across_ranks({finding.step}, 'l2')\n"
        f"  >>> gradient.value({finding.step}, worker='{finding.worker}')\n",
        style="bold",
    )
    text.append("\nA job to copy is examples/ddp.py; the README says more.")
    return text


def draw(shown: RenderableType, file: Path) -> None:
    page = Console(record=True, width=80, file=io.StringIO())
    page.print(shown)
    svg = page.export_svg(title="make demo")
    # Without the font that it would fetch from elsewhere: any monospaced one does.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")
    file.write_text(svg, encoding="utf-8")


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
    run, log = args.out / "run", args.out / "job.log"
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.ranks), str(HERE / "demo_job.py")]
    command += ["--out-dir", str(run), "--steps", str(args.steps), "--pause", "0.1"]
    command += ["--bad-rank", str(bad_rank), "--bad-step", str(bad_step)]
    console.print(
        f"[1/3] training on {args.ranks} ranks, {args.steps} steps; weights, gradients and losses of "
        "every rank are captured.\n      One rank goes wrong on the way (drawn by lot, seed "
        f"{seed}; not told to the analysis)."
    )
    began = time.monotonic()
    try:
        with running(command, log) as job:
            watch(console, job, run, args.ranks, args.steps)
    except KeyboardInterrupt:
        console.print(f"interrupted; everything has ended, what was captured is in {run}")
        return 130
    if job.returncode:
        console.print(f"the job failed with exit code {job.returncode}; the end of {log}:")
        console.print("\n".join(log.read_text().splitlines()[-20:]), markup=False)
        return 1
    console.print(f"      the job has ended, after {time.monotonic() - began:.0f} s")

    console.print(
        "[2/3] asking the run: at which step is one rank's gradient first unlike the others'?"
    )
    with create_trial(run) as trial:
        norms = gradient_norms(trial)
        finding = find_outlier(norms)
        if finding is None:
            console.print("no rank stands out; the demo failed")
            return 1
        shown = Group(answer(finding), picture(norms, finding.tensor))
        console.print()
        console.print(shown)
        console.print()
        console.print(losses(trial, finding))
    if args.svg is not None:
        draw(shown, args.svg)

    console.print("\n[3/3] where it is\n")
    console.print(whereabouts(run, finding))
    right = (finding.worker, finding.step) == (f"worker_{bad_rank}", bad_step)
    console.print(
        f"\nThe lot had drawn worker_{bad_rank} from step {bad_step} on: "
        f"{'the analysis was right' if right else 'THE ANALYSIS WAS WRONG'}."
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
