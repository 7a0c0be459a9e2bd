"""What the demo asks the stored run, and how it shows the answer."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from smdist import modes
from smdist.identity import worker_name
from smdist.messages import printable
from smdist.rules import Verdict, check
from smdist.trials import Trial

HERE = Path(__file__).resolve().parent

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


def find_outlier(trial: Trial, norms: Norms) -> Finding | None:
    """Return the rank and step that the rules blame first, and the gradient that shows it most.

    These are the rules of `smdist check`. Of two ranks, which the rules cannot tell apart, the larger.
    """
    blamed = [
        (found.first_step, -(found.value or 0.0), found.ranks[0])
        for found in check(trial)
        if found.verdict is Verdict.FIRES and found.first_step is not None and found.ranks
    ]
    if not blamed:
        return None
    step, _, rank = min(blamed)
    worker = worker_name(rank)
    here = {name: by_step[step] for name, by_step in norms.items()}
    shown = [
        Finding(step, worker, name, n[worker], others_median(n, worker)) for name, n in here.items()
    ]
    return max(shown, key=lambda one: one.ratio)


# -- the answer ----------------------------------------------------------------------------------


def answer(finding: Finding) -> Text:
    rows = {
        "rank": finding.worker,
        "step": f"{finding.step}, the first",
        "tensor": printable(finding.tensor),
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
    (10.0, "▓", "red1"),
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
    text = Text(f"{'':>{width}} {printable(tensor)}: norm over the median of the other ranks\n")
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
    """Return the losses of rank 0, which jobs usually print, and those of the other rank."""
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
    prefix = f"{os.path.relpath(commands)}/" if HERE.parents[1] in commands.parents else ""
    text = Text(
        f"{where}: {nbytes / 1e6:.1f} MB in {len(segments)} segments of plain safetensors\n"
    )
    text.append("\nAsk it yourself:\n")
    text.append(
        f"  {prefix}smdist check {where}\n"
        f"  {prefix}smdist trial {where}\n"
        f"  {prefix}python examples/read_a_run.py {where}\n"
        f"  {prefix}python -i -c \"from smdist import create_trial; run = create_trial('{where}')\"\n"
        f"  >>> gradient = run.tensor({finding.tensor!r})\n"
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
