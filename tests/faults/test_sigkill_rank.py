"""SIGKILL a rank at any moment: what was captured is in the run, and the run says what is missing.

`SMDIST_TEST_SEED` repeats a run's choices. How far a process comes until it is killed differs.
"""

from __future__ import annotations

import shutil
import signal
import time
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from smdist.coordination.view.membership import MissingReason, RankStatus
from smdist.identity import modes
from smdist.trials import Trial, create_trial
from smdist.workers.upload.recover import recover
from tests.faults.audit import Saved, assert_in_run, audit, unexplained
from tests.faults.launcher import Launcher, Started, ended, spools
from tests.faults.places import Place, at
from tests.support.sampling import generator, rotating_share

pytestmark = pytest.mark.ranks

TRAIN = modes.TRAIN
SURVIVORS = 2
STEPS = 9


class Moment(NamedTuple):
    """`delay_s` after the rank began step `step`; -1: after its process began."""

    step: int
    delay_s: float


def kill_at(victims: list[tuple[Started, Moment]]) -> None:
    """Every victim at its moment; waits until all are gone."""
    began = time.monotonic()
    due = {started.pid: began + moment.delay_s for started, moment in victims if moment.step < 0}
    left = dict(enumerate(victims))
    while left:
        assert time.monotonic() < began + 120, f"not killed: {left}"
        now = time.monotonic()
        for index, (started, moment) in tuple(left.items()):
            if started.pid not in due and f"step {moment.step}" in started.marks():
                due[started.pid] = now + moment.delay_s
            if now >= due.get(started.pid, now + 1) or started.code is not None:
                started.kill()
                del left[index]
    for started, _ in victims:
        assert started.wait() == -signal.SIGKILL, f"ended by itself: {started!r}"


# Upload options and buffers that make the uploader late, quick, and in the way.
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "lagging": {"linger_s": 30.0},
    "hasty": {"linger_s": 0.001, "segment_bytes": 1 << 20},
    "blocked": {"buffer_bytes": 3 << 20},
    "disk": {"linger_s": 0.1, "buffer_bytes": 16 << 20},
}


# Where, how, and how many are killed: 68 in all. An uploader to a bucket loads an SDK first, so fewer
# of these are started at once.
ALL_CASES: list[tuple[str, str, int]] = [
    *(("directory", kind, 9) for kind in KINDS),
    ("rclone", "default", 5),
    ("rclone", "hasty", 5),
    ("rclone", "blocked", 5),
    ("moto", "lagging", 4),
    ("moto", "disk", 4),
]
CASES = rotating_share(ALL_CASES, 3, kind=itemgetter(0))


@pytest.mark.parametrize(("place", "kind", "victims"), at(*CASES), indirect=["place"])
def test_killed_ranks(
    launcher: Launcher, place: Place, tmp_path: Path, kind: str, victims: int
) -> None:
    chance = generator(kind, place.name)
    moments = [Moment(-1, chance.uniform(0.0, 0.2)) for _ in range(2)]
    moments += [
        Moment(chance.randrange(STEPS - 1), chance.uniform(0.0, 0.03))
        for _ in range(victims - len(moments))
    ]
    root = tmp_path / "spools"
    hook = {"out_dir": place.out_dir, "spool_dir": str(root), **KINDS[kind]}
    world = SURVIVORS + victims
    ranks = [
        launcher.start(
            tmp_path / f"rank-{rank}",
            environ=place.environ,
            rank=rank,
            world=world,
            width=384 if rank < SURVIVORS else chance.choice((8, 256, 512)),
            steps=STEPS if rank < SURVIVORS else 200,
            seed=chance.randrange(1 << 30),
            hook=hook,
        )
        for rank in range(world)
    ]
    print(f"run in {tmp_path}, killed: {dict(enumerate(moments, SURVIVORS))}")  # noqa: T201
    kill_at(list(zip(ranks[SURVIVORS:], moments, strict=True)))
    for started in ranks[:SURVIVORS]:
        assert started.wait() == 0, repr(started)
    settle(root, ranks)
    found = audit(place.objects())
    with create_trial(place.out_dir, lost_after_s=0.0) as trial:
        assert trial.loaded_all_steps
        for rank, started in enumerate(ranks):
            assert_in_run(trial, started, rank, started.evidence())
            if rank < SURVIVORS:
                assert_whole(trial, found, rank, started)
            else:
                assert_marked(trial, found, rank, started)
    shutil.rmtree(tmp_path)


