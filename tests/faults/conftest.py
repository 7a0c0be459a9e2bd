"""What fault tests share: one process that has imported torch, and how to tell a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.launcher import Launcher, launching


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    with launching() as launcher:
        yield launcher
