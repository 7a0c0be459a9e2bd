"""A rank enters its run through its uploader: late, through `recover`, or not at all."""

from __future__ import annotations

import contextlib
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from smdist.errors import CaptureError
from smdist.format.manifest import Run
from smdist.format.stored_json import encode
from smdist.identity import modes
from smdist.trials import create_trial
from smdist.workers.spool.spool import Spool
from smdist.workers.upload.recover import recover
from smdist.workers.upload.run_guard import RankRejected, RunNotAtThisLocation
from tests.faults.audit import assert_in_run, audit
from tests.faults.launcher import Launcher, drained, launching, spools, uploaders
from tests.servers.s3 import Server, aws, moto, rclone, start_rclone
from tests.support.proxy import Answer, Fault, HalfOpen, proxied
from tests.support.s3_jobs import assert_equals_copies, cli, start_job
from tests.support.spans import assert_spans_agree
from tests.support.waiting import until

__all__ = ["aws", "moto", "rclone"]  # fixtures


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with launching() as launcher:
        yield launcher


def made(url: str | Path, spool_dir: Path, **settings: Any) -> tuple[smd.Hook, nn.Module]:
    hook = smd.Hook(
        url,
        **{
            "save_config": smd.SaveConfig(save_interval=1),
            "include_collections": ["weights"],
            "buffer_bytes": 16 << 20,
            "linger_s": 0.05,
            "spool_dir": str(spool_dir),
            **settings,
        },
    )
    model = nn.Linear(2, 2)
    hook.register_module(model)
    return hook, model


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 2))


def trouble(hook: smd.Hook) -> str:
    capture = hook._core.session.capture
    assert capture is not None
    return capture._ack_page.last_error


def stored(hook: smd.Hook) -> int:
    usage = hook.usage()
    assert usage is not None
    return usage.stored_steps


def rests(hook: smd.Hook) -> bool:
    """Has its uploader nothing to do, and nothing under way?"""
    usage = hook.usage()
    assert usage is not None
    return usage.pending_records == 0


# -- a store that does not answer when the first step is saved -------------------------------------


@pytest.mark.s3
@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize(
    "fault",
    [HalfOpen(), Answer(403, "AccessDenied"), Answer(404, "NoSuchBucket"), Answer(503, "SlowDown")],
    ids=["half open", "denied", "no bucket", "slow down"],
)
def test_training_needs_no_answer(fault: Fault, rclone: Server, tmp_path: Path) -> None:
    bucket = rclone.make_bucket(f"entering-{uuid.uuid4().hex[:12]}")
    with proxied(rclone.port) as proxy:
        hook, model = made(proxy.url(bucket), tmp_path)
        rule = proxy.inject(fault)
        train(model, 20)
        assert hook.errors == 0
        until(lambda: "joining the run" in trouble(hook), "the uploader to say what is wrong")
        train(model, 5)
        assert rule.hits
        assert stored(hook) == 0
        proxy.clear()
        hook.close(timeout=120)
        with create_trial(proxy.url(bucket)) as trial:
            assert trial.steps() == list(range(25))
            assert trial.dropped() == []


def test_a_full_store_is_tried_again_and_nothing_is_missing(
    small_disk: Path, tmp_path: Path
) -> None:
    hook, model = made(small_disk / "out", tmp_path / "spools")
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    train(model, 2)
    assert hook.errors == 0
    until(lambda: trouble(hook), "the uploader to say what is wrong")
    ballast.unlink()
    train(model, 1)
    hook.close(timeout=120)
    with create_trial(small_disk / "out") as trial:
        assert trial.steps() == [0, 1, 2]