def settle(root: Path, ranks: list[Started]) -> None:
    """Wait for the uploaders. A rank killed before it had one has captured nothing."""
    ended(root)
    for spool in spools(root):
        (owner,) = [started for started in ranks if f"-{started.pid}-" in spool.name]
        assert not owner.evidence(), f"{spool} was left behind; {owner!r}"
        assert recover(spool, pytest.fail).state == "lost"


def assert_whole(trial: Trial, found: dict[Saved, int], rank: int, started: Started) -> None:
    assert trial.ranks()[rank].status is RankStatus.ENDED
    assert not unexplained(found, rank, started.evidence())
    assert len({one.step for one in started.evidence()}) == STEPS
    for step in trial.steps(TRAIN, show_incomplete_steps=True):
        missing = trial.missing(step, TRAIN)
        assert (rank in missing) is (step >= STEPS), f"{missing}; {started!r}"


def assert_marked(trial: Trial, found: dict[Saved, int], rank: int, started: Started) -> None:
    evidence = started.evidence()
    assert (evidence != []) <= (rank in trial.ranks())
    enrolled = f"worker_{rank}" in trial.workers()
    reached = max((one.step for one in evidence), default=-1)
    beyond = unexplained(found, rank, evidence)
    # One capture may have returned and not been written down: all weights at most.
    assert len({one.mode_step for one in beyond}) <= 1
    assert len(beyond) <= 6, beyond
    assert all(one.mode_step in (reached, reached + 1) for one in beyond), beyond
    status = RankStatus.LOST if enrolled else RankStatus.NEVER_STARTED
    assert trial.ranks()[rank].status is status
    for step in trial.steps(TRAIN, show_incomplete_steps=True):
        reason = trial.missing(step, TRAIN).get(rank)
        if step < reached:
            assert reason is None, f"step {step}; {started!r}"
        elif any(one.rank == rank and one.mode_step == step for one in found):
            assert reason in (None, MissingReason.LOST_WITHIN), f"step {step}; {started!r}"
        else:
            lost = MissingReason.LOST if enrolled else MissingReason.NEVER_STARTED
            assert reason is lost, f"step {step}; {started!r}"


# -- ranks that wait for each other ----------------------------------------------------------------

DDP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
arguments = order.arguments
dist.init_process_group(
    "gloo", init_method="file://" + arguments["meet"], rank=arguments["rank"], world_size=2
)
train(order, wrap=DistributedDataParallel)
"""


def test_killed_rank_of_a_process_group(launcher: Launcher, tmp_path: Path) -> None:
    chance = generator("ddp")
    moments = [Moment(chance.randrange(5), chance.uniform(0.0, 0.03)) for _ in range(4)]
    print(f"runs in {tmp_path}, rank 1 killed: {moments}")  # noqa: T201
    pairs = [
        [
            launcher.start(
                tmp_path / f"job-{job}" / f"rank-{rank}",
                DDP,
                rank=rank,
                world=2,
                width=256,
                steps=200,
                meet=str(tmp_path / f"meet-{job}"),
                hook={
                    "out_dir": str(tmp_path / f"job-{job}" / "out"),
                    "spool_dir": str(tmp_path / "spools"),
                    "stage_gradients": "local",
                },
            )
            for rank in range(2)
        ]
        for job in range(len(moments))
    ]
    kill_at([(pair[1], moment) for pair, moment in zip(pairs, moments, strict=True)])
    for left, _ in pairs:
        assert left.wait() == 1, repr(left)  # what gloo raises when its peer is gone
    settle(tmp_path / "spools", [started for pair in pairs for started in pair])
    for job, pair in enumerate(pairs):
        out_dir = tmp_path / f"job-{job}" / "out"
        found = audit(out_dir)
        with create_trial(out_dir, lost_after_s=0.0) as trial:
            assert trial.loaded_all_steps
            for rank, started in enumerate(pair):
                assert_in_run(trial, started, rank, started.evidence())
            assert_marked(trial, found, 1, pair[1])
            report = trial.ranks()[0]
            assert report.status is RankStatus.ENDED
            assert "Error" in report.reason
    shutil.rmtree(tmp_path)
