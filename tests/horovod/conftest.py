"""A Ray for the coordinators of these tests, with the keys of the test servers from its start on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.ray_cluster import Cluster, Driver, start_cluster
from tests.servers.s3 import KEY, SECRET, TOKEN


@pytest.fixture(scope="session")
def ray_with_keys() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_SESSION_TOKEN", TOKEN)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with start_cluster() as cluster:
            yield cluster


@pytest.fixture
def driver(ray_with_keys: Cluster, aws: None, tmp_path: Path) -> Iterator[Driver]:
    with Driver(ray_with_keys.address, tmp_path / "driver.log") as one:
        yield one
