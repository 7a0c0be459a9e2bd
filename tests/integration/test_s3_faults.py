"""Jobs beside a slow or failing server: training goes on, and nothing is missing afterwards."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pytest

from tests.faults.test_bad_places import trouble_of
from tests.servers.s3 import Server, aws, rclone
from tests.support.leaks import assert_no_secret, no_leaks
from tests.support.proxy import Answer, FaultProxy, Latency, proxied
from tests.support.s3_jobs import Ran, assert_equals_copies, run_job, start_job
from tests.support.waiting import until

__all__ = ["aws", "no_leaks", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws", "no_leaks")]

OUTAGE_S = 20.0
NAME = "store.smdist.test"
STEPS_MEANWHILE = 100  # of some 1000 that an idle machine makes in that time


@pytest.fixture
def bucket(rclone: Server) -> str:
    return rclone.make_bucket(f"fault-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(rclone: Server) -> Iterator[FaultProxy]:
    with proxied(rclone.port) as proxy:
        yield proxy


def step_of(folder: Path) -> int:
    progress = folder / "kept" / "step-0"
    text = progress.read_text() if progress.exists() else ""
    return int(text or -1)


def manifests_in(server: Server, bucket: str) -> int:
    assert server.folder is not None
    # Not Path.rglob: it fails where a folder it has just seen is gone.
    return len(glob("**/manifests/*/*.json", root_dir=server.folder / bucket, recursive=True))


def never_waited(ran: Ran) -> bool:
    """Neither for room in the buffer nor, in any thread of the training process, for a network."""
    (before,) = ran.told("network_before")
    assert before > 0, "the watch has eyes: the hook has asked the server"
    return ran.told("blocked_s") == [0.0] and ran.told("network") == [[]]


def test_latency_is_not_felt_in_training(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    rule = proxy.inject(Latency(0.05))
    ran = run_job(tmp_path, proxy.url(bucket), steps=60, hook={"linger_s": 0.05})
    assert rule.hits > 10
    assert never_waited(ran), ran.said
    assert_equals_copies(proxy.url(bucket), ran, ranks=1, steps=60)


@pytest.mark.slow
def test_an_outage_in_the_middle_of_a_job(
    rclone: Server, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    """The server refuses everything for 20 seconds of its own clock, and the job trains on.

    Those seconds are what is tested; nothing here sleeps to let something else happen.
    """
    url = proxy.url(bucket)

    def step() -> int:
        return step_of(tmp_path)

    def manifests() -> int:
        return manifests_in(rclone, bucket)

    ran = start_job(
        tmp_path,
        url,
        steps=100_000,
        step_s=0.02,
        until_stopped=True,
        hook={"linger_s": 0.1},
    )
    try:
        until(lambda: manifests() >= 2, "the first steps in the store")
        outage = proxy.inject(Answer(503, "SlowDown"), for_s=OUTAGE_S)
        until(lambda: outage.hits > 0, "the outage to be felt")
        before, stored = step(), manifests()
        until(lambda: step() > before + STEPS_MEANWHILE, "training to go on meanwhile")
        during = manifests()
        assert time.monotonic() < outage.until, "all of that was during the outage"
        assert during <= stored + 1, "at most what was on its way when it began"
        until(lambda: time.monotonic() > outage.until, "the end of the outage")
        until(lambda: manifests() > during, "the uploader to go on by itself")
    finally:
        (tmp_path / "kept" / "stop").touch()
        ran.wait()
    assert ran.code == 0, ran.errors
    assert outage.hits > 3
    assert "SlowDown" in ran.errors
    assert "the store works again" in ran.errors
    assert never_waited(ran), ran.said
    (steps,) = ran.told("steps")
    assert steps > before + STEPS_MEANWHILE
    assert_equals_copies(url, ran, ranks=1, steps=steps)
    assert_no_secret(ran.errors)


def test_a_name_that_cannot_be_resolved_for_a_while(
    rclone: Server, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    """The job sees a hosts file of its own, and no name server."""
    hosts, servers = tmp_path / "hosts", tmp_path / "resolv.conf"
    known = f"127.0.0.1 {NAME}\n"
    hosts.write_text(known)
    servers.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    mounted = f"mount --bind {hosts} /etc/hosts && mount --bind {servers} /etc/resolv.conf"
    ran = start_job(
        tmp_path,
        f"s3://{bucket}/run?endpoint_url=http://{NAME}:{proxy.port}&addressing_style=path",
        steps=100_000,
        step_s=0.02,
        until_stopped=True,
        hook={"linger_s": 0.1},
        under=("unshare", *as_root, "--mount", "sh", "-c", f'{mounted} && exec "$@"', "sh"),
    )

    def is_felt() -> bool:
        proxy.drop()  # connections that are open need no name, and it is remembered for some seconds
        return "name resolution" in trouble_of(tmp_path / "spools")

    try:
        until(lambda: manifests_in(rclone, bucket) >= 2, "the first steps in the store")
        hosts.write_text("")
        until(is_felt, "the trouble to be told")
        before, stored = step_of(tmp_path), manifests_in(rclone, bucket)
        until(lambda: is_felt() and step_of(tmp_path) > before + 20, "training to go on meanwhile")
        assert manifests_in(rclone, bucket) <= stored + 1, "at most what was on its way"
        hosts.write_text(known)
        until(lambda: manifests_in(rclone, bucket) > stored, "the uploader to go on by itself")
    finally:
        (tmp_path / "kept" / "stop").touch()
        ran.wait()
    assert ran.code == 0, ran.errors
    assert "the store works again" in ran.errors
    assert never_waited(ran), ran.said
    (steps,) = ran.told("steps")
    assert_equals_copies(proxy.url(bucket), ran, ranks=1, steps=steps)
    assert_no_secret(ran.errors)
