"""Servers that know less of S3 than others, and settings that change or are wrong."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

import smdist
from smdist.errors import (
    ConfigurationError,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreForbidden,
)
from smdist.storage import check_writable, open_store
from smdist.storage.s3.store import S3Options, S3Statistics, S3Store, open_s3
from tests.servers.s3 import (
    KEY,
    OTHER_KEY,
    OTHER_SECRET,
    SECRET,
    TOKEN,
    Server,
    aws,
    moto,
    rclone,
)
from tests.support.leaks import assert_no_secret, no_leaks
from tests.support.proxy import Answer, Chunked, Fault, FaultProxy, Latency, Reset, proxied

__all__ = ["aws", "moto", "no_leaks", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws", "no_leaks")]

T = TypeVar("T")
MIB = 1 << 20
OPTIONS = S3Options(
    first_pause_s=0.01, multipart_bytes=16 * MIB, part_bytes=8 * MIB, deadline_s=20.0
)


@pytest.fixture
def bucket(rclone: Server) -> str:
    return rclone.make_bucket(f"odd-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(rclone: Server) -> Iterator[FaultProxy]:
    with proxied(rclone.port) as running:
        yield running


def run(url: str, work: Callable[[S3Store], Awaitable[T]], options: S3Options = OPTIONS) -> T:
    async def session() -> T:
        store = open_s3(url, options)
        try:
            return await work(store)
        finally:
            await store.close()
            assert store.statistics().in_flight_bytes == 0

    return asyncio.run(session())


# -- credentials that change ---------------------------------------------------------------------


@pytest.fixture
def profile(aws: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of credentials, which a person or a program may replace at any time."""
    file = tmp_path / "credentials"
    write_profile(file, KEY, SECRET)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        aws.delenv(name)
    aws.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    return file


def write_profile(file: Path, key: str, secret: str) -> None:
    text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


@pytest.mark.parametrize(
    "code",
    [
        "InvalidAccessKeyId",
        "InvalidToken",
        "InvalidTokenId",
        "SignatureDoesNotMatch",
        "AccessDenied",
    ],
)
def test_credentials_that_were_replaced_are_read_again(
    bucket: str, proxy: FaultProxy, profile: Path, code: str
) -> None:
    async def work(store: S3Store) -> S3Statistics:
        await store.put("before", [b"x"])
        rule = proxy.inject(Answer(403, code), header=KEY)
        write_profile(profile, OTHER_KEY, OTHER_SECRET)
        await asyncio.gather(*(store.put(f"k{i}", [b"x"]) for i in range(4)))
        assert rule.hits <= 4, "each put was refused once at most"
        return store.statistics()

    found = run(proxy.url(bucket), work)
    assert found.renewals == 1
    assert len(run(proxy.url(bucket), lambda store: store.list())) == 5


def test_credentials_that_stayed_the_same_are_not_tried_again(
    bucket: str, proxy: FaultProxy, profile: Path
) -> None:
    proxy.inject(Answer(403, "InvalidAccessKeyId"), header=KEY)
    replaced = profile.unlink

    async def work(store: S3Store) -> None:
        for _ in range(3):
            with pytest.raises(StoreForbidden, match="does not know this access key"):
                await store.put("k", [b"x"])
        assert proxy.count() == 3
        assert store.statistics().renewals == 0
        replaced()
        with pytest.raises(StoreForbidden):
            await store.put("k", [b"x"])
        write_profile(profile, OTHER_KEY, OTHER_SECRET)
        deadline = time.monotonic() + 30
        while not await succeeds(store):  # looks again now and then, not each time
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    run(proxy.url(bucket), work, replace(OPTIONS, look_again_s=0.5))


async def succeeds(store: S3Store) -> bool:
    try:
        await store.put("k", [b"x"])
    except StoreForbidden:
        return False
    return True


