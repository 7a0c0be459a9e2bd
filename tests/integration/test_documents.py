"""The code in the README and in the guide runs, as far as it can run without a bucket."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from smdist.storage import LocalStore
from tests.support.run_builder import RunBuilder, Saved
from tests.support.torch_jobs import Net, read, train

ROOT = Path(__file__).parents[2]
README, GUIDE = ROOT / "README.md", ROOT / "docs/guide.md"
STEPS = (0, 1, 1000)


class Encoder(Net):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)


def blocks(document: Path) -> Iterator[tuple[str, int, str]]:
    """Section, number within it, and text of each block of Python."""
    for section in document.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        found = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        yield from ((title, number, block) for number, block in enumerate(found))


def named(document: Path) -> list[Any]:
    return [
        pytest.param(block, id=f"{title}-{number}")
        for title, number, block in blocks(document)
        if title != "S3"
    ]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the text takes for granted: a model and its optimizer, and a run of four ranks."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples/config.json", "config.json")
    monkeypatch.setenv("SMDEBUG_CONFIG_FILE_PATH", "config.json")
    for path in ("runs/a", "runs/first"):
        builder = RunBuilder(LocalStore(tmp_path / path))
        for rank in range(4):
            writer = builder.rank(rank, world=4)
            for step in STEPS:
                value = np.full((2, 3), 1.0 + 100 * (rank == 2 and step == 1), np.float32)
                gradient = Saved(value, reductions=(), collections=("gradients",))
                writer.step(smd.modes.GLOBAL, step, {"gradient/Net_fc1.weight": gradient})
            writer.end()
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trial = smd.create_trial("runs/a")
    given: dict[str, Any] = {
        "smd": smd,
        "model": model,
        "generator": Net(),
        "discriminator": Net(),
        "loss_function": nn.MSELoss(),
        "loss": torch.tensor(1.0),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "matrix": torch.eye(2),
        "reward": 0.5,
        "measured_at": 1_700_000_000.0,
        "data": [1, 2],
        "hook": smd.Hook("runs/hook"),
        "trial": trial,
        "t": trial.tensor("gradient/Net_fc1.weight"),
        "gradient": trial.tensor("gradient/Net_fc1.weight"),
        "step": 0,
    }
    first = given["hook"]
    yield given
    for value in (first, *given.values()):
        if isinstance(value, smd.Hook):
            value.close()


def run(block: str, names: dict[str, Any]) -> None:
    exec(compile(block, "the document", "exec"), names)  # noqa: S102 (it is ours)


@pytest.mark.parametrize("block", named(GUIDE))
def test_the_guide_runs(block: str, names: dict[str, Any]) -> None:
    if 'smd.Hook("runs/a"' in block or 'out_dir="runs/a"' in block:
        shutil.rmtree("runs/a")  # there the text is about a new run
    run(block, names)


def test_the_readme_captures(names: dict[str, Any]) -> None:
    shutil.rmtree("runs/first")
    ((_, _, block),) = [found for found in blocks(README) if found[0] == "Capture"]
    before, _, after = block.partition("# your training loop, unchanged")
    run(before, names)
    train(names["model"], 101, names["loss_function"])
    run(after, names)
    trial = read(Path("runs/first"))
    assert trial.steps() == [0, 100]
    assert {"gradients", "losses", "weights"} <= set(trial.collections())


@pytest.mark.parametrize("block", [b for title, _, b in blocks(README) if title == "Read"])
def test_the_readme_reads(
    block: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(block, names)
    assert "worker_0" in capsys.readouterr().out or "describe" in block
    shown = names["gradient"].across_ranks(0, "l2")
    assert re.fullmatch(r"\{'worker_0': [\d.]+, .*\}", repr(shown)), "numbers, as the text has them"


def test_the_guide_finds_the_rank_that_went_wrong(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for title, _, block in blocks(GUIDE):
        if title == "Read a run" and "middle" in block:
            run(block, names)
    assert capsys.readouterr().out == "1 worker_2\n"
