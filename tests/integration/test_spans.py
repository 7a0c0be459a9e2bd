"""Spans of a rank that runs: by its real uploader, through real servers, with real deaths."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from smdist import create_trial
from smdist.format.manifest import RankManifest, RankSpan, Run, Session, session_key, span_key
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys
from smdist.storage import loop_thread as sync
from smdist.storage import open_store
from smdist.trials import Trial
from smdist.workers.spool.spool import UploadOptions
from tests.servers.s3 import Server, aws, rclone
from tests.support.proxy import FaultProxy, Hold, proxied
from tests.support.run_builder import RunBuilder
from tests.support.spans import Roller, assert_spans_agree
from tests.support.uploader_rig import (
    Job,
    Process,
    assert_exactly_once,
    open_ack_page,
    rank_process,
    read_store,
)
from tests.support.waiting import until

__all__ = ["aws", "rclone"]  # fixtures

TRAIN = ModeKeys.TRAIN
MANY = 300  # manifests: spans of 256, 2 x 16, and 12 by themselves
STEPS = 40
# Each step is a segment of its own, and so a manifest.
OPTIONS = UploadOptions(linger_s=0.01, segment_bytes=20_000, heartbeat_s=0.5, nice=0)


@pytest.fixture
def proxy(rclone: Server, request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    request.getfixturevalue("aws")
    with proxied(rclone.port) as proxy:
        yield proxy


def told(trial: Trial) -> dict[str, object]:
    return {
        "steps": trial.steps(show_incomplete_steps=True),
        "complete": trial.steps(),
        "troubles": trial.troubles(),
        "dropped": trial.dropped(),
        "missing": [trial.missing(step) for step in range(MANY)],
        "values": {
            worker: {s: v.tolist() for s, v in trial.tensor("x").values(worker=worker).items()}
            for worker in trial.workers()
        },
    }


@pytest.mark.s3
def test_a_live_run_in_a_bucket_is_opened_with_few_requests(
    rclone: Server, proxy: FaultProxy
) -> None:
    bucket = rclone.make_bucket(f"spans-{uuid.uuid4().hex[:12]}")
    store = open_store(rclone.url(bucket))
    run = RunBuilder(store)
    for rank in range(2):
        writer = run.rank(rank, 2)
        roller = Roller(writer)
        for step in range(MANY):
            writer.step(TRAIN, step, {"x": np.array([rank, step], np.float32)})
            if step == 100:
                writer.drop(TRAIN, step, "y").trouble("something")
            writer.flush()
        roller.roll()
    with create_trial(proxy.url(bucket)) as trial:
        assert proxy.count("GET", "/spans/") == 2 * 3
        assert proxy.count("GET", r"/manifests/worker") == 2 * 12
        # Run, what is merged; sessions, summaries and manifests listed; sessions, heartbeats, layout
        # and the collections of the lowest rank.
        assert proxy.count() == 2 * (3 + 12) + 2 + 3 + 2 + 2 + 1 + 1
        found = told(trial)
        proxy.clear()
        trial.refresh()
        assert proxy.count("GET", "/spans/") == 0
    for key in sync.run(store.list("spans/")):
        sync.run(store.delete(key))
    sync.run(store.close())
    proxy.clear()
    with create_trial(proxy.url(bucket)) as trial:
        assert proxy.count("GET", r"/manifests/worker") == 2 * MANY
        assert told(trial) == found


# -- by an uploader --------------------------------------------------------------------------------


@contextmanager
def live_rank(tmp_path: Path, out_dir: Path) -> Iterator[Process]:
    """One that has stored all its steps, with the spans of them, and waits."""
    job = Job(
        root=str(tmp_path / "spools"),
        out_dir=str(out_dir),
        steps=STEPS,
        slots=64,
        ends="wait",
        upload=OPTIONS,
    )
    with rank_process(job, tmp_path) as rank:
        rank.next("open")
        until(lambda: STEPS in read_store(out_dir, job.elements).raw, "all, and the open step")
        until(lambda: len(list(out_dir.glob("spans/*/*"))) >= STEPS // 16, "spans")
        yield rank


def test_its_uploader_writes_them_beside_its_manifests(tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    with live_rank(tmp_path, out_dir) as rank:
        assert assert_spans_agree(out_dir)[0] == "000000-00000000-00000016.json"
        rank.popen.kill()
        rank.popen.wait()
        until(lambda: not rank.spool.exists(), "the uploader to finish")
        rank.rest()
    assert_exactly_once(read_store(out_dir, rank.job.elements), rank)
    until(lambda: not (out_dir / ".tmp").exists(), "the uploader to leave nothing")


class Place:
    """A bucket, and what is in it as files."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.name = server.make_bucket(f"spans-{uuid.uuid4().hex[:12]}")
        self._client, self._folder = server.client(), folder

    def keys(self, prefix: str) -> list[str]:
        found = self._client.list_objects_v2(Bucket=self.name, Prefix=f"run/{prefix}")
        return [entry["Key"] for entry in found.get("Contents", ())]

    def fetch(self) -> Path:
        for key in self.keys(""):
            path = self._folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._client.get_object(Bucket=self.name, Key=key)["Body"].read())
        return self._folder / "run"