def test_a_file_that_was_empty_when_the_store_was_opened(
    bucket: str, proxy: FaultProxy, profile: Path
) -> None:
    profile.write_text("")

    async def work(store: S3Store) -> None:
        with pytest.raises(StoreForbidden, match="no AWS credentials"):
            await store.put("k", [b"x"])
        write_profile(profile, KEY, SECRET)
        await store.put("k", [b"x"])

    run(proxy.url(bucket), work, replace(OPTIONS, look_again_s=0.0))


# -- the region ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "query", "region"),
    [
        ({}, "", "us-east-1"),
        ({"AWS_REGION": "eu-west-1"}, "", "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-2"}, "", "eu-west-2"),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-2"}, "", "eu-west-1"),
        ({"AWS_REGION": "eu-west-1"}, "&region=eu-west-3", "eu-west-3"),
    ],
)
def test_the_region_that_requests_are_signed_for(
    moto: Server, aws: pytest.MonkeyPatch, environment: dict[str, str], query: str, region: str
) -> None:
    bucket = moto.make_bucket(f"odd-{uuid.uuid4().hex[:12]}")
    for name, value in environment.items():
        aws.setenv(name, value)
    with proxied(moto.port) as proxy:
        signed = proxy.inject(Latency(0), header=f"/{region}/s3/aws4_request")
        url = proxy.url(bucket) + query
        run(url, lambda store: store.put("k", [b"x"]))
        assert signed.hits == proxy.count() == 1
        check_writable(url)
        assert signed.hits == proxy.count() > 1


# -- what a server does not know -----------------------------------------------------------------

NO_SUCH_LISTING = [
    Answer(501, "NotImplemented"),
    Answer(501, ""),
    Answer(405, "MethodNotAllowed"),
    Answer(405, ""),
    Answer(404, "NoSuchKey"),
    Answer(404, ""),
]


@pytest.mark.parametrize("answer", NO_SUCH_LISTING, ids=str)
def test_a_server_that_lists_no_uploads_has_none(
    bucket: str, proxy: FaultProxy, answer: Answer
) -> None:
    rule = proxy.inject(answer, method="GET", target=r"\?.*uploads")
    started = time.monotonic()
    assert run(proxy.url(bucket), lambda store: store.sweep_uploads("segments/")) == 0
    assert rule.hits == 1
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("answer", [Answer(501, "NotImplemented"), Answer(501, "")], ids=str)
@pytest.mark.parametrize("size", [10, 17 * MIB])
def test_a_server_that_refuses_conditions(
    rclone: Server, bucket: str, proxy: FaultProxy, answer: Answer, size: int
) -> None:
    rule = proxy.inject(answer, header="(?i)if-none-match")
    data = os.urandom(size)

    async def work(store: S3Store) -> bytes:
        await store.put("k", [data], if_absent=True)
        with pytest.raises(ObjectExists):
            await store.put("k", [b"other"], if_absent=True)
        await store.put("l", [b"x"], if_absent=True)
        return await store.get("k")

    assert run(proxy.url(bucket), work) == data
    assert rule.hits == 1, "asked for once"
    assert rclone.uploads(bucket) == []


def test_answers_that_do_not_say_how_long_they_are(bucket: str, proxy: FaultProxy) -> None:
    data = os.urandom(MIB)

    async def work(store: S3Store) -> None:
        await store.put("k", [data])
        await store.put("empty", [b""])
        proxy.inject(Chunked(), method="GET")
        assert await store.get("k") == data
        assert await store.get("k", 10, 2000) == data[10:2000]
        assert await store.get("empty") == b""
        assert await store.list() == ["empty", "k"]
        with pytest.raises(ObjectNotFound):
            await store.get("absent")
        assert not store.statistics().retries

    run(proxy.url(bucket), work)


