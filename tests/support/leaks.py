"""Does a secret appear anywhere? Asked of everything a test has said, logged and left behind.

A module imports the fixture `no_leaks`; every test of it is judged at its end. What is gone by then, a
spool above all, a test gives to `assert_no_secret` while it is there.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import subprocess
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.servers.s3 import OTHER_SECRET, SECRET, TOKEN, Server

__all__ = ["WRONG", "assert_no_secret", "assert_told_without_secret", "no_leaks", "secrets"]

WRONG = "wrong/Secret+that.must=not&appear"  # a typo is nobody's business either
_OWN_FILES = {"credentials", "config"}  # where secrets are at home


def secrets() -> set[bytes]:
    """All there are right now, as they are and as they might be written down."""
    plain = {SECRET, OTHER_SECRET, WRONG, TOKEN}
    plain |= {os.environ.get(f"AWS_{name}", "") for name in ("SECRET_ACCESS_KEY", "SESSION_TOKEN")}
    shapes = {quote(one) for one in plain} | {quote(one, safe="") for one in plain}
    coded = {base64.b64encode(one.encode()).decode()[:-4] for one in plain}
    # Of a long one its beginning would be too much.
    return {one.encode() for one in plain | shapes | coded | {p[:12] for p in plain} if one}


def _judge(what: str, data: bytes) -> None:
    found = [secret for secret in secrets() if secret in data]
    assert not found, f"{what} holds a secret"


def assert_no_secret(*places: str | bytes | Path | BaseException) -> None:
    """In texts, in files and folders with all that is in them, and in errors with their tracebacks."""
    for place in places:
        if isinstance(place, Path):
            for path in _files(place):
                with contextlib.suppress(FileNotFoundError):  # a spool at work lets go of its files
                    _judge(str(path), path.read_bytes())
        elif isinstance(place, BaseException):
            _judge(repr(type(place)), "".join(traceback.format_exception(place)).encode())
        else:
            _judge("a text", place.encode() if isinstance(place, str) else place)


def _files(place: Path) -> Iterable[Path]:
    # Not Path.rglob: it fails where a folder it has just seen is gone.
    within = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)
    return [
        path
        for path in ([place] if place.is_file() else within)
        if path.is_file() and path.name not in _OWN_FILES
    ]


def assert_told_without_secret(spool: Path) -> None:
    """What is in a spool, and how its uploader was started, which anybody on the machine can see."""
    assert_no_secret(spool)
    command = ["ps", "axww", "-o", "args"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    mine = [line for line in listed.splitlines() if "smdist" in line and "rclone" not in line]
    assert any(spool.name in line for line in mine), "the uploader is at work"
    assert_no_secret("\n".join(mine))


@pytest.fixture
def no_leaks(
    request: pytest.FixtureRequest,
    aws: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> Iterator[None]:
    """Logs of smdist with all details, of others as a careful user has them; files; objects."""
    began = time.time()
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="smdist")
    yield
    records = [record for phase in ("setup", "call") for record in caplog.get_records(phase)]
    assert_no_secret("\n".join(map(logging.Formatter().format, records)), tmp_path)
    for name in ("rclone", "moto"):
        if name in request.fixturenames:
            _judge_objects(request.getfixturevalue(name), began - 1)


def _judge_objects(server: Server, since: float) -> None:
    if server.folder is not None:
        for path in _files(server.folder):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime >= since:
                    _judge(f"object {path}", path.read_bytes())
        return
    client = server.client()
    for bucket in client.list_buckets()["Buckets"]:
        name = bucket["Name"]
        if bucket["CreationDate"].timestamp() >= since:
            for entry in client.list_objects_v2(Bucket=name).get("Contents", []):
                with contextlib.suppress(client.exceptions.NoSuchKey):
                    data = client.get_object(Bucket=name, Key=entry["Key"])["Body"].read()
                    _judge(f"object {entry['Key']}", data)
