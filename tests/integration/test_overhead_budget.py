"""`overhead_budget`: capture is thinned, on steps that all ranks keep, and the trial says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from smdist import create_trial
from smdist.errors import ConfigurationError
from smdist.exceptions import TensorUnavailableForStep
from smdist.workers.hook import overhead_budget as overhead
from smdist.workers.hook.overhead_budget import Budget, Spent

pytestmark = pytest.mark.torch


class Cheap(Budget):
    """As if each capture cost a hundredth of a step."""

    def keeps(self, position: int, spent: Spent) -> bool:
        told = Spent(self._positions * 1.0 + self._captures * 0.01, self._captures * 0.01, 0.0)
        return super().keeps(position, told)


class Dear(Budget):
    """As if each capture cost three steps."""

    def keeps(self, position: int, spent: Spent) -> bool:
        told = Spent(self._positions * 1.0 + self._captures * 3.0, self._captures * 3.0, 0.0)
        return super().keeps(position, told)


class FarTooDear(Budget):
    """As if each capture cost a thousand steps."""

    def keeps(self, position: int, spent: Spent) -> bool:
        told = Spent(self._positions * 1.0 + self._captures * 1e3, self._captures * 1e3, 0.0)
        return super().keeps(position, told)


def train(out_dir: Path, steps: int, **more: object) -> None:
    model, loss = nn.Linear(8, 8), nn.MSELoss()
    settings = {"save_config": smd.SaveConfig(save_interval=2), **more}
    hook = smd.Hook(out_dir, include_collections=["weights", "gradients"], **settings)  # type: ignore[arg-type]
    hook.register_module(model)
    hook.register_loss(loss)
    for _ in range(steps):
        loss(model(torch.ones(4, 8)), torch.zeros(4, 8)).backward()
    hook.close()


def test_what_does_not_fit_is_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "Budget", Dear)
    train(tmp_path / "run", 400, overhead_budget=0.5)
    with create_trial(tmp_path / "run") as trial:
        (told,) = trial.thinned()
        assert (told.worker, told.attempt, told.budget) == ("worker_0", 0, 0.5)
        (change,) = told.changes
        assert (change.mode, change.stride, change.reduced) == ("GLOBAL", 8, False)
        steps = trial.steps()
        # Every 2 steps are due; one in 4 of them at first, then one in 8.
        assert steps[:3] == [0, 8, 16]
        assert [step for step in steps if step >= change.step] == list(
            range(change.step + -change.step % 16, 400, 16)
        )
        assert trial.troubles() == {}
        assert not trial.missing(steps[-1])


def test_what_is_far_too_dear_becomes_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "Budget", FarTooDear)
    train(tmp_path / "run", 600, overhead_budget=0.5)
    with create_trial(tmp_path / "run") as trial:
        (told,) = trial.thinned()
        first = told.changes[0]
        assert (first.stride, first.reduced) == (64, True)
        gradient = trial.tensor("gradient/Linear_weight")
        late = trial.steps()[-1]
        assert late >= first.step
        assert gradient.reduction_value(0, "l2") == pytest.approx(
            float(torch.tensor(gradient.value(0)).norm()), rel=1e-6
        )
        assert gradient.reduction_value(late, "l2") is not None
        with pytest.raises(TensorUnavailableForStep):
            gradient.value(late)
        (loss,) = trial.tensor_names(collection="losses")
        assert trial.tensor(loss).value(late).shape == ()


def test_what_fits_is_all_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "Budget", Cheap)
    train(tmp_path / "run", 100, overhead_budget=0.5)
    with create_trial(tmp_path / "run") as trial:
        assert trial.steps()[0] == 0
        assert len(trial.steps()) > 12, "one in four at the start, more later"


def test_without_a_budget_nothing_is_thinned(tmp_path: Path) -> None:
    train(tmp_path / "run", 20)
    with create_trial(tmp_path / "run") as trial:
        assert trial.thinned() == []
        assert trial.steps() == list(range(0, 20, 2))


@pytest.mark.parametrize("budget", [0, 1.0, -0.1, "much", 3])
def test_a_budget_is_a_share(tmp_path: Path, budget: object) -> None:
    with pytest.raises(ConfigurationError, match="overhead_budget"):
        train(tmp_path / "run", 1, overhead_budget=budget)