def test_a_body_of_unknown_length_that_breaks_off(bucket: str, proxy: FaultProxy) -> None:
    data = os.urandom(200_000)
    run(proxy.url(bucket), lambda store: store.put("k", [data]))
    proxy.inject(Chunked(whole=False), method="GET", times=1)
    assert run(proxy.url(bucket), lambda store: store.get("k")) == data
    assert proxy.count("GET") == 2


def test_whole_objects_count_as_under_way_too(bucket: str, proxy: FaultProxy) -> None:
    async def work(store: S3Store) -> S3Statistics:
        await store.put("k", [bytes(MIB)])
        gets = [store.get("k") for _ in range(12)] + [store.get("k", 0, MIB) for _ in range(12)]
        assert {len(data) for data in await asyncio.gather(*gets)} == {MIB}
        return store.statistics()

    options = replace(OPTIONS, in_flight_bytes=2 * MIB, concurrency=4)
    assert MIB < run(proxy.url(bucket), work, options).most_in_flight_bytes <= 2 * MIB
    alone = replace(OPTIONS, in_flight_bytes=1000)
    assert run(proxy.url(bucket), work, alone).most_in_flight_bytes == MIB


# -- a web server --------------------------------------------------------------------------------


def test_a_web_server_is_no_store(bucket: str, proxy: FaultProxy) -> None:
    proxy.inject(Answer(404, ""))
    url = proxy.url(bucket)
    for work in (
        lambda store: store.get("k"),
        lambda store: store.get("k", 5, 9),
        lambda store: store.list(),
        lambda store: store.put("k", [b"x"]),
        lambda store: store.put("k", [b"x"], if_absent=True),
        lambda store: store.delete("k"),
    ):
        with pytest.raises(StoreError, match="this is not an S3 service") as caught:
            run(url, work)
        assert not isinstance(caught.value, (ObjectNotFound, StoreForbidden))
    with pytest.raises(StoreError, match="this is not an S3 service"):
        check_writable(url)
    with pytest.raises(StoreError, match="this is not an S3 service"):
        smdist.create_trial(url)


# -- answers of 200 that mean nothing --------------------------------------------------------------

WRITES = [("PUT", "/k$", 10), ("PUT", "partNumber=2", 17 * MIB), ("POST", "uploads", 17 * MIB)]


EMPTY, PAGE = Answer(200, "", empty=True), Answer(200, "")


@pytest.mark.parametrize("answer", [EMPTY, PAGE], ids=["empty", "page"])
@pytest.mark.parametrize(("method", "target", "size"), WRITES)
def test_what_is_answered_without_an_etag_is_sent_again(
    bucket: str, proxy: FaultProxy, answer: Answer, method: str, target: str, size: int
) -> None:
    rule = proxy.inject(answer, method=method, target=target, times=2)
    data = os.urandom(size)

    async def work(store: S3Store) -> bytes:
        await store.put("k", [data], if_absent=True)
        return await store.get("k")

    assert run(proxy.url(bucket), work) == data
    assert rule.hits == 2


@pytest.mark.parametrize(
    "answer", [Answer(200, "InternalError"), Answer(200, "SlowDown"), EMPTY, PAGE], ids=str
)
def test_an_upload_is_not_complete_because_of_a_200(
    rclone: Server, bucket: str, proxy: FaultProxy, answer: Answer
) -> None:
    rule = proxy.inject(answer, method="POST", target="uploadId=", times=2)
    data = os.urandom(17 * MIB)

    async def work(store: S3Store) -> bytes:
        await store.put("k", [data])
        return await store.get("k")

    assert run(proxy.url(bucket), work) == data
    assert rule.hits == 2
    assert rclone.uploads(bucket) == []


