"""A killed uploader's last manifest arrives late, while its successor works: nothing is lost or torn.

It was sent before the kill, and the proxy lets it go at a moment of the test's choice. One server
keeps conditional writes, the other takes them for plain ones.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from smdist.format.manifest import RankManifest, manifest_key
from smdist.workers.spool.spool import UploadOptions
from tests.servers.s3 import Server, aws, moto, rclone
from tests.support.proxy import FaultProxy, Hold, Rule, proxied
from tests.support.uploader_rig import (
    Job,
    Process,
    Stored,
    assert_exactly_once,
    rank_process,
    read_store,
)
from tests.support.waiting import until

__all__ = ["aws", "moto", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws")]

LATE = 2  # the manifest that is late
# Each step is a segment of its own.
OPTIONS = UploadOptions(linger_s=0.02, segment_bytes=50_000, heartbeat_s=0.5, nice=0)


class Place:
    """A bucket behind a proxy."""

    def __init__(self, server: Server, proxy: FaultProxy, folder: Path) -> None:
        self.server, self.proxy, self._folder = server, proxy, folder
        self.bucket = server.make_bucket(f"late-{uuid.uuid4().hex[:12]}")

    def holds(self, seq: int) -> Callable[[], bool]:
        key = f"run/{manifest_key('worker_0', 0, seq)}"
        client = self.server.client()
        return lambda: "Contents" in client.list_objects_v2(Bucket=self.bucket, Prefix=key)

    def read(self, elements: int) -> Stored:
        client = self.server.client()
        for entry in client.list_objects_v2(Bucket=self.bucket)["Contents"]:
            path = self._folder / entry["Key"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(client.get_object(Bucket=self.bucket, Key=entry["Key"])["Body"].read())
        return read_store(self._folder / "run", elements)

    def manifest(self, seq: int) -> RankManifest:
        key = f"run/{manifest_key('worker_0', 0, seq)}"
        data = self.server.client().get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return msgspec.json.decode(data, type=RankManifest)


@pytest.fixture(params=["rclone", "moto"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    server: Server = request.getfixturevalue(request.param)
    with proxied(server.port) as proxy:
        yield Place(server, proxy, tmp_path / "objects")


def make_job(place: Place, folder: Path) -> Job:
    return Job(
        root=str(folder / "spools"),
        out_dir=place.proxy.url(place.bucket),
        steps=12,
        slots=16,
        ends="wait",
        upload=OPTIONS,
    )


def hold_manifest(place: Place, late: Hold) -> Rule:
    return place.proxy.inject(late, method="PUT", target=f"manifests/.*-{LATE:08d}", times=1)


def kill_sender(place: Place, rank: Process, sent: Rule, first_segment: Hold) -> int:
    """The uploader that has sent manifest LATE dies; its successor is stopped at that segment."""
    until(lambda: sent.hits, "the manifest to be on its way")
    killed = rank.uploader_pid()
    rule = place.proxy.inject(
        first_segment, method="PUT", target=f"segments/.*-{LATE:08d}", times=1
    )
    os.kill(killed, signal.SIGKILL)
    until(lambda: rule.hits, "the successor's segment")
    return killed


def end(place: Place, rank: Process, job: Job) -> Stored:
    rank.next("open")
    assert rank.popen.stdin is not None
    rank.popen.stdin.close()
    until(lambda: not rank.spool.exists(), "the end of the uploader")
    rank.rest()
    stored = place.read(job.elements)
    assert stored.last.state == "lost"
    assert_exactly_once(stored, rank)
    return stored


def life_of(manifest: RankManifest) -> set[str]:
    return {entry.segment.rpartition("-")[2] for entry in manifest.steps if entry.segment}


def test_it_arrives_before_the_successors_own(place: Place, tmp_path: Path) -> None:
    job, late, segment = make_job(place, tmp_path), Hold(), Hold()
    sent = hold_manifest(place, late)
    with rank_process(job, tmp_path) as rank:
        kill_sender(place, rank, sent, segment)
        late.let_go()
        assert place.holds(LATE)()
        arrived = place.manifest(LATE)
        segment.let_go()
        stored = end(place, rank, job)
    assert stored.manifests[LATE] == arrived, "it was committed, and readers may have seen it"
    assert life_of(arrived) == life_of(stored.manifests[LATE - 1])
    assert life_of(stored.manifests[LATE + 1]) != life_of(arrived)


@pytest.mark.parametrize("behind", [0, 1])
def test_it_arrives_after_the_successors_own(place: Place, tmp_path: Path, behind: int) -> None:
    """`behind`: after so many manifests more."""
    job, late, segment, stop = make_job(place, tmp_path), Hold(), Hold(), Hold()
    sent = hold_manifest(place, late)
    with rank_process(job, tmp_path) as rank:
        kill_sender(place, rank, sent, segment)
        after = LATE + 1 + behind
        rule = place.proxy.inject(stop, method="PUT", target=f"manifests/.*-{after:08d}", times=1)
        segment.let_go()
        until(lambda: rule.hits, "the manifest after that")
        own = place.manifest(LATE)
        late.let_go()
        if place.server.name == "rclone":
            assert place.manifest(LATE) != own, "this server keeps conditions: nothing was tried"
        stop.let_go()
        stored = end(place, rank, job)
    assert stored.manifests[LATE] == own
    assert life_of(own) != life_of(stored.manifests[LATE - 1])
