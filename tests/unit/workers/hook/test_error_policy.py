from __future__ import annotations

import logging

import pytest

from smdist.errors import DrainTimeout
from smdist.workers.hook.error_policy import ErrorPolicy


def fail(errors: ErrorPolicy, text: str, doing: str) -> None:
    try:
        raise OSError(text)
    except OSError as error:
        errors.on_exception(error, doing)


def test_what_fails_at_every_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    noted: list[str] = []
    errors = ErrorPolicy("warn", logging.getLogger("smdist"))
    errors.attach_journal(noted.append)
    for step in range(20):
        fail(errors, f"no room for step {step}", f"step {step}")
    fail(errors, "another thing", "step 20")
    assert errors.count == 21
    assert [r.getMessage().partition(" (")[0] for r in caplog.records] == noted
    assert noted == ["step 0: OSError: no room for step 0", "step 20: OSError: another thing"]
    assert all(record.exc_info for record in caplog.records)


def test_tensors_that_differ_in_a_number_are_each_named(caplog: pytest.LogCaptureFixture) -> None:
    errors = ErrorPolicy("warn", logging.getLogger("smdist"))
    for layer in (1, 2, 1):
        fail(errors, "no", f"capturing gradient/Net_{layer}.weight")
        errors.warn_once(f"Net_{layer}.weight was not captured")
    assert (errors.count, len(caplog.records)) == (6, 4)


def test_what_is_left_at_the_end_is_said_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = ErrorPolicy("warn", logging.getLogger("smdist"))
    errors.report_not_drained(DrainTimeout("3 MiB were not stored; send them with: smdist recover"))
    (record,) = caplog.records
    assert record.getMessage() == "3 MiB were not stored; send them with: smdist recover"
    assert record.exc_info is None
    assert errors.count == 1
    with pytest.raises(DrainTimeout):
        ErrorPolicy("raise", logging.getLogger("smdist")).report_not_drained(DrainTimeout("some"))


def test_what_cannot_be_noted_is_no_second_error(caplog: pytest.LogCaptureFixture) -> None:
    def note(message: str) -> None:
        raise OSError("the disk is full")

    errors = ErrorPolicy("warn", logging.getLogger("smdist"))
    errors.attach_journal(note)
    fail(errors, "no", "saving \ud800")
    assert errors.count == 1
    assert caplog.records[0].getMessage().startswith(r"saving \ud800: OSError: no")
    assert "the disk is full" in caplog.records[1].getMessage()
