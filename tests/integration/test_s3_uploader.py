"""The uploader process and a bucket: what killed ones left, what is on its way, keys that expire."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from smdist.workers.spool.spool import UploadOptions
from tests.servers.s3 import (
    KEY,
    OTHER_KEY,
    OTHER_SECRET,
    SECRET,
    TOKEN,
    Server,
    add_user,
    aws,
    enforce_rights,
    moto,
    rclone,
)
from tests.support.leaks import assert_no_secret, assert_told_without_secret, no_leaks
from tests.support.proxy import Answer, FaultProxy, HalfOpen, proxied
from tests.support.uploader_rig import (
    Job,
    assert_exactly_once,
    open_ack_page,
    rank_process,
    read_store,
)
from tests.support.waiting import until

__all__ = ["aws", "moto", "no_leaks", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws", "no_leaks")]

MIB = 1 << 20
QUICK = UploadOptions(
    linger_s=0.02, segment_bytes=256 << 10, heartbeat_s=0.5, drain_deadline_s=60.0, nice=0
)


@pytest.fixture
def bucket(rclone: Server) -> str:
    return rclone.make_bucket(f"up-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(rclone: Server) -> Iterator[FaultProxy]:
    with proxied(rclone.port) as proxy:
        yield proxy


def stored_in(server: Server, bucket: str) -> Path:
    assert server.folder is not None
    return server.folder / bucket / "run"


def test_uploads_that_killed_writers_left_are_swept(
    rclone: Server, bucket: str, tmp_path: Path
) -> None:
    client = rclone.client()
    for seq in (0, 7):
        key = f"run/segments/worker_0/000000-{seq:08d}-dead.safetensors"
        client.create_multipart_upload(Bucket=bucket, Key=key)
    client.create_multipart_upload(Bucket=bucket, Key="run/segments/worker_1/000000-00000000-x")
    job = Job(root=str(tmp_path / "spools"), out_dir=rclone.url(bucket), upload=QUICK, ends="wait")
    with rank_process(job, tmp_path) as rank:
        rank.next("open")
        until(rank.uploader_pid, "an uploader")
        killed = rank.uploader_pid()
        os.kill(killed, signal.SIGKILL)
        until(lambda: rank.uploader_pid() not in (0, killed), "another one")
        rank.popen.kill()
        rank.rest()
        rank.popen.wait()
        until(lambda: not rank.spool.exists(), "the end of the uploader")
    assert rclone.uploads(bucket) == ["run/segments/worker_1/000000-00000000-x"], "not ours"
    stored = read_store(stored_in(rclone, bucket), job.elements)
    assert stored.last.state == "lost"
    assert_exactly_once(stored, rank)


def test_an_uploader_killed_within_a_multipart_upload(
    rclone: Server, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    upload = msgspec.structs.replace(QUICK, segment_bytes=80 * MIB)
    job = Job(
        root=str(tmp_path / "spools"),
        out_dir=proxy.url(bucket),
        steps=3,
        elements=17 * MIB,  # 68 MiB: five parts
        slots=2,
        upload=upload,
    )
    rule = proxy.inject(HalfOpen(), method="PUT", target="partNumber=2")
    with rank_process(job, tmp_path) as rank:
        until(lambda: rule.hits > 0, "a part that is under way")
        assert rclone.uploads(bucket)
        os.kill(rank.uploader_pid(), signal.SIGKILL)
        proxy.clear()
        rank.next("ended")
        until(lambda: not rank.spool.exists(), "the end of the uploader")
        rank.rest()
    assert rclone.uploads(bucket) == []
    stored = read_store(stored_in(rclone, bucket), job.elements)
    assert stored.last.state == "ended"
    assert_exactly_once(stored, rank)


def test_what_is_on_its_way_is_bounded(
    rclone: Server, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    upload = msgspec.structs.replace(QUICK, segment_bytes=100_000)  # a step is 80 kB
    job = Job(
        root=str(tmp_path / "spools"),
        out_dir=proxy.url(bucket),
        steps=30,
        slots=40,
        upload=upload,
    )
    rule = proxy.inject(HalfOpen(), method="PUT", target="segments/")
    with rank_process(job, tmp_path) as rank:
        rank.next("ended")  # all is captured: nobody waits for the network
        until(lambda: rule.hits >= 2, "segments on their way")
        with open_ack_page(rank.spool) as ack_page:
            assert ack_page is not None
            assert ack_page.acked <= 1, "nothing is acknowledged before it is stored"
        assert rule.hits <= 4
        proxy.clear()
        os.kill(rank.uploader_pid(), signal.SIGKILL)  # rather than wait for its timeouts
        until(lambda: not rank.spool.exists(), "the end of the uploader")
        rank.rest()
    stored = read_store(stored_in(rclone, bucket), job.elements)
    assert_exactly_once(stored, rank)
    assert stored.last.state == "ended"


def test_keys_that_expire_are_renewed(
    rclone: Server, bucket: str, proxy: FaultProxy, aws: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    write_profile(file, KEY, SECRET)
    aws.delenv("AWS_ACCESS_KEY_ID")
    aws.delenv("AWS_SECRET_ACCESS_KEY")
    aws.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    rule = proxy.inject(Answer(400, "ExpiredToken"), method="PUT", target="segments/", header=KEY)
    job = Job(root=str(tmp_path / "spools"), out_dir=proxy.url(bucket), upload=QUICK)
    with rank_process(job, tmp_path) as rank:
        until(lambda: rule.hits >= 2, "keys that have expired")
        with open_ack_page(rank.spool) as ack_page:
            assert ack_page is not None
            until(
                lambda: "expired" in ack_page.last_error,
                "the trouble in the acknowledgement page",
                90,
            )
        assert_told_without_secret(rank.spool)
        write_profile(file, OTHER_KEY, OTHER_SECRET)
        rank.next("ended")
        until(lambda: not rank.spool.exists(), "the end of the uploader")
        rank.rest()
    stored = read_store(stored_in(rclone, bucket), job.elements)
    assert_exactly_once(stored, rank)
    assert "expired" in rank.stderr()
    assert_no_secret(rank.stderr())


def write_profile(file: Path, key: str, secret: str) -> None:
    text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    text += f"aws_session_token = {TOKEN}\n"
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


def test_a_bucket_that_is_removed_and_comes_back(
    rclone: Server, bucket: str, tmp_path: Path
) -> None:
    folder = stored_in(rclone, bucket).parent
    client = rclone.client()
    client.delete_bucket(Bucket=bucket)
    assert not folder.exists()
    job = Job(root=str(tmp_path / "spools"), out_dir=rclone.url(bucket), upload=QUICK)
    with rank_process(job, tmp_path) as rank:
        until(lambda: "no such bucket" in rank.stderr(), "a word about it")
        with open_ack_page(rank.spool) as ack_page:
            assert ack_page is not None
            words = ("NoSuchBucket", bucket, "create it")
            until(lambda: all(word in ack_page.last_error for word in words), "the trouble")
        assert_told_without_secret(rank.spool)
        client.create_bucket(Bucket=bucket)
        until(lambda: not rank.spool.exists(), "the end of the uploader")
        rank.rest()
    assert rank.stderr().count("no such bucket") == 1
    stored = read_store(stored_in(rclone, bucket), job.elements)
    assert_exactly_once(stored, rank)


def test_rights_to_write_alone_are_enough(
    moto: Server, aws: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Leftovers may be neither listed as uploads nor removed: they stay, and nothing waits."""
    bucket = moto.make_bucket(f"up-{uuid.uuid4().hex[:12]}")
    orphan = "run/segments/worker_0/000000-00000003-dead.safetensors"
    moto.client().put_object(Bucket=bucket, Key=orphan, Body=b"x")
    key, secret = add_user(
        moto, uuid.uuid4().hex, ["s3:GetObject", "s3:ListBucket", "s3:PutObject"]
    )
    aws.setenv("AWS_ACCESS_KEY_ID", key)
    aws.setenv("AWS_SECRET_ACCESS_KEY", secret)
    aws.delenv("AWS_SESSION_TOKEN", raising=False)
    job = Job(root=str(tmp_path / "spools"), out_dir=moto.url(bucket), upload=QUICK)
    with enforce_rights(moto), rank_process(job, tmp_path) as rank:
        until(lambda: not rank.spool.exists(), "the end of the uploader")
        rank.rest()
    listed = moto.client().list_objects_v2(Bucket=bucket)["Contents"]
    keys = [entry["Key"] for entry in listed]
    assert orphan in keys
    assert "run/summaries/worker_0/000000.json" in keys
    assert rank.stderr() == ""