# -- a run that is somebody else's -----------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_run_that_came_in_between_is_told_and_training_goes_on(
    on_error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out_dir = tmp_path / "run"
    first, first_model = made(out_dir, tmp_path / "first")
    second, model = made(out_dir, tmp_path / "second", on_error=on_error)  # nobody is there yet
    train(first_model, 2)
    until(lambda: stored(first) > 0, "the first one to be in the run")
    with caplog.at_level(logging.WARNING):
        train(model, 2)
        until(lambda: "resume=True" in caplog.text, "the second one to be told")
    assert "RunExists" in caplog.text
    if on_error == "raise":
        with pytest.raises(CaptureError, match="resume=True"):
            train(model, 1)
    train(model, 3)
    assert not model._forward_pre_hooks, "it costs nothing any more"
    second.close()
    first.close()
    (spool,) = spools(tmp_path / "second")
    with pytest.raises(RankRejected, match="RunExists"):
        recover_of_dead(spool)
    done = recover(spool, pytest.fail, force=True)
    assert (done.state, done.steps) == ("ended", 2)
    with create_trial(out_dir) as trial:
        assert [(a.number, a.steps) for a in trial.attempts()] == [(0, 2), (1, 2)]


def recover_of_dead(path: Path) -> None:
    """As if the process of this test, which made it, were gone."""
    spool = Spool.open(path)
    info = msgspec.structs.replace(spool.info, trainer_start=1)
    (path / "spool.json").write_bytes(msgspec.json.encode(info))
    recover(path, pytest.fail)


# -- processes that die before that ----------------------------------------------------------------

UNATTENDED = """
import os
import smdist.workers.hook.capture_session as session
supervisor = session.Supervisor
session.Supervisor = lambda spool, **more: supervisor(
    spool, python="/bin/false", most_rapid_deaths=1, **more
)
train(order, close=False)
os.kill(os.getpid(), 9)
"""


def test_killed_before_anybody_entered(launcher: Launcher, tmp_path: Path) -> None:
    out_dir, root = tmp_path / "out", tmp_path / "spools"
    hook = {"out_dir": str(out_dir), "spool_dir": str(root)}
    started = launcher.start(tmp_path / "rank", UNATTENDED, steps=5, hook=hook)
    assert started.wait() == -9
    assert not list(out_dir.rglob("*.json"))
    (spool,) = spools(root)
    assert recover(spool, pytest.fail).state == "lost"
    assert not spools(root)
    audit(out_dir)
    with create_trial(out_dir) as trial:
        assert_in_run(trial, started, 0, started.evidence())


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_enters_after_the_other_has_ended(
    late: int, launcher: Launcher, tmp_path: Path
) -> None:
    out_dir, root = tmp_path / "out", tmp_path / "spools"
    hook = {"out_dir": str(out_dir), "spool_dir": str(root / "on time")}
    early = launcher.start(tmp_path / "early", rank=1 - late, world=2, steps=3, hook=hook)
    hook["spool_dir"] = str(root / "late")
    other = launcher.start(tmp_path / "late", UNATTENDED, rank=late, world=2, steps=3, hook=hook)
    assert [early.wait(), other.wait()] == [0, -9], (early, other)
    drained(root / "on time")
    with create_trial(out_dir) as trial:
        assert trial.steps() == []
    (spool,) = spools(root / "late")
    recover(spool, pytest.fail)
    audit(out_dir)
    with create_trial(out_dir) as trial:
        assert [a.number for a in trial.attempts()] == [0], "one start of the job"
        assert_in_run(trial, early, 1 - late, early.evidence())
        assert_in_run(trial, other, late, other.evidence())
        assert trial.steps(modes.TRAIN) == [0, 1, 2]


def test_an_earlier_start_whose_uploader_is_late_comes_first(
    launcher: Launcher, tmp_path: Path
) -> None:
    out_dir, root, go = tmp_path / "out", tmp_path / "spools", tmp_path / "go"
    script = """
from pathlib import Path
import smdist.workers.hook.capture_session as session
supervisor = session.Supervisor
made = []
session.Supervisor = lambda spool, **more: made.append(supervisor(spool, **more)) or Idle()
class Idle:
    running, refused, pid, start = True, "", 0, lambda self: None
train(order, close=False)
wait_for(Path(order.arguments["go"]))
made[0].start()
wait_for(Path(order.arguments["go"]).with_name("never"))
"""
    hook = {"out_dir": str(out_dir), "spool_dir": str(root), "resume": True}
    first = launcher.start(tmp_path / "first", script, steps=2, go=str(go), hook=hook)
    first.wait_for("trained")
    second = launcher.start(tmp_path / "second", steps=3, hook=hook)
    until(lambda: len(spools(root)) == 2, "the second spool")
    second.wait_for("trained")
    go.touch()
    assert second.wait() == 0, second
    first.kill()
    drained(root)
    with create_trial(out_dir) as trial:
        assert [(a.number, a.steps) for a in trial.attempts()] == [(0, 2), (1, 3)]


