"""Jobs beside a slow or failing server: training goes on, and nothing is missing afterwards."""

from __future__ import annotations

import os
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

OUTAGE_S = float(os.environ.get("SMDIST_TEST_OUTAGE_S", "5"))


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
    assert before > 0, "the watch has eyes: the run was entered over the network"
    return ran.told("blocked_s") == [0.0] and ran.told("network") == [[]]


def test_latency_is_not_felt_in_training(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    rule = proxy.inject(Latency(0.05))
    ran = run_job(tmp_path, proxy.url(bucket), steps=60, hook={"linger_s": 0.05})
    assert rule.hits > 10
    assert never_waited(ran), ran.said
    assert_equals_copies(proxy.url(bucket), ran, ranks=1, steps=60)


def test_an_outage_in_the_middle_of_a_job(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    url, progress = proxy.url(bucket), tmp_path / "kept" / "step-0"

    def step() -> int:
        text = progress.read_text() if progress.exists() else ""
        return int(text or -1)

    ran = start_job(
        tmp_path,
        url,
        steps=100_000,
        step_s=0.02,
        until_stopped=True,
        hook={"linger_s": 0.1},
    )
    try:
        until(lambda: proxy.count("PUT", "/manifests/") >= 2, "the first steps in the store")
        outage = proxy.inject(Answer(503, "SlowDown"), for_s=OUTAGE_S)
        until(lambda: outage.hits > 0, "the outage to be felt")
        before = step()
        until(lambda: step() > before + 25, "training to go on meanwhile")
        assert time.monotonic() < outage.until, "all of that was during the outage"
        until(lambda: time.monotonic() > outage.until, "the end of the outage")
        (tmp_path / "kept" / "stop").touch()
    finally:
        ran.wait()
    assert ran.code == 0, ran.errors
    assert outage.hits > 1
    assert never_waited(ran), ran.said
    (steps,) = ran.told("steps")
    assert steps > 50
    assert_equals_copies(url, ran, ranks=1, steps=steps)
    assert_no_secret(ran.errors)
