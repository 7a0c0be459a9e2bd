"""Where a run can be stored: what holds of a directory holds of a bucket, shown by the same tests.

A test asks for the fixture `place`, gives `place.out_dir` and `place.environ` to what it starts, and reads
`place.objects()`, a folder in which every object is a file. `at` is for tests that choose places
themselves, as an indirect parameter.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.servers.s3 import KEY, SECRET, TOKEN, Server, moto, rclone

__all__ = ["Place", "at", "credentials", "make_place", "moto", "place", "rclone"]


def credentials(folder: Path) -> dict[str, str]:
    """Of the test servers, and nothing of the machine's own configuration."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(folder / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "no-credentials"),
    }


@dataclass(frozen=True)
class Place:
    name: str
    out_dir: str
    folder: Path  # of the test
    environ: dict[str, str] = field(default_factory=dict)
    server: Server | None = None
    bucket: str = ""

    def objects(self, out_dir: str = "") -> Path:
        """Everything that is stored, as files: what is there, or a copy of it, made now."""
        if self.server is None:
            return Path(out_dir or self.out_dir)
        prefix = (out_dir or self.out_dir).partition("?")[0].split("/", 3)[3]
        if self.server.folder is not None:
            return self.server.folder / self.bucket / prefix
        copies = self.folder / "objects"
        shutil.rmtree(copies, ignore_errors=True)
        client = self.server.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        for key in [entry["Key"] for page in pages for entry in page.get("Contents", [])]:
            (copies / key).parent.mkdir(parents=True, exist_ok=True)
            data = client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            (copies / key).write_bytes(data)
        return copies / prefix

    def beside(self, name: str) -> str:
        """Another out_dir at this place."""
        if self.server is None:
            return str(Path(self.out_dir).parent / name)
        return self.server.url(self.bucket, name)

    def leftovers(self) -> list[str]:
        """Multipart uploads that nobody completed."""
        return self.server.uploads(self.bucket) if self.server is not None else []


def make_place(name: str, request: pytest.FixtureRequest, folder: Path) -> Place:
    if name == "directory":
        return Place(name, str(folder / "out"), folder)
    server: Server = request.getfixturevalue(name)
    bucket = server.make_bucket(f"place-{uuid.uuid4().hex[:12]}")
    return Place(name, server.url(bucket), folder, credentials(folder), server, bucket)


@pytest.fixture(params=["directory", pytest.param("rclone", marks=pytest.mark.s3)])
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Place]:
    made = make_place(request.param, request, tmp_path)
    if made.server is not None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
    yield made
    assert not made.leftovers()


def at(*cases: tuple[object, ...]) -> list[object]:
    """Cases that begin with the name of a place, for an indirect parameter; servers are marked."""
    return [
        pytest.param(*case, marks=() if case[0] == "directory" else pytest.mark.s3)
        for case in cases
    ]
