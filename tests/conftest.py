"""Settings, fixtures and reports for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import sampling

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests that interrupt
# processes would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something about the machine, not about the code.
settings.register_profile("smdist", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("smdist"), max_examples=1000)
settings.register_profile("fast", settings.get_profile("smdist"), max_examples=20)  # make test-fast
settings.load_profile("soak" if sampling.SOAK else "smdist")

# Now, not in a hook: test files draw their cases while they are imported. The workers of
# pytest-xdist inherit it.
sampling.set_seed()


def pytest_report_header() -> str:
    share = "all randomised cases" if sampling.SOAK else "a share of the randomised cases"
    return f"{sampling.SEED_VARIABLE}={sampling.seed()} ({share})"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("to repeat it", sampling.repeat_command(item.nodeid)))
    return report


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, to be filled up. Mounting one is root's right, so CI runs as root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "smdist-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
