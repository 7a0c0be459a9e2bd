"""A hook that is given a bucket: what it refuses when it is built, what it says when it is closed."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
from smdist.workers.capture.capture import Usage
from tests.servers.s3 import SECRET, TOKEN, Server, add_user, aws, enforce_rights, moto, rclone
from tests.support.leaks import WRONG, assert_no_secret, assert_told_without_secret, no_leaks
from tests.support.proxy import Answer, FaultProxy, HalfOpen, proxied
from tests.support.torch_jobs import EVERY_STEP, Net, train
from tests.support.waiting import until

__all__ = ["aws", "moto", "no_leaks", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws", "no_leaks")]

SECONDS = 45.0  # an answer within seconds, on a machine that is busy with other tests


@pytest.fixture
def bucket(rclone: Server) -> str:
    return rclone.make_bucket(f"hook-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(rclone: Server) -> Iterator[FaultProxy]:
    with proxied(rclone.port) as proxy:
        yield proxy


Refused = Callable[..., None]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Refused:
    """A hook is refused within seconds, and no secret is in what it says, logs or prints."""

    def refused(url: str, kind: type[SmdistError], words: str, **settings: Any) -> None:
        began = time.monotonic()
        with pytest.raises(kind, match=words) as caught:
            smd.Hook(url, **settings)
        assert time.monotonic() - began < SECONDS
        assert_no_secret(caught.value, *capfd.readouterr(), caplog.text)
        if isinstance(caught.value, StoreError):
            assert "''" not in str(caught.value), "an empty key says nothing"
            assert url.removeprefix("s3://").split("/")[0] in caught.value.detail, "the bucket"
            assert caught.value.operation in str(caught.value)

    return refused


def test_a_wrong_secret(
    rclone: Server, bucket: str, aws: pytest.MonkeyPatch, refused: Refused
) -> None:
    aws.setenv("AWS_SECRET_ACCESS_KEY", WRONG)
    refused(rclone.url(bucket), StoreForbidden, "secret access key does not match")


def test_an_unknown_key(
    rclone: Server, bucket: str, aws: pytest.MonkeyPatch, refused: Refused
) -> None:
    aws.setenv("AWS_ACCESS_KEY_ID", "NOBODY")
    refused(rclone.url(bucket), StoreForbidden, "does not know this access key")


@pytest.mark.parametrize("name", ["rclone", "moto"])
def test_a_missing_bucket(name: str, request: pytest.FixtureRequest, refused: Refused) -> None:
    server: Server = request.getfixturevalue(name)
    refused(server.url("nowhere-at-all"), StoreError, "there is no such bucket")


def test_read_only_credentials(moto: Server, aws: pytest.MonkeyPatch, refused: Refused) -> None:
    bucket = moto.make_bucket(f"hook-{uuid.uuid4().hex[:12]}")
    key, secret = add_user(moto, uuid.uuid4().hex, ["s3:GetObject", "s3:ListBucket"])
    aws.setenv("AWS_ACCESS_KEY_ID", key)
    aws.setenv("AWS_SECRET_ACCESS_KEY", secret)
    aws.delenv("AWS_SESSION_TOKEN", raising=False)
    with enforce_rights(moto):
        refused(moto.url(bucket), StoreForbidden, "can be read but not written")


def test_no_credentials_at_all(rclone: Server, bucket: str, aws: pytest.MonkeyPatch) -> None:
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    aws.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreForbidden, match="AWS_ACCESS_KEY_ID") as caught:
        smd.Hook(rclone.url(bucket))
    assert secret not in str(caught.value)


def test_an_endpoint_where_nobody_listens(bucket: str, refused: Refused) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        url = f"s3://{bucket}/run?endpoint_url=http://127.0.0.1:{port}"
        refused(url, StoreError, rf"127.0.0.1:{port} cannot be reached \(Connection refused\)")
    refused(
        f"s3://{bucket}/run?endpoint_url=http://nowhere.invalid", StoreError, r"reached \(.*[Nn]ame"
    )


def test_an_endpoint_that_says_nothing(bucket: str, proxy: FaultProxy, refused: Refused) -> None:
    proxy.inject(HalfOpen())
    refused(proxy.url(bucket), StoreError, "no answer|failed|Timeout")


def test_before_the_ranks_are_known_too(
    rclone: Server, bucket: str, aws: pytest.MonkeyPatch, refused: Refused
) -> None:
    aws.setenv("AWS_SECRET_ACCESS_KEY", WRONG)
    refused(rclone.url(bucket), StoreForbidden, "secret access key", include_workers="all")


def test_a_rank_that_does_not_save_asks_nobody(bucket: str, proxy: FaultProxy) -> None:
    smd.Hook(proxy.url(bucket), dry_run=True).close()
    smd.Hook(proxy.url(bucket), rank=1, world_size=2).close()
    smd.Hook(proxy.url(bucket), rank=2, world_size=4, include_workers=[0, 3]).close()
    assert proxy.requests == []


def test_urls_that_cannot_be_meant(bucket: str, refused: Refused) -> None:
    refused(str(Path(f"s3://{bucket}/run")), ConfigurationError, "lost a slash")
    refused(f"s3://{bucket}/run?endpoint=http://x", ConfigurationError, "endpoint_url")


def test_a_run_that_is_there_already(rclone: Server, bucket: str, refused: Refused) -> None:
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
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    url = proxy.url(bucket)
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
    assert 0 < _usage(hook).stored_bytes <= _usage(hook).captured_bytes, "counted alike"
    proxy.inject(Answer(403, "AccessDenied"), method="PUT")
    train(model, 5)
    until(lambda: hook._core.session.capture._ack_page.last_error, "the uploader's trouble")  # type: ignore[union-attr]
    with pytest.raises(DrainTimeout) as caught:
        hook.close(timeout=5)
    (spool,) = tmp_path.glob("smdist-*/*/spool.json")
    message = str(caught.value)
    assert f"smdist recover {spool.parent}" in message
    assert f"bucket {bucket!r}" in message
    assert "they need s3:PutObject" in message
    assert "of 8 steps" in message
    assert_told_without_secret(spool.parent)
    said = capfd.readouterr().err
    assert said.count("AccessDenied") == 1, said
    assert f"{bucket}" in said
    assert "nothing is lost" in said
    proxy.clear()
    until(lambda: not spool.exists(), "the uploader to finish by itself")
    said += capfd.readouterr().err
    assert "the store works again" in said
    assert_no_secret(said, message)
    with smd.create_trial(url) as trial:
        assert trial.steps() == list(range(8))


@pytest.mark.parametrize("entered", [True, False])
def test_the_advice_to_recover_can_be_followed_beside_the_living_process(
    bucket: str,
    proxy: FaultProxy,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    entered: bool,
) -> None:
    """`entered`: the store closes once the run has begun, else before anything is in it."""
    hook = smd.Hook(
        proxy.url(bucket),
        save_config=EVERY_STEP,
        include_collections=["weights"],
        buffer_bytes=64 << 20,
        linger_s=0.05,
        drain_deadline_s=0.5,
        spool_dir=str(tmp_path),
    )
    model = Net()
    hook.register_module(model)
    if entered:
        train(model, 3)
        until(lambda: _usage(hook).stored_steps >= 1, "the run")
    proxy.inject(Answer(403, "AccessDenied"), method="PUT")
    train(model, 5 if entered else 8)
    hook.close(timeout=0.1)
    supervisor = hook._core.session._supervisor
    assert supervisor is not None
    assert supervisor.join(60), "the uploader to give up"
    said = capfd.readouterr().err
    found = re.search(r"send it later with: (smdist recover .+)", said)
    assert found is not None, said
    words = shlex.split(found[1])[1:]
    proxy.clear()
    command = [sys.executable, "-c", "from smdist.cli import main; main()", *words]
    subprocess.run(command, check=True)
    assert list(tmp_path.glob("smdist-*/*/spool.json")) == []
    with smd.create_trial(proxy.url(bucket)) as trial:
        assert trial.steps() == list(range(8))
        assert trial.loaded_all_steps


def _usage(hook: smd.Hook) -> Usage:
    usage = hook.usage()
    assert usage is not None
    return usage


@pytest.mark.parametrize("shape", [str, quote, lambda text: text[:15], lambda text: f"k={text!r}"])
def test_a_secret_would_be_seen(shape: Callable[[str], str], tmp_path: Path) -> None:
    for secret in (SECRET, WRONG, TOKEN):
        leak = tmp_path / "log"
        leak.write_text(f"before {shape(secret)} after")
        for place in (tmp_path, leak.read_text(), ValueError(leak.read_text())):
            with pytest.raises(AssertionError, match="holds a secret"):
                assert_no_secret(place)
        leak.unlink()