# -- a place that is not the one -------------------------------------------------------------------


@pytest.mark.s3
@pytest.mark.usefixtures("aws")
def test_it_is_sent_to_where_the_job_wrote(
    rclone: Server, aws: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with start_rclone(tmp_path / "other") as other:
        bucket = rclone.make_bucket(f"entering-{uuid.uuid4().hex[:12]}")
        other.make_bucket(bucket)
        aws.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
        ran = start_job(tmp_path, f"s3://{bucket}/run", dies=True, hook={"linger_s": 600.0}).wait()
        (spool,) = ran.told("spool")
        done = cli("recover", spool, AWS_ENDPOINT_URL=other.endpoint)
        assert done.returncode == 0, done.stdout
        assert not Path(spool).exists()
        assert other.folder is not None
        assert not [path for path in other.folder.rglob("*") if path.is_file()]
        assert_equals_copies(rclone.url(bucket), ran, ranks=1, steps=4)


def entered_and_left(launcher: Launcher, tmp_path: Path) -> Path:
    """A run with one step stored, and a spool of more."""
    out_dir, root = tmp_path / "out", tmp_path / "spools"
    script = """
import gc, os, signal
import smdist.pytorch as smd
from smdist.workers.upload.process import Supervisor
def only(kind):
    (one,) = [each for each in gc.get_objects() if type(each) is kind]
    return one
def before_step(step):
    if step == 1:
        assert only(smd.Hook).flush(60)  # stored, and the uploader has noted it
        uploader = only(Supervisor)
        uploader._python = "/bin/false"
        os.kill(uploader.pid, signal.SIGKILL)
train(order, before_step=before_step, close=False)
os.kill(os.getpid(), 9)
"""
    hook = {"out_dir": str(out_dir), "spool_dir": str(root), "linger_s": 0.01}
    started = launcher.start(tmp_path / "rank", script, steps=3, hook=hook)
    assert started.wait() == -9, started
    (spool,) = spools(root)
    until(lambda: not uploaders(spool), "the killed uploader to be gone")
    return spool


def remove_run(out_dir: Path) -> None:
    shutil.rmtree(out_dir)


def replace_run(out_dir: Path) -> None:
    shutil.rmtree(out_dir / "sessions")
    rename_run(out_dir)


def rename_run(out_dir: Path) -> None:
    run = msgspec.json.decode((out_dir / "run.json").read_bytes(), type=Run)
    other = msgspec.structs.replace(run, run_id="other")
    (out_dir / "run.json").write_bytes(encode(other, "run.json"))


@pytest.mark.parametrize("change", [remove_run, replace_run])
def test_a_place_without_the_run_gets_nothing(
    change: Callable[[Path], None], launcher: Launcher, tmp_path: Path
) -> None:
    spool, out_dir = entered_and_left(launcher, tmp_path), tmp_path / "out"
    change(out_dir)
    before = sorted(out_dir.rglob("*/*.*"))
    with pytest.raises(
        RunNotAtThisLocation, match="--force" if change is remove_run else "another run"
    ):
        recover(spool, pytest.fail)
    assert sorted(out_dir.rglob("*/*.*")) == before
    assert spools(tmp_path / "spools") == [spool]
    if change is remove_run:
        said: list[str] = []
        recover(spool, said.append, force=True)
        assert "emptied" in said[0]
        with create_trial(out_dir) as trial:
            assert trial.steps(show_incomplete_steps=True) == [1, 2]


def test_a_run_whose_name_was_overwritten_by_a_slower_rank_is_the_same_run(
    launcher: Launcher, tmp_path: Path
) -> None:
    """As happens on servers that ignore conditions, when ranks begin a run together."""
    spool, out_dir = entered_and_left(launcher, tmp_path), tmp_path / "out"
    rename_run(out_dir)
    recover(spool, pytest.fail)
    assert not spools(tmp_path / "spools")
    with create_trial(out_dir) as trial:
        assert trial.steps(show_incomplete_steps=True) == [0, 1, 2]
        assert trial.missing(1) == {}
        assert "" not in trial.troubles()


# -- a run that is removed while the job writes to it ----------------------------------------------


def assert_readable(url: str | Path, first: int, last: int) -> None:
    with create_trial(url) as trial:
        steps = trial.steps()
        assert steps[-1] == last
        assert steps[0] <= first
        for step in steps:
            for name in trial.tensor_names(step=step):
                trial.tensor(name).value(step)
        assert trial.collections()["weights"].tensor_names


def removed(client: Any, bucket: str) -> bool:
    """Whether it was; what is put meanwhile stands in the way."""
    for one in client.list_objects_v2(Bucket=bucket).get("Contents", ()):
        client.delete_object(Bucket=bucket, Key=one["Key"])
    with contextlib.suppress(client.exceptions.ClientError):
        client.delete_bucket(Bucket=bucket)
        return True
    return False


@pytest.mark.s3
@pytest.mark.usefixtures("aws")
def test_a_bucket_that_is_made_anew(
    moto: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bucket, client = moto.make_bucket(f"entering-{uuid.uuid4().hex[:12]}"), moto.client()
    hook, model = made(moto.url(bucket), tmp_path)
    train(model, 3)
    until(lambda: rests(hook), "the first steps to be stored")
    until(lambda: removed(client, bucket), "the bucket to be removed")
    train(model, 3)
    until(lambda: "NoSuchBucket" in trouble(hook), "the uploader to miss it")
    client.create_bucket(Bucket=bucket)
    train(model, 3)
    hook.close(timeout=120)
    assert "was emptied while the job ran" in capfd.readouterr().err
    assert_readable(moto.url(bucket), 3, 8)


def test_a_folder_that_is_removed_in_the_middle(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "out"
    hook, model = made(out_dir, tmp_path / "spools")
    train(model, 3)
    until(lambda: rests(hook), "the first steps to be stored")
    shutil.rmtree(out_dir, ignore_errors=True)
    train(model, 3)
    hook.close(timeout=120)
    assert "was emptied while the job ran" in capfd.readouterr().err
    assert_readable(out_dir, 4, 5)
    with create_trial(out_dir) as trial:
        assert "was emptied while the job ran" in str(trial.troubles()), "readers are told as well"


def train_singly(hook: smd.Hook, model: nn.Module, steps: int) -> None:
    """So that each step gets a manifest of its own."""
    for _ in range(steps):
        train(model, 1)
        until(lambda: rests(hook), "everything to be stored")


def test_what_was_removed_does_not_come_back_by_a_span(tmp_path: Path) -> None:
    """Nobody notices before the end; the first span tells of manifests that are gone."""
    out_dir = tmp_path / "out"
    hook, model = made(out_dir, tmp_path / "spools")
    train(model, 1)
    train_singly(hook, model, 5)
    shutil.rmtree(out_dir, ignore_errors=True)
    train_singly(hook, model, 30)
    hook.close(timeout=120)
    assert not (out_dir / "manifests/worker_0/000000-00000003.json").exists()
    assert_readable(out_dir, 6, 35)
    with create_trial(out_dir) as trial:
        assert trial.steps()[0] >= 4


@pytest.mark.s3
@pytest.mark.usefixtures("aws")
def test_no_span_tells_of_a_bucket_that_is_gone(moto: Server, tmp_path: Path) -> None:
    bucket, client = moto.make_bucket(f"entering-{uuid.uuid4().hex[:12]}"), moto.client()
    hook, model = made(moto.url(bucket), tmp_path / "spools")
    train(model, 1)
    train_singly(hook, model, 5)
    until(lambda: removed(client, bucket), "the bucket to be removed")
    train(model, 1)
    until(lambda: "NoSuchBucket" in trouble(hook), "the uploader to miss it")
    client.create_bucket(Bucket=bucket)
    train_singly(hook, model, 40)
    hook.close(timeout=120)
    for one in client.list_objects_v2(Bucket=bucket)["Contents"]:
        path = tmp_path / "objects" / one["Key"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(client.get_object(Bucket=bucket, Key=one["Key"])["Body"].read())
    spans = assert_spans_agree(tmp_path / "objects/run")
    assert spans, "what came after it"
    assert not [name for name in spans if "-00000000-" in name]
