"""What scripts written for the ancestor ask a trial."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from smdist.identity import ModeKeys
from smdist.storage import LocalStore
from smdist.trials import LocalTrial, no_refresh
from tests.support.run_builder import RunBuilder, Saved

TRAIN = ModeKeys.TRAIN


def one(value: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array([value], np.float32)


def test_what_the_model_was_given_and_gave(tmp_path: Path) -> None:
    names = ["x_input_0", *(f"batch_{i}" for i in range(11)), "labels_0", "predictions_0"]
    given = {
        name: Saved(one(place), collections=("inputs",) if "batch" in name else ("default",))
        for place, name in enumerate(names)
    }
    rank = RunBuilder(LocalStore(tmp_path)).rank(0)
    rank.step(ModeKeys.EVAL, 0, {"other": one(0)}, step=0)
    rank.step(TRAIN, 0, given, step=1).end()
    trial = LocalTrial(name="job", dirname=tmp_path, range_steps=(0, 2), check=False)
    assert (trial.name, trial.path) == ("job", str(tmp_path))
    assert [int(v[0]) for v in trial.inputs(step=0, mode=TRAIN)] == list(range(1, 12))
    assert [int(v[0]) for v in trial.labels(1)] == [12]
    assert [int(v[0]) for v in trial.predictions(1)] == [13]
    assert trial.predictions(0) == []


def test_a_trial_is_refreshed_under_older_names(tmp_path: Path) -> None:
    rank = RunBuilder(LocalStore(tmp_path)).rank(0)
    rank.step(TRAIN, 0, {"x": one(0)}).flush()
    trial = LocalTrial("job", tmp_path)
    rank.step(TRAIN, 1, {"x": one(1)}).flush()
    with no_refresh(trial):
        trial.maybe_refresh()
        assert trial.steps() == [0]
    trial.maybe_refresh("x")
    assert trial.steps() == [0, 1]
    rank.step(TRAIN, 2, {"x": one(2)}).flush()
    trial.refresh_data()
    assert trial.steps() == [0, 1, 2]


def test_plain_aliases_of_troubles_and_thinned(tmp_path: Path) -> None:
    RunBuilder(LocalStore(tmp_path)).rank(0).trouble("disk full").end()
    trial = LocalTrial("run", tmp_path)
    assert trial.warnings() == trial.troubles() == {"worker_0": ["disk full"]}
    assert trial.sampling_changes() == trial.thinned() == []
