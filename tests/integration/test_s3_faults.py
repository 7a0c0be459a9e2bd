"""Jobs beside a slow or failing server: training goes on, and nothing is missing afterwards."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.leaks import assert_no_secret, no_leaks
from tests.faults.proxy import Answer, FaultProxy, Latency, proxied
from tests.integration.rig import until
from tests.integration.s3_jobs import Ran, assert_equals_copies, run_job, start_job
from tests.servers.s3 import Server, aws, rclone

__all__ = ["aws", "no_leaks", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws", "no_leaks")]

OUTAGE_S = 20.0
STEPS_MEANWHILE = 100  # of some 1000 that an idle machine makes in that time


@pytest.fixture
def bucket(rclone: Server) -> str:
    return rclone.make_bucket(f"fault-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(rclone: Server) -> Iterator[FaultProxy]:
    with proxied(rclone.port) as proxy:
        yield proxy


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
    url, progress = proxy.url(bucket), tmp_path / "kept" / "step-0"

    def step() -> int:
        text = progress.read_text() if progress.exists() else ""
        return int(text or -1)

    def manifests() -> int:
        assert rclone.folder is not None
        return len(list((rclone.folder / bucket).rglob("manifests/*/*.json")))

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
        (tmp_path / "kept" / "stop").touch()
    finally:
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