@pytest.mark.s3
@pytest.mark.parametrize("late", [False, True])
def test_an_uploader_killed_between_its_manifest_and_the_span(
    rclone: Server, proxy: FaultProxy, tmp_path: Path, late: bool
) -> None:
    """`late`: the span was sent, and arrives while the successor works. Else it never does."""
    place, hold = Place(rclone, tmp_path / "objects"), Hold()
    job = Job(
        root=str(tmp_path / "spools"),
        out_dir=proxy.url(place.name),
        steps=STEPS,
        slots=64,
        ends="wait",
        upload=OPTIONS,
    )
    rule = proxy.inject(hold, method="PUT", target=r"spans/.*-00000016\.json", times=1)
    with rank_process(job, tmp_path) as rank:
        until(lambda: rule.hits, "the span to be on its way")
        # What is stored meanwhile does not wait for it.
        until(lambda: len(place.keys("manifests/")) > 20, "more manifests")
        assert not place.keys("spans/")
        os.kill(rank.uploader_pid(), signal.SIGKILL)
        with open_ack_page(rank.spool) as ack_page:
            assert ack_page is not None
            until(lambda: ack_page.steps_stored >= STEPS, "the successor to store the rest")
        if late:
            hold.let_go()
            until(lambda: place.keys("spans/"), "the late span")
        check_live(job.out_dir, rank)
        end(rank)
    folder = place.fetch()
    assert_exactly_once(read_store(folder, job.elements), rank)
    spans = assert_spans_agree(folder)
    assert (span_key("worker_0", 0, 0, 16).rpartition("/")[2] in spans) is late


def check_live(url: str, rank: Process) -> None:
    """While it runs, with whatever spans there are."""
    assert rank.popen.poll() is None
    store = open_store(url)  # the rig's ranks enter no run
    session = Session("0123456789abcdef", 0, 1, 0, "all", 0.0, "host", 1, "")
    sync.run(store.put("run.json", (encode(Run("run", 0.0, "none"), "run.json"),)))
    at = session_key("worker_0", 0)
    sync.run(store.put(at, (encode(session, at),)))
    sync.run(store.close())
    with create_trial(url) as trial:
        assert trial.steps() == list(range(STEPS))
        assert trial.troubles() == {}
        values = trial.tensor("weight").values()
        assert [values[step].shape for step in range(STEPS)] == [(20_000,)] * STEPS


def end(rank: Process) -> None:
    rank.popen.kill()
    rank.popen.wait()
    until(lambda: not rank.spool.exists(), "the uploader to finish")
    rank.rest()


def held(span: Path) -> tuple[RankManifest, ...]:
    return msgspec.json.decode(span.read_bytes(), type=RankSpan).manifests


def test_a_span_of_what_a_power_cut_took_is_not_believed(tmp_path: Path) -> None:
    """The spans survived it, the newest manifests did not; the next uploader writes them anew."""
    out_dir = tmp_path / "out"
    with live_rank(tmp_path, out_dir) as rank:
        os.kill(rank.uploader_pid(), signal.SIGSTOP)
        *others, newest = sorted(out_dir.glob("spans/*/*"))
        left = int(newest.stem.rpartition("-")[2]) - 2
        for path in sorted(out_dir.glob("manifests/*/*"))[left:]:
            path.unlink()
        os.kill(rank.uploader_pid(), signal.SIGKILL)
        until(lambda: not held(newest), "the successor to take it back")
        end(rank)
    assert len(list(out_dir.glob("manifests/*/*"))) > left, "its numbers were written anew"
    assert held(newest) == ()
    for path in others:
        assert len(held(path)) == 16
