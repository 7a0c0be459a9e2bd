"""A hook that is given a bucket: what it refuses when it is built, what it says when it is closed."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smdist.pytorch as smd
from smdist.errors import (
    ConfigurationError,
    DrainTimeout,
    RunExists,
    SmdistError,
    StoreError,
    StoreForbidden,
)
from smdist.workers.capture import Usage
from tests.faults.proxy import Answer, FaultProxy, HalfOpen, proxied
from tests.integration.rig import until
from tests.integration.torch_jobs import EVERY_STEP, Net, train
from tests.servers.s3 import SECRET, Server, add_user, aws, enforce_rights, moto, rclone

__all__ = ["aws", "moto", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws")]

SECONDS = 20.0  # an answer within seconds, on a machine that is busy with other tests
WRONG = "wrong/Secret+that.must=not&appear"


@pytest.fixture
def bucket(rclone: Server) -> str:
    return rclone.make_bucket(f"hook-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(rclone: Server) -> Iterator[FaultProxy]:
    with proxied(rclone.port) as proxy:
        yield proxy


def refused(url: str, kind: type[SmdistError], words: str, **settings: object) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=words) as caught:
        smd.Hook(url, **settings)  # type: ignore[arg-type]
    assert time.monotonic() - began < SECONDS
    text = "".join(traceback.format_exception(caught.value))
    for secret in (SECRET, WRONG, os.environ["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in text


def test_a_wrong_secret(rclone: Server, bucket: str, aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_SECRET_ACCESS_KEY", WRONG)
    refused(rclone.url(bucket), StoreForbidden, "secret access key is not the one")


def test_an_unknown_key(rclone: Server, bucket: str, aws: pytest.MonkeyPatch) -> None:
    aws.setenv("AWS_ACCESS_KEY_ID", "NOBODY")
    refused(rclone.url(bucket), StoreForbidden, "does not know this access key")


@pytest.mark.parametrize("name", ["rclone", "moto"])
def test_a_missing_bucket(name: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(name)
    refused(server.url("nowhere-at-all"), StoreError, "there is no such bucket")


def test_read_only_credentials(moto: Server, aws: pytest.MonkeyPatch) -> None:
    bucket = moto.make_bucket(f"hook-{uuid.uuid4().hex[:12]}")
    key, secret = add_user(moto, uuid.uuid4().hex, ["s3:GetObject", "s3:ListBucket"])
    aws.setenv("AWS_ACCESS_KEY_ID", key)
    aws.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with enforce_rights(moto):
        refused(moto.url(bucket), StoreForbidden, "can be read but not written")


def test_no_credentials_at_all(rclone: Server, bucket: str, aws: pytest.MonkeyPatch) -> None:
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    aws.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreForbidden, match="AWS_ACCESS_KEY_ID") as caught:
        smd.Hook(rclone.url(bucket))
    assert secret not in str(caught.value)


def test_an_endpoint_where_nobody_listens(bucket: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        url = f"s3://{bucket}/run?endpoint_url=http://127.0.0.1:{port}"
        refused(url, StoreError, f"127.0.0.1:{port} cannot be reached")
    refused(
        f"s3://{bucket}/run?endpoint_url=http://nowhere.invalid", StoreError, "cannot be reached"
    )


def test_an_endpoint_that_says_nothing(bucket: str, proxy: FaultProxy) -> None:
    proxy.inject(HalfOpen())
    refused(proxy.url(bucket), StoreError, "no answer|failed|Timeout")


def test_before_the_ranks_are_known_too(
    rclone: Server, bucket: str, aws: pytest.MonkeyPatch
) -> None:
    aws.setenv("AWS_SECRET_ACCESS_KEY", WRONG)
    refused(rclone.url(bucket), StoreForbidden, "secret access key", include_workers="all")


def test_a_rank_that_does_not_save_asks_nobody(bucket: str, proxy: FaultProxy) -> None:
    smd.Hook(proxy.url(bucket), dry_run=True).close()
    smd.Hook(proxy.url(bucket), rank=1, world_size=2).close()
    smd.Hook(proxy.url(bucket), rank=2, world_size=4, include_workers=[0, 3]).close()
    assert proxy.requests == []


def test_urls_that_cannot_be_meant(bucket: str) -> None:
    refused(str(Path(f"s3://{bucket}/run")), ConfigurationError, "lost a slash")
    refused(f"s3://{bucket}/run?endpoint=http://x", ConfigurationError, "endpoint_url")


def test_a_run_that_is_there_already(rclone: Server, bucket: str) -> None:
    url = rclone.url(bucket)
    for _ in range(2):
        settings: dict[str, Any] = {
            "save_config": EVERY_STEP,
            "buffer_bytes": 64 << 20,
            "on_error": "raise",
        }
        with smd.Hook(url, resume=True, **settings) as hook:
            model = Net()
            hook.register_module(model)
            train(model, 2)
    refused(url, RunExists, "resume=True", rank=0, world_size=1)
    with smd.create_trial(url) as trial:
        assert [info.number for info in trial.attempts()] == [0, 1]
        assert trial.steps() == [0, 1]


def test_a_store_that_refuses_is_told_once_and_waited_for(
    bucket: str,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    url = proxy.url(bucket)
    caplog.set_level(logging.DEBUG)
    hook = smd.Hook(
        url,
        save_config=EVERY_STEP,
        include_collections=["weights"],
        buffer_bytes=64 << 20,
        on_error="raise",
        linger_s=0.05,
        spool_dir=str(tmp_path),
    )
    model = Net()
    hook.register_module(model)
    train(model, 3)
    until(lambda: _usage(hook).stored_steps >= 2, "the first steps")
    proxy.inject(Answer(403, "AccessDenied"), method="PUT")
    train(model, 5)
    until(lambda: hook._outlet.capture._ledger.trouble, "the uploader's trouble")  # type: ignore[union-attr]
    with pytest.raises(DrainTimeout) as caught:
        hook.close(timeout=1)
    (spool,) = tmp_path.glob("smdist-*/*/spool.json")
    message = str(caught.value)
    assert f"smdist recover {spool.parent}" in message
    assert f"bucket {bucket!r}" in message
    assert "they need s3:PutObject" in message
    assert "of 8 steps" in message
    _holds_no_secret(spool.parent)
    said = capfd.readouterr().err
    assert said.count("AccessDenied") == 1, said
    assert f"{bucket}" in said
    assert "nothing is lost" in said
    proxy.clear()
    until(lambda: not spool.exists(), "the uploader to finish by itself")
    said += capfd.readouterr().err
    assert "the store works again" in said
    assert SECRET not in said + message + caplog.text
    with smd.create_trial(url) as trial:
        assert trial.steps() == list(range(8))


def _usage(hook: smd.Hook) -> Usage:
    usage = hook.usage()
    assert usage is not None
    return usage


def _holds_no_secret(spool: Path) -> None:
    for path in spool.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    commands = subprocess.run(
        ["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True
    ).stdout
    mine = [line for line in commands.splitlines() if "smdist" in line and "rclone" not in line]
    assert any(spool.name in line for line in mine), "the uploader is at work"
    assert not [line for line in mine if SECRET in line]
