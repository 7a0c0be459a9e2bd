"""An elastic job of Horovod loses a rank and goes on with the other: two attempts of one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from smdist import create_trial
from smdist.trials import RankStatus
from tests.horovod.rig import (
    EXAMPLES,
    ended,
    horovodrun,
    job_marks,
    kill_rank,
    started,
    stored_steps,
    until,
)

pytestmark = job_marks


# So many batches that the first ones are stored long before the last one is trained.
@pytest.mark.parametrize(
    ("script", "batches", "gradient"),
    [
        ("horovod_elastic.py", 4000, "gradient/Sequential_2.weight"),
        ("horovod_elastic_keras.py", 4000, "gradients/top/kernelGrad"),
    ],
    ids=["torch", "keras"],
)
def test_a_rank_less(tmp_path: Path, script: str, batches: int, gradient: str) -> None:
    place, hosts = tmp_path / "run", EXAMPLES / "elastic_hosts.sh"
    launcher = ("-np", "2", "--min-np", "1", "--host-discovery-script", str(hosts))
    with started(tmp_path) as job:
        words = ("--out-dir", place, "--batches", str(batches), "--interval", "1")
        horovodrun(job, EXAMPLES / script, *words, launcher=launcher)
        until(lambda: len(stored_steps(str(place))) > 3, "the first steps", 240)
        kill_rank(str(place), 1)
        codes = job.wait()
    said = job.output
    assert codes == [0], said
    assert f"is done after {batches} batches" in said
    until(lambda: ended(str(place)), "the uploaders end the run", 120)
    with create_trial(place) as trial:
        assert trial.loaded_all_steps
        assert [one.world_size for one in trial.attempts()] == [2, 1]
        assert trial.ranks(attempt=0)[1].status is RankStatus.LOST
        assert list(trial.ranks(attempt=1)) == [0]
        # Counting went on; the step in which the rank died may be the survivor's alone.
        assert len(set(range(batches)) - set(trial.steps())) <= 1
        assert trial.steps()[-1] == batches - 1
        assert trial.tensor(gradient).steps() == trial.steps()
