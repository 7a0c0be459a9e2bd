"""Real uploaders of a run that ends: the last one merges it, whoever that is, and nobody waits."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from smdist import create_trial
from smdist.coordination.snapshot.head import POINTER_KEY, Pointer
from smdist.format.journal_records import Describe, End
from smdist.format.manifest import CollectionInfo, Collections, collections_key, session_key
from smdist.format.stored_json import encode
from smdist.storage import LocalStore, open_store
from smdist.storage import loop_thread as sync
from smdist.trials import Trial
from smdist.workers.spool.spool import Spool, UploadOptions
from smdist.workers.upload.process import Supervisor
from smdist.workers.upload.recover import recover
from tests.servers.s3 import Server, aws, moto, rclone
from tests.support.proxy import FaultProxy, HalfOpen, Hold, proxied
from tests.support.s3_jobs import cli
from tests.support.uploader_rig import Job, Rank, make_spool
from tests.support.waiting import until
from tests.unit.smdist.trials.test_trial_snapshot import answers

__all__ = ["aws", "moto", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws")]

OPEN = 5  # run, pointer, head, collections; the listing of sessions
QUICK = UploadOptions(linger_s=0.02, heartbeat_s=0.5, drain_deadline_s=60.0, nice=0)


@pytest.fixture
def bucket(rclone: Server) -> str:
    return rclone.make_bucket(f"last-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(rclone: Server) -> Iterator[FaultProxy]:
    with proxied(rclone.port) as proxy:
        yield proxy


def captured(folder: Path, out: str, ranks: int, steps: int) -> list[Spool]:
    """Ranks that have captured everything and ended, and no uploader has begun."""
    job = Job(root=str(folder / "spools"), out_dir=out, elements=50, slots=steps, upload=QUICK)
    store = open_store(out)
    spools = []
    for number in range(ranks):
        spool = make_spool(job, session=f"{number:016x}", rank=number, world=ranks)
        session, worker = spool.info.session, f"worker_{number}"
        sync.run(store.put("run.json", [encode(spool.info.run, "run.json")]))
        sync.run(store.put(session_key(worker, 0), [encode(session, session_key(worker, 0))]))
        rank = Rank(spool, job)
        described = Collections(worker, (CollectionInfo("weights"),))
        rank.append(Describe(collections_key(worker), encode(described, collections_key(worker))))
        for step in range(steps):
            rank.step(step)
        rank.append(End("", time.time()))
        rank.close()
        spools.append(spool)
    sync.run(store.close())
    return spools


@contextlib.contextmanager
def uploading(spools: list[Spool]) -> Iterator[list[Supervisor]]:
    supervisors = [Supervisor(spool) for spool in spools]
    for supervisor in supervisors:
        supervisor.start()
    try:
        yield supervisors
    finally:
        for supervisor in supervisors:
            pid = supervisor.pid
            if pid and not supervisor.join(10.0):
                os.kill(pid, signal.SIGKILL)
                supervisor.join(60.0)


def upload(spools: list[Spool]) -> None:
    with uploading(spools) as supervisors:
        for supervisor in supervisors:
            assert supervisor.join(60.0)


def told(trial: Trial) -> dict[str, str]:
    return {str(question): repr(answer) for question, answer in answers(trial).items()}


def plain(folder: Path) -> dict[str, str]:
    """What is answered by what the ranks alone have written."""
    shutil.rmtree(folder / "merged", ignore_errors=True)
    with create_trial(folder, name="t") as trial:
        return told(trial)


@pytest.mark.parametrize(("ranks", "steps"), [(8, 4), (16, 12)])
def test_a_finished_run_opens_with_a_handful_of_requests(
    rclone: Server, bucket: str, proxy: FaultProxy, tmp_path: Path, ranks: int, steps: int
) -> None:
    upload(captured(tmp_path, rclone.url(bucket), ranks, steps))
    with create_trial(proxy.url(bucket), name="t") as trial:
        assert proxy.count() == OPEN
        assert trial.steps() == list(range(steps))
        assert trial.loaded_all_steps
        found = told(trial)
    assert rclone.folder is not None
    assert found == plain(rclone.folder / bucket / "run")


def test_where_the_server_keeps_conditions(moto: Server, tmp_path: Path) -> None:
    bucket = moto.make_bucket(f"last-{uuid.uuid4().hex[:12]}")
    upload(captured(tmp_path, moto.url(bucket), 8, 3))
    with proxied(moto.port) as proxy, create_trial(proxy.url(bucket)) as trial:
        assert proxy.count() == OPEN
        assert trial.steps() == [0, 1, 2]


def test_killed_while_it_merges_it_leaves_a_whole_run(
    rclone: Server, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    rule = proxy.inject(HalfOpen(), method="PUT", target="merged/heads/")
    spools = captured(tmp_path, proxy.url(bucket), 6, 4)
    with uploading(spools) as supervisors:
        until(lambda: rule.hits > 0, "one that merges")
        until(lambda: not any(spool.path.exists() for spool in spools), "ranks to be released")
        assert rule.hits == 1, "before it is done"
        until(lambda: sum(not one.join(0.0) for one in supervisors) == 1, "the others to end")
        (last,) = [one for one in supervisors if not one.join(0.0)]
        pid = last.pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        assert last.join(60.0)
        assert last.restarts == 0, "there is nothing left to do"
    proxy.clear()
    with create_trial(proxy.url(bucket)) as trial:
        assert trial.steps() == [0, 1, 2, 3]
        assert proxy.count() > OPEN + 6
    refused = cli("merge", rclone.url(bucket))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is being merged by" in refused.stderr
    done = cli("merge", rclone.url(bucket), "--take-over")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 steps complete, 6 ranks" in done.stdout
    proxy.clear()
    with create_trial(proxy.url(bucket)) as trial:
        assert proxy.count() == OPEN
        assert trial.steps() == [0, 1, 2, 3]


def test_what_is_recovered_last_is_merged_by_who_recovers_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    spools = captured(tmp_path, str(out), 5, 3)
    upload(spools[:4])
    assert not (out / POINTER_KEY).exists()
    recover(spools[4].path, print, force=True)
    pointer = msgspec.json.decode((out / POINTER_KEY).read_bytes(), type=Pointer)
    assert pointer.final
    with create_trial(out, name="t") as trial:
        found = told(trial)
        assert trial.steps() == [0, 1, 2]
    assert found == plain(out)


def test_close_waits_for_the_store_and_not_for_the_merge(
    rclone: Server, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    import torch

    import smdist.pytorch as smd

    hold = Hold()
    rule = proxy.inject(hold, method="PUT", target="merged/claims/")
    ranks, hooks = 4, []
    for rank in range(ranks):
        model = torch.nn.Linear(3, 1)
        hook = smd.Hook(
            proxy.url(bucket),
            include_workers="all",
            include_regex=["weight"],
            rank=rank,
            world_size=ranks,
            buffer_bytes=4 << 20,
            spool_dir=str(tmp_path),
            on_error="raise",
        )
        hook.register_module(model)
        model(torch.ones(1, 3)).sum().backward()
        hooks.append(hook)
    for hook in hooks:
        hook.close()
    store = LocalStore((rclone.folder or tmp_path) / bucket / "run")
    assert not sync.run(store.list(POINTER_KEY)), "it is held up, and we are here"
    until(lambda: rule.hits > 0, "the last one to merge")
    with create_trial(proxy.url(bucket)) as trial:
        assert trial.steps() == [0]
    hold.let_go()
    until(lambda: sync.run(store.list(POINTER_KEY)), "the merged view")
