"""What fault tests share: one process that has imported torch, and places to store in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.launcher import Launcher, launching
from tests.faults.places import moto, place, rclone

__all__ = ["moto", "place", "rclone"]


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    with launching() as launcher:
        yield launcher