@pytest.mark.parametrize("size", [10, 17 * MIB])
def test_a_proxy_that_answers_200_to_everything_stores_nothing(
    bucket: str, proxy: FaultProxy, size: int
) -> None:
    proxy.inject(EMPTY)
    options = replace(OPTIONS, deadline_s=1.0)
    with pytest.raises(StoreError, match=r"'k'.*without (ETag|UploadId).*attempts") as caught:
        run(proxy.url(bucket), lambda store: store.put("k", [bytes(size)]), options)
    assert not isinstance(caught.value, StoreForbidden)
    options = replace(OPTIONS, probe_timeout_s=2.0)
    with pytest.raises(StoreError, match="without ETag"):
        run(proxy.url(bucket), lambda store: store.check(), options)


# -- asked early ---------------------------------------------------------------------------------

PASSING: list[Fault] = [
    Answer(503, "SlowDown"),
    Answer(500, "InternalError"),
    Answer(503, ""),
    Reset("before"),
]


@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_a_hiccup_while_the_place_is_checked(bucket: str, proxy: FaultProxy, fault: Fault) -> None:
    rule = proxy.inject(fault, times=3)
    check_writable(proxy.url(bucket))
    assert rule.hits == 3, "asked until it answered"


@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_a_hiccup_that_stays_is_called_what_it_is(
    bucket: str, proxy: FaultProxy, fault: Fault
) -> None:
    rule = proxy.inject(fault)
    options = replace(OPTIONS, probe_timeout_s=7.0)
    with pytest.raises(StoreError, match="attempts") as caught:
        run(proxy.url(bucket), lambda store: store.check(), options)
    assert not isinstance(caught.value, StoreForbidden)
    assert "read-only" not in str(caught.value)
    assert 1 < rule.hits < 40, "asked again and again, with pauses"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(403, "SignatureDoesNotMatch"), "secret access key"),
        (Answer(404, "NoSuchBucket"), "no such bucket"),
        (Answer(403, "ExpiredToken"), "expired"),
        (Answer(403, "AccessDenied"), "lack a permission"),
    ],
)
def test_permanent_errors_are_raised_without_retries(
    bucket: str, proxy: FaultProxy, answer: Answer, words: str
) -> None:
    proxy.inject(answer)
    with pytest.raises(StoreForbidden, match=words):
        check_writable(proxy.url(bucket))
    assert proxy.count("PUT") == 1


# -- secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3:/ME:HIDDEN@bucket/run",
        "minio://ME:HIDDEN@host/bucket",
        "https://ME:HIDDEN@host/bucket",
        "https://ME:HID/HIDDEN@host/bucket",
        "https://host/bucket?X-Amz-Signature=HIDDEN",
        "file://ME:HIDDEN@host/path",
        "s3://ME:HIDDEN@bucket/run",
        "s3://ME:x/HIDDEN@bucket/run",
        "s3://bucket/../ME:HIDDEN@h/run",
        "s3://bucket/run?ME:HIDDEN@h",
        "s3://bucket/run?endpoint_url=ME:HIDDEN@h:1",
        "s3://bucket/run?endpoint_url=http://ME:HIDDEN@h:1",
        "s3://bucket/run?endpoint_url=http://ME:x/HIDDEN@h:1",
        "s3://bucket/run?aws_session_token=HIDDEN",
    ],
)
def test_no_message_shows_credentials_of_a_url(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert "HIDDEN" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["ME:HIDDEN@127.0.0.1:9", "http://ME:HIDDEN@127.0.0.1:9"])
def test_no_message_shows_credentials_of_the_environment(
    aws: pytest.MonkeyPatch, endpoint: str
) -> None:
    aws.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigurationError, match="endpoint_url") as caught:
        check_writable("s3://bucket/run")
    assert "HIDDEN" not in str(caught.value)


def test_a_script_that_logs_everything_gets_no_secret_of_ours(
    rclone: Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        rclone.client().list_objects_v2(Bucket=bucket)
        assert "CanonicalRequest" in caplog.text, "those of others are left alone"
        caplog.clear()
        check_writable(rclone.url(bucket))
        run(rclone.url(bucket), lambda store: store.put("k", [b"x"]))
    assert TOKEN not in caplog.text
    assert_no_secret(caplog.text)
