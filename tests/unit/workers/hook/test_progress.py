"""What a user reads while `close()` waits."""

from __future__ import annotations

import logging

import pytest

from smdist.workers.capture.capture import Usage
from smdist.workers.hook.drain_progress import DrainProgress, describe_pending


def usage(stored_bytes: int, stored_steps: int) -> Usage:
    return Usage(
        buffer_bytes=0,
        buffer_limit_bytes=1,
        captured_bytes=4 << 20,
        captured_steps=8,
        stored_bytes=stored_bytes,
        stored_steps=stored_steps,
        dropped_tensors=0,
        dropped_bytes=0,
        blocked_s=0.0,
        troubles=0,
        pending_records=5,
    )


def test_what_is_left_is_bytes_steps_and_records() -> None:
    assert describe_pending(usage(1 << 20, 2)) == "3.0 MiB of 4.0 MiB, 6 of 8 steps (5 records)"
    assert describe_pending(usage(5 << 20, 8)) == "0 B of 4.0 MiB, 0 of 8 steps (5 records)"


def test_a_line_tells_rate_and_time_to_go(caplog: pytest.LogCaptureFixture) -> None:
    clock = 0.0
    drain = DrainProgress("worker_3", logging.getLogger("smdist"), lambda: clock)
    drain(usage(0, 0), "")
    assert caplog.text == "", "nothing is said in the first second"
    clock = 10.0
    drain(usage(1 << 20, 2), "the store is slow")
    (record,) = caplog.records
    assert record.getMessage() == (
        "worker_3: waiting for the uploader: 3.0 MiB of 4.0 MiB, 6 of 8 steps (5 records) left, "
        "102.4 KiB/s, 30 s to go, 10 s so far (the store is slow)"
    )
    assert drain.last_error == "the store is slow"
    clock = 12.0
    drain(usage(2 << 20, 4), "")
    assert len(caplog.records) == 1, "a line every ten seconds"
    drain.close()


def test_a_store_that_takes_nothing_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    clock = 0.0
    drain = DrainProgress("worker_0", logging.getLogger("smdist"), lambda: clock)
    drain(usage(0, 0), "")
    clock = 11.0
    drain(usage(0, 0), "")
    assert "nothing stored so far" in caplog.text
