"""Training loops that signal handlers interrupt, by chance or at each moment of a hook, and go on."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from smdist.trials import Trial
from tests.support.cuts import Cut, Cuts
from tests.support.sampling import rotating_share
from tests.support.torch_jobs import EVERY_STEP

# The standard library's own files, if an exception comes before it closes them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

WIDTHS = [3, 400]
HOME = str(Path(smd.__file__).parent)


class Scaled(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(width) for width in WIDTHS])

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        products = [(w * x).sum() for w, x in zip(self.weights, inputs, strict=True)]
        return torch.stack(products).sum()


class Passed(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * 1


WEIGHTS = {f"Scaled_weights.{i}": i for i in range(len(WIDTHS))}
GRADIENTS = {f"gradient/{name}": 10 + i for name, i in WEIGHTS.items()}
INPUTS = {f"Scaled_input_{i}": 10 + i for i in range(len(WIDTHS))}
FORWARD = {*WEIGHTS, *INPUTS, "Scaled_output_0"}
LOSS = {"Passed_input_0", "Passed_output_0"}
ALL = {*FORWARD, *GRADIENTS, *LOSS}
# What a step has if an exception comes before the next call of the script's: backward, or the loss.
PHASES = [FORWARD, FORWARD | {"Passed_input_0"}, FORWARD | LOSS, ALL]


def content(attempt: int, which: int) -> torch.Tensor:
    """What no other attempt at a step has there; whole numbers that float32 can hold."""
    return torch.arange(WIDTHS[which % 10], dtype=torch.float32) + 64 * attempt + which


class Loop:
    """Attempts at steps, each with values of its own."""

    def __init__(self, hook: smd.Hook) -> None:
        self.hook, self.model, self.loss = hook, Scaled(), Passed()
        hook.register_module(self.model)
        hook.register_loss(self.loss)
        self.attempts = 0
        self.done: dict[int, int] = {}  # steps that nothing interrupted, and which attempt that was

    def step(self) -> None:
        self.attempts += 1
        for i, weight in enumerate(self.model.weights):
            weight.data.copy_(content(self.attempts, i))
        self.model.zero_grad()
        inputs = [content(self.attempts, 10 + i) for i in range(len(WIDTHS))]
        self.loss(self.model(*inputs)).backward()
        self.done[self.hook.global_step] = self.attempts

    def counted(self) -> int:
        return self.hook.global_step


def hook_in(folder: Path, **settings: Any) -> smd.Hook:
    return smd.Hook(
        folder / "run",
        spool_dir=folder / "spools",
        buffer_bytes=4 << 20,
        save_config=EVERY_STEP,
        include_collections=["weights", "gradients", "losses", "all"],
        include_regex=[".*"],
        close_timeout_s=120.0,
        **settings,
    )


def judge(trial: Trial, loop: Loop) -> Counter[str]:
    """Every value is that of one attempt, and a step that lost some does not look complete."""
    attempts: dict[int, set[int]] = {}
    names: dict[int, set[str]] = {}
    for name in trial.tensor_names():
        which = {**WEIGHTS, **INPUTS, **GRADIENTS}.get(name)
        tensor = trial.tensor(name)
        for step in tensor.steps(show_incomplete_steps=True):
            value = tensor.value(step)
            names.setdefault(step, set()).add(name)
            if which is not None:
                attempt, rest = divmod(int(value[0]) - which, 64)
                assert rest == 0
                np.testing.assert_array_equal(value, content(attempt, which).numpy())
                attempts.setdefault(step, set()).add(attempt)
    order = [attempts[step] for step in sorted(attempts)]
    assert all(len(some) == 1 for some in order), "values of two steps in one"
    assert order == sorted(order, key=min)
    outcome: Counter[str] = Counter()
    for step in range(loop.counted() + 1):
        whole = step in names and not trial.missing(step)
        if step in loop.done:
            assert whole, (step, trial.missing(step), trial.dropped())
            assert names[step] == ALL
            assert attempts[step] == {loop.done[step]}
        elif whole:
            assert names[step] in PHASES, (step, names[step])
        outcome["whole" if whole else "partial"] += 1
    return outcome


PARTS = 4


@pytest.mark.parametrize("part", rotating_share(range(PARTS), PARTS))
def test_a_step_of_a_model_cut_off_at_each_moment_of_the_hook(tmp_path: Path, part: int) -> None:
    hook = hook_in(tmp_path)
    loop = Loop(hook)
    loop.step()
    with Cuts() as cuts:
        loop.step()
    count = cuts.seen
    assert count > 300
    for at in range(part, count + PARTS, PARTS):
        before = loop.counted()
        with Cuts(at) as cuts, suppress(Cut):
            loop.step()
        assert loop.counted() - before in (0, 1), cuts.where
        if at % 3 == 0:
            loop.step()
    loop.step()
    hook.close()
    outcome = judge(smd.create_trial(str(tmp_path / "run")), loop)
    assert outcome["partial"] > 50


@contextmanager
def interrupting(error: type[BaseException]) -> Iterator[list[bool]]:
    """A real handler, which raises in code of ours while the list holds something."""
    armed: list[bool] = []

    def handler(number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(HOME):
            frame = frame.f_back
        if armed and frame is None:
            signal.setitimer(signal.ITIMER_REAL, 2e-5)
        elif armed:
            armed.clear()
            raise error("interrupted")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield armed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, Cut])
def test_a_loop_that_is_interrupted_by_chance(tmp_path: Path, error: type[BaseException]) -> None:
    """From the first step on, with a buffer that is soon full."""
    chance = random.Random(error.__name__)
    hook = hook_in(tmp_path)
    loop, interrupted = Loop(hook), 0
    with interrupting(error) as armed:
        while interrupted < 600:
            signal.setitimer(
                signal.ITIMER_REAL, chance.choice((3e-4, 2e-3, 6e-3)) * chance.random()
            )
            armed.append(True)
            try:
                loop.step()
                armed.clear()
            except error:
                interrupted += 1
    for _ in range(3):
        loop.step()
    assert hook.usage() is not None
    hook.close()
    trial = smd.create_trial(str(tmp_path / "run"))
    outcome = judge(trial, loop)
    assert outcome["whole"] >= 3
    last = loop.counted()
    assert not any(trial.missing(step) for step in range(last - 2, last + 1))


def test_the_first_step_cut_off_at_each_moment_until_it_comes_through(tmp_path: Path) -> None:
    hook = hook_in(tmp_path)
    loop, at = Loop(hook), 0
    while hook.usage() is None:
        with Cuts(at) as cuts, suppress(Cut):
            loop.step()
        at += 1
        if hook.usage() is None:
            assert list((tmp_path / "spools").rglob("spool.json")) == [], cuts.where
            assert list((tmp_path / "spools").rglob("journal*")) == [], cuts.where
    for _ in range(3):
        loop.step()
    assert at > 300
    hook.close()
    trial = smd.create_trial(str(tmp_path / "run"))
    judge(trial, loop)
    assert [info.number for info in trial.attempts()] == [0]


@pytest.mark.parametrize("seed", rotating_share(range(6), 3))
def test_a_close_that_is_interrupted_is_made_good_by_another(tmp_path: Path, seed: int) -> None:
    hook = hook_in(tmp_path)
    loop = Loop(hook)
    for _ in range(3):
        loop.step()
    at = random.Random(seed).randrange(20, 300)
    with Cuts(at) as cuts, suppress(Cut):
        hook.close()
    hook.close()
    deadline = time.monotonic() + 60
    ended = False
    while not ended and time.monotonic() < deadline:
        trial = smd.create_trial(str(tmp_path / "run"), wait_s=60.0)
        ended = trial.ranks()[0].status == "ended"
    assert ended, cuts.where
    assert judge(trial, loop) == {"whole": 3}
