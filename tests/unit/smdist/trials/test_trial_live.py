"""Trials of jobs that run, die, restart: snapshots, waiting, who is missing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from smdist import errors
from smdist.analysis.utils import no_refresh
from smdist.format.manifest import Run
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys
from smdist.storage import LocalStore
from smdist.trials import MissingReason, RankStatus, StepState, Trial, create_trial
from tests.support.run_builder import RankWriter, RunBuilder

TRAIN, EVAL = ModeKeys.TRAIN, ModeKeys.EVAL
X = {"x": np.zeros(2, np.float32)}


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    return RunBuilder(LocalStore(tmp_path))


def ended(trial: Trial) -> bool:
    return trial.loaded_all_steps


def save(writer: RankWriter, *steps: int) -> RankWriter:
    for step in steps:
        writer.step(TRAIN, step, X)
    return writer.flush()


def test_no_run_is_an_error_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(errors.NoSuchRun, match="nowhere"):
        create_trial(tmp_path / "nowhere")
    assert time.monotonic() - began < 20
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(errors.ConfigurationError):
        create_trial()


def test_a_run_can_be_waited_for(tmp_path: Path) -> None:
    timer = threading.Timer(0.3, lambda: RunBuilder(LocalStore(tmp_path)))
    timer.start()
    try:
        trial = create_trial(out_dir=str(tmp_path), wait_s=30)
    finally:
        timer.join()
    assert trial.workers() == []
    assert trial.steps() == []
    assert trial.tensor_names() == []
    assert not ended(trial)
    assert trial.last_complete_step == -1
    assert "no steps yet" in repr(trial)


def test_a_trial_is_a_snapshot_until_it_moves_on(run: RunBuilder, tmp_path: Path) -> None:
    rank = save(run.rank(0), 0)
    trial = create_trial(tmp_path)
    save(rank, 1)
    assert trial.steps() == [0]
    assert trial.tensor("x").steps() == [0]
    assert trial.last_complete_step == 0
    trial.refresh()
    assert trial.steps() == [0, 1]


def test_what_would_not_be_there_yet_is_looked_for_once_more(
    run: RunBuilder, tmp_path: Path
) -> None:
    rank = save(run.rank(0), 0)
    trial = create_trial(tmp_path)
    tensor = trial.tensor("x")
    with pytest.raises(errors.StepNotYetAvailable):
        tensor.value(1)
    save(rank, 1)
    assert tensor.value(1).shape == (2,)
    assert trial.steps() == [0, 1]
    rank.step(TRAIN, 2, {"y": np.zeros(1)}).flush()
    assert trial.has_tensor("y")
    rank.step(EVAL, 0, X, step=3).flush()
    assert trial.steps(EVAL) == [0]


def test_no_refresh_keeps_a_trial_where_it_is(run: RunBuilder, tmp_path: Path) -> None:
    rank = save(run.rank(0), 0)
    trial = create_trial(tmp_path)
    save(rank, 1).end()
    with no_refresh(trial):
        with no_refresh([trial]):
            assert trial.steps() == [0]
        with pytest.raises(errors.StepNotYetAvailable):
            trial.tensor("x").value(1)
        assert not ended(trial)
        assert trial.has_passed_step(1) is StepState.NOT_YET_AVAILABLE
        trial.wait_for_steps([0])
        assert trial.steps() == [0]
    assert trial.dynamic_refresh
    assert ended(trial)
    assert trial.steps() == [0, 1]


def test_no_refresh_ends_when_its_body_raises(run: RunBuilder, tmp_path: Path) -> None:
    save(run.rank(0), 0)
    trial = create_trial(tmp_path)
    with pytest.raises(KeyError), no_refresh(trial):
        raise KeyError
    assert trial.dynamic_refresh


def test_the_loop_of_every_notebook_ends(run: RunBuilder, tmp_path: Path) -> None:
    rank = save(run.rank(0), 0)
    trial = create_trial(tmp_path)
    seen: list[list[int]] = []
    while not ended(trial):
        seen.append(trial.steps())
        save(rank, len(seen))
        if len(seen) == 3:
            rank.end()
    assert seen == [[0], [0, 1], [0, 1, 2]]
    assert trial.steps() == [0, 1, 2, 3]


def test_has_passed_step_of_a_live_job(run: RunBuilder, tmp_path: Path) -> None:
    first, second = save(run.rank(0, 2), 0, 10, 20), save(run.rank(1, 2), 0, 10)
    trial = create_trial(tmp_path)
    state = trial.has_passed_step
    assert state(0) is StepState.AVAILABLE
    assert state(5) is StepState.UNAVAILABLE  # both ranks went past it
    assert state(15) is StepState.NOT_YET_AVAILABLE  # rank 1 may still save it
    assert state(20) is StepState.NOT_YET_AVAILABLE
    assert state(30) is StepState.NOT_YET_AVAILABLE
    assert state(0, EVAL) is StepState.NOT_YET_AVAILABLE
    save(second, 20)
    assert state(20) is StepState.AVAILABLE
    second.end()
    save(first, 30)
    assert state(30) is StepState.AVAILABLE  # rank 1 ended: no more of it can come
    assert trial.steps() == [0, 10, 20]
    assert trial.steps(show_incomplete_steps=True) == [0, 10, 20, 30]
    assert trial.missing(30) == {1: "ended"}
    first.end()
    assert state(40) is StepState.UNAVAILABLE


def test_waiting_follows_the_job(run: RunBuilder, tmp_path: Path) -> None:
    rank = save(run.rank(0), 0)
    trial = create_trial(tmp_path)
    timer = threading.Timer(0.3, lambda: save(rank, 5, 10))
    timer.start()
    try:
        trial.wait_for_steps([0, 5], timeout_s=30)
    finally:
        timer.join()
    assert 5 in trial.steps()
    with pytest.raises(errors.StepUnavailable):
        trial.wait_for_steps([7], timeout_s=30)
    began = time.monotonic()
    with pytest.raises(errors.WaitTimeout, match="step 11") as caught:
        trial.wait_for_steps([11], timeout_s=0.3)
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - began < 25, "it is given 0.3 s, the others 30"
    timer = threading.Timer(0.3, rank.end)
    timer.start()
    try:
        with pytest.raises(errors.NoMoreData) as past:
            trial.wait_for_steps([11], timeout_s=30)
    finally:
        timer.join()
    assert (past.value.step, past.value.last_step) == (11, 10)
    with pytest.raises(errors.StepUnavailable):
        trial.wait_for_steps([7])


def test_one_rank_closing_early_does_not_end_the_job(run: RunBuilder, tmp_path: Path) -> None:
    save(run.rank(0, 2), 0).end()
    other = save(run.rank(1, 2), 0, 1)
    trial = create_trial(tmp_path)
    assert not ended(trial)
    save(other, 2)
    assert trial.tensor("x").value(2, worker=1).shape == (2,)
    other.end()
    assert ended(trial)
    assert trial.missing(0) == {}
    assert trial.missing(2) == {0: "ended"}
    assert trial.ranks()[0].status is RankStatus.ENDED


def test_a_rank_that_never_started_blocks_nothing(run: RunBuilder, tmp_path: Path) -> None:
    save(run.rank(0, 2, now=time.time() - 100), 0).end()
    trial = create_trial(tmp_path)
    assert ended(trial)
    assert trial.workers() == ["worker_0"]
    assert trial.missing(0) == {1: MissingReason.NEVER_STARTED}
    assert trial.steps() == []
    trial.wait_for_steps([0], timeout_s=30)
    with pytest.raises(errors.NoMoreData):
        trial.wait_for_steps([1], timeout_s=30)
    with pytest.raises(errors.InvalidWorker):
        trial.tensor("x").value(0, worker=1)


def test_a_rank_that_has_not_started_yet_is_waited_for(run: RunBuilder, tmp_path: Path) -> None:
    save(run.rank(0, 2), 0)
    trial = create_trial(tmp_path)
    assert trial.has_passed_step(0) is StepState.NOT_YET_AVAILABLE
    save(run.rank(1, 2), 0)
    assert trial.has_passed_step(0) is StepState.AVAILABLE
    assert trial.steps() == [0]


def test_a_killed_rank_is_named_and_what_it_saved_is_readable(
    run: RunBuilder, tmp_path: Path
) -> None:
    survivor, victim = save(run.rank(0, 2), 0, 1, 2), save(run.rank(1, 2), 0)
    victim.step(TRAIN, 1, {"x": np.full(2, 7.0)}, close=False).lose()
    trial = create_trial(tmp_path)
    assert trial.missing(1) == {1: "lost within the step"}
    assert trial.missing(2) == {1: "lost"}
    assert trial.steps() == [0]
    assert trial.tensor("x").value(1, worker=1)[0] == 7
    assert trial.ranks()[1].reason == "SIGKILL"
    assert not ended(trial)
    survivor.end()
    assert ended(trial)


def test_a_silent_rank_counts_as_lost_until_it_speaks(run: RunBuilder, tmp_path: Path) -> None:
    save(run.rank(0, 2), 0)
    silent = save(run.rank(1, 2, now=time.time() - 100))
    trial = create_trial(tmp_path)
    assert trial.missing(0) == {1: "lost"}
    assert trial.has_passed_step(0) is StepState.AVAILABLE
    silent.beat(time.time())
    trial.refresh()
    assert trial.missing(0) == {1: "lagging"}
    assert trial.has_passed_step(0) is StepState.NOT_YET_AVAILABLE
    with pytest.raises(errors.StepNotYetAvailable):
        trial.tensor("x").value(0, worker=1)
    save(silent, 0)
    assert trial.tensor("x").value(0, worker=1).shape == (2,)
    assert trial.missing(0) == {}


def test_drops_and_troubles_are_visible(run: RunBuilder, tmp_path: Path) -> None:
    rank = run.rank(0)
    rank.step(TRAIN, 0, X, close=False).drop(TRAIN, 0, "big").step(TRAIN, 0, {})
    rank.trouble("disk slow").end()
    trial = create_trial(tmp_path)
    assert trial.missing(0) == {0: "dropped"}
    assert trial.steps() == []
    (drop,) = trial.dropped()
    assert (drop.worker, drop.mode, drop.step, drop.names) == ("worker_0", TRAIN, 0, ("big",))
    assert trial.troubles() == {"worker_0": ["disk slow"]}
    assert "dropped: 1 tensors" in trial.describe()


def test_the_newest_attempt_wins_and_older_ones_can_be_asked_for(
    run: RunBuilder, tmp_path: Path
) -> None:
    for rank in range(3):
        writer = run.rank(rank, 3)
        for step in range(4):
            writer.step(TRAIN, step, {"x": np.full(1, step)})
        writer.lose()
    for rank in range(2):
        writer = run.rank(rank, 2, attempt=1)
        for step in range(2, 6):
            writer.step(TRAIN, step, {"x": np.full(1, 10 * step)})
        writer.end()
    trial = create_trial(tmp_path)
    assert trial.steps() == [0, 1, 2, 3, 4, 5]
    values = trial.tensor("x").values()
    assert [int(v[0]) for v in values.values()] == [0, 1, 20, 30, 40, 50]
    assert trial.tensor("x").workers(1) == ["worker_0", "worker_1", "worker_2"]
    assert trial.tensor("x").workers(2) == ["worker_0", "worker_1"]
    assert [(a.number, a.world_size, a.steps) for a in trial.attempts()] == [(0, 3, 4), (1, 2, 4)]
    assert trial.num_workers == 2
    old = create_trial(tmp_path, attempt=0)
    assert old.steps() == [0, 1, 2, 3]
    assert int(old.tensor("x").value(3)[0]) == 3
    assert [a.number for a in old.attempts()] == [0]
    with pytest.raises(errors.TrialError, match="no attempt 7; it has 0, 1"):
        create_trial(tmp_path, attempt=7)


def test_a_run_whose_first_rank_died_at_once_is_not_waited_for(tmp_path: Path) -> None:
    RunBuilder(LocalStore(tmp_path), now=time.time() - 100)
    trial = create_trial(tmp_path)
    assert ended(trial)
    with pytest.raises(errors.NoMoreData):
        trial.wait_for_steps([0], timeout_s=30)


def test_a_late_manifest_of_an_older_attempt_is_not_overlooked(
    run: RunBuilder, tmp_path: Path
) -> None:
    old = save(run.rank(0), 0)
    save(run.rank(0, attempt=1), 5)
    trial = create_trial(tmp_path)
    save(old, 1)
    trial.refresh()
    assert trial.steps() == [0, 1, 5]


def test_ranks_that_number_steps_differently_are_reported(run: RunBuilder, tmp_path: Path) -> None:
    first, second = run.rank(0, 2), run.rank(1, 2)
    first.step(TRAIN, 0, X, step=0).step(TRAIN, 1, X, step=1).end()
    second.step(TRAIN, 0, X, step=0).step(EVAL, 0, X, step=1).step(TRAIN, 1, X, step=2).end()
    trial = create_trial(tmp_path)
    (found,) = trial.disagreements()
    assert (found.mode_step, found.numbers) == (1, {1: (0,), 2: (1,)})
    assert trial.steps(TRAIN) == [0, 1]
    assert trial.global_step(TRAIN, 1) == 1
    assert trial.mode(1) is TRAIN
    assert trial.steps(EVAL, show_incomplete_steps=True) == [0]
    assert trial.missing(0, EVAL) == {0: "ended"}


@pytest.mark.parametrize(
    ("steps", "seen"),
    [((2, 4), [2, 3]), ((None, 2), [0, 1]), ((3, None), [3, 4]), ((None, None), [0, 1, 2, 3, 4])],
)
def test_range_steps_leaves_out_the_rest(
    run: RunBuilder, tmp_path: Path, steps: tuple[int | None, int | None], seen: list[int]
) -> None:
    save(run.rank(0), 0, 1, 2, 3, 4).end()
    trial = create_trial(tmp_path, "name", steps)
    assert trial.steps() == trial.tensor("x").steps() == seen
    assert trial.name == "name"
    assert trial.range_steps == steps


@pytest.mark.parametrize("steps", [(4, 2), (2, 2), (-1, 2), (0.5, 2), (1,), 7])
def test_a_wrong_range_is_refused(tmp_path: Path, steps: object) -> None:
    with pytest.raises(errors.ConfigurationError, match="range_steps"):
        create_trial(tmp_path, range_steps=steps)  # type: ignore[arg-type]


def test_only_the_chosen_worker_is_expected(run: RunBuilder, tmp_path: Path) -> None:
    save(run.rank(0, 4, include_workers="one"), 0).end()
    trial = create_trial(tmp_path)
    assert trial.steps() == [0]
    assert trial.workers() == ["worker_0"]
    assert ended(trial)


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    newer = Run("r", 0.0, "", format=99)
    (tmp_path / "run.json").write_bytes(encode(newer, "run.json"))
    with pytest.raises(errors.TrialError, match="newer"):
        create_trial(tmp_path)


def test_a_description_names_who_is_lost_and_where(run: RunBuilder, tmp_path: Path) -> None:
    long_ago = time.time() - 100
    save(run.rank(0, 40, now=long_ago), 0, 1).end()
    save(run.rank(1, 40, now=long_ago), 0).lose()
    run.rank(2, 40, now=long_ago)
    save(run.rank(4, 40, now=long_ago), 0).lose()
    lines = create_trial(tmp_path).describe().splitlines()
    assert "attempt 0: 40 ranks expected; 1 ended, 3 lost, 36 never started" in lines
    assert "  worker_1 was lost after step 0: SIGKILL" in lines
    assert any(
        line.startswith("  worker_2 was lost before its first step: nothing heard of it for 10")
        for line in lines
    )
    assert "  never started: worker_3, worker_5 to worker_39" in lines


def test_a_description_of_many_lost_ranks_names_the_rest_in_groups(
    run: RunBuilder, tmp_path: Path
) -> None:
    lost = [rank for rank in range(40) if rank not in (0, 20)]
    for rank in range(40):
        writer = save(run.rank(rank, 40), 0)
        writer.lose() if rank in lost else writer.end()
    lines = create_trial(tmp_path).describe().splitlines()
    assert "  worker_16 was lost after step 0: SIGKILL" in lines
    assert lines[-1] == "  and 22 more: worker_17 to worker_19, worker_21 to worker_39"
