"""The S3 store against real servers, and against a network that fails in every way it knows."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from smdist.errors import (
    ConfigurationError,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
)
from smdist.storage import check_writable, open_store
from smdist.storage.s3.store import S3Options, S3Statistics, S3Store, open_s3
from tests.servers.s3 import (
    KEY,
    OTHER_KEY,
    OTHER_SECRET,
    SECRET,
    Server,
    add_user,
    aws,
    enforce_rights,
    moto,
    rclone,
    start_rclone,
)
from tests.support.leaks import assert_no_secret, no_leaks
from tests.support.proxy import (
    Answer,
    Cut,
    Fault,
    FaultProxy,
    HalfOpen,
    Hold,
    Latency,
    Reset,
    Slow,
    proxied,
)
from tests.support.waiting import until_async

__all__ = ["aws", "moto", "no_leaks", "rclone"]  # fixtures

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws", "no_leaks")]

T = TypeVar("T")
MIB = 1 << 20
PATIENT = S3Options(first_pause_s=0.01, multipart_bytes=16 * MIB, part_bytes=8 * MIB)
# Notices a silent server soon, and lets a busy machine answer.
QUICK = replace(PATIENT, stall_s=2.0, connect_timeout_s=1.0)


@pytest.fixture(params=["rclone", "moto"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def bucket(server: Server) -> str:
    return server.make_bucket(f"b-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with proxied(server.port) as running:
        yield running


def run(url: str, work: Callable[[S3Store], Awaitable[T]], options: S3Options = PATIENT) -> T:
    async def session() -> T:
        store = open_s3(url, options)
        try:
            return await work(store)
        finally:
            await store.close()
            assert store.statistics().in_flight_bytes == 0

    return asyncio.run(session())


def content(server: Server, bucket: str, key: str) -> bytes:
    data: bytes = server.client().get_object(Bucket=bucket, Key=f"run/{key}")["Body"].read()
    return data


# -- large, many, bounded ------------------------------------------------------------------------


def test_a_large_object_goes_in_parts(server: Server, bucket: str) -> None:
    block = os.urandom(3 * MIB + 17)
    data = [memoryview(block)] * 7

    async def work(store: S3Store) -> bytes:
        await store.put("large", data)
        assert store.statistics().requests["upload_part"] == 3
        assert store.statistics().sent_bytes == 7 * len(block)
        return await store.get("large", len(block) - 5, len(block) + 5)

    assert run(server.url(bucket), work) == block[-5:] + block[:5]
    assert content(server, bucket, "large") == block * 7
    assert server.uploads(bucket) == []


def test_more_keys_than_a_page(server: Server, bucket: str) -> None:
    keys = [f"a/{i:04}" for i in range(1003)]
    if server.folder is not None:
        (server.folder / bucket / "run" / "a").mkdir(parents=True)
        for key in keys:
            (server.folder / bucket / "run" / key).write_bytes(b"x")

    async def work(store: S3Store) -> tuple[list[str], list[str]]:
        if server.folder is None:
            await asyncio.gather(*(store.put(key, [b"x"]) for key in keys))
        return list(await store.list("a/")), list(await store.list("a/", after="a/0998"))

    assert run(server.url(bucket), work) == (keys, keys[999:])


def test_requests_and_bytes_under_way_are_bounded(server: Server, bucket: str) -> None:
    options = S3Options(in_flight_bytes=2 * MIB, concurrency=3)
    data = [bytes(MIB)]

    async def work(store: S3Store) -> None:
        await asyncio.gather(
            *(store.put(f"k{i}", data) for i in range(8)), store.put("b", data * 3)
        )
        found = store.statistics()
        assert found.requests["put_object"] == 9
        # One that is larger than the limit goes alone.
        assert found.most_in_flight_bytes == 3 * MIB
        assert len(await store.list()) == 9

    run(server.url(bucket), work, options)


def test_bytes_of_answers_are_bounded_too(server: Server, bucket: str) -> None:
    options = replace(PATIENT, in_flight_bytes=2 * MIB, concurrency=8)

    async def work(store: S3Store) -> S3Statistics:
        await store.put("k", [bytes(MIB)])
        ranges = [store.get("k", 0, MIB) for _ in range(12)]
        assert {len(data) for data in await asyncio.gather(*ranges)} == {MIB}
        assert MIB < store.statistics().most_in_flight_bytes <= 2 * MIB
        assert len(await store.get("k", 0, 100 * MIB)) == MIB, "larger than all goes alone"
        return store.statistics()

    found = run(server.url(bucket), work, options)
    assert found.requests["get_object"] == 13
    assert found.received_bytes == 13 * MIB


def test_signed_payloads_too(rclone: Server) -> None:
    bucket = rclone.make_bucket(f"b-{uuid.uuid4().hex[:12]}")
    data = [os.urandom(MIB), b"tail"]
    url = f"{rclone.url(bucket)}&payload_signing=on"
    run(url, lambda store: store.put("k", data))
    assert content(rclone, bucket, "k") == b"".join(data)


def test_one_store_on_two_loops(rclone: Server) -> None:
    store = open_s3(rclone.url(rclone.make_bucket(f"b-{uuid.uuid4().hex[:12]}")))

    async def use(key: str) -> list[str]:
        await store.put(key, [b"x"])
        found = list(await store.list())
        await store.close()
        return found

    assert asyncio.run(use("a")) == ["a"]
    assert asyncio.run(use("b")) == ["a", "b"]


# -- faults that pass ----------------------------------------------------------------------------

PASSING: list[Fault] = [
    Answer(500, "InternalError"),
    Answer(502, "BadGateway"),
    Answer(503, "SlowDown"),
    Answer(503, "SlowDown", early=True),
    Answer(429, "TooManyRequests"),
    Answer(400, "RequestTimeout"),
    Reset("before"),
    Reset("after"),
    HalfOpen(),
    HalfOpen(reads=False),
]


@pytest.mark.parametrize("fault", PASSING, ids=str)
@pytest.mark.parametrize("size", [1000, 6 * MIB])
def test_a_put_outlives(rclone: Server, fault: Fault, size: int) -> None:
    bucket, data = rclone.make_bucket(f"b-{uuid.uuid4().hex[:12]}"), os.urandom(size)
    with proxied(rclone.port) as proxy:
        rule = proxy.inject(fault, method="PUT", times=2)

        async def work(store: S3Store) -> int:
            await store.put("k", [data])
            return sum(store.statistics().retries.values())

        silent = isinstance(fault, HalfOpen)  # as is a server that a busy machine holds up
        retries = run(proxy.url(bucket), work, QUICK if silent else PATIENT)
        assert rule.hits == 2
        assert retries == 2 or (silent and retries > 2)
        assert proxy.count("PUT") == retries + 1
    assert content(rclone, bucket, "k") == data


@pytest.mark.parametrize("fault", [*PASSING, Cut(100_000), Cut(0), Slow(20)], ids=str)
def test_a_get_outlives(rclone: Server, fault: Fault) -> None:
    bucket, data = rclone.make_bucket(f"b-{uuid.uuid4().hex[:12]}"), os.urandom(200_000)
    rclone.client().put_object(Bucket=bucket, Key="run/k", Body=data)
    silent = isinstance(fault, (HalfOpen, Slow))
    options = replace(QUICK, slowest_bytes_per_s=MIB) if silent else PATIENT
    with proxied(rclone.port) as proxy:
        rule = proxy.inject(fault, method="GET", times=1)
        assert run(proxy.url(bucket), lambda store: store.get("k"), options) == data
        assert rule.hits == 1
        assert proxy.count("GET") == 2 or (silent and proxy.count("GET") > 2)
        proxy.inject(fault, method="GET", times=1)
        assert run(proxy.url(bucket), lambda store: store.list(), options) == ["k"]


def test_a_server_that_fails_at_random(server: Server, bucket: str, proxy: FaultProxy) -> None:
    faults: list[Fault] = [Answer(503, "SlowDown"), Reset("before"), Reset("after")]
    for seed, fault in enumerate(faults):
        proxy.inject(fault, probability=0.15, seed=seed)
    blocks = [os.urandom(50_000) for _ in range(20)]

    async def work(store: S3Store) -> None:
        await asyncio.gather(*(store.put(f"k{i:02}", [b]) for i, b in enumerate(blocks)))
        assert await asyncio.gather(*(store.get(f"k{i:02}") for i in range(20))) == blocks
        assert len(await store.list()) == 20
        assert store.statistics().retries

    run(proxy.url(bucket), work)


def test_latency_is_paid_side_by_side(server: Server, bucket: str, proxy: FaultProxy) -> None:
    proxy.inject(Latency(0.5))

    async def work(store: S3Store) -> int:
        await store.put("first", [b"x"])
        most = 0

        async def put(name: str) -> None:
            nonlocal most
            await store.put(name, [b"x" * 1000])
            most = max(most, store.statistics().most_in_flight_bytes)

        await asyncio.gather(*(put(f"k{i}") for i in range(16)))
        return most

    assert run(proxy.url(bucket), work) >= 8 * 1000


def test_expired_credentials_are_read_again(
    rclone: Server, tmp_path: Path, aws: pytest.MonkeyPatch
) -> None:
    bucket = rclone.make_bucket(f"b-{uuid.uuid4().hex[:12]}")
    file = tmp_path / "credentials"
    _write_profile(file, KEY, SECRET)
    aws.delenv("AWS_ACCESS_KEY_ID")
    aws.delenv("AWS_SECRET_ACCESS_KEY")
    aws.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with proxied(rclone.port) as proxy:

        async def work(store: S3Store) -> None:
            await store.put("before", [b"x"])
            rule = proxy.inject(Answer(400, "ExpiredToken"), header=KEY)
            puts = [asyncio.ensure_future(store.put(f"k{i}", [b"x"])) for i in range(4)]
            await until_async(lambda: rule.hits >= 4, "the requests")
            _write_profile(file, OTHER_KEY, OTHER_SECRET)
            await asyncio.gather(*puts)
            assert store.statistics().renewals >= 1

        options = S3Options(first_pause_s=0.05, most_pause_s=0.2, deadline_s=30.0)
        run(proxy.url(bucket), work, options)
        proxy.inject(Answer(400, "ExpiredToken"))
        with pytest.raises(StoreForbidden, match="renew them"):
            run(
                proxy.url(bucket),
                lambda store: store.put("never", [b"x"]),
                replace(options, deadline_s=1.0),
            )


def _write_profile(file: Path, key: str, secret: str) -> None:
    text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


# -- faults that stay ----------------------------------------------------------------------------


def test_a_deadline_ends_the_retries(server: Server, bucket: str, proxy: FaultProxy) -> None:
    proxy.inject(Answer(503, "SlowDown"))
    options = S3Options(deadline_s=5.0, first_pause_s=0.05, most_pause_s=0.5)
    started = time.monotonic()
    with pytest.raises(StoreError, match=rf"put 'a/k'.*{bucket}.*SlowDown.*attempts") as caught:
        run(proxy.url(bucket), lambda store: store.put("a/k", [b"x"]), options)
    assert type(caught.value) is StoreError
    assert time.monotonic() - started < 30
    assert 2 < proxy.count("PUT") < 40


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (Answer(403, "AccessDenied"), StoreForbidden, "s3:PutObject"),
        (Answer(404, "NoSuchBucket"), StoreForbidden, "create it"),
        (Answer(403, "SignatureDoesNotMatch"), StoreForbidden, "secret access key"),
        (Answer(403, "InvalidAccessKeyId"), StoreForbidden, "AWS_ACCESS_KEY_ID"),
        (Answer(403, "RequestTimeTooSkewed"), StoreForbidden, "clock"),
        (Answer(507, "InsufficientStorage"), StoreFull, "the store is full"),
        (Answer(400, "SomethingNew"), StoreForbidden, r"SomethingNew \(injected\)"),
    ],
)
def test_permanent_errors_of_a_put_are_raised_at_once(
    rclone: Server, answer: Answer, kind: type[StoreError], words: str
) -> None:
    bucket = rclone.make_bucket(f"b-{uuid.uuid4().hex[:12]}")
    with proxied(rclone.port) as proxy:
        proxy.inject(answer)
        with pytest.raises(kind, match=rf"put 'k'.*{bucket}.*{words}") as caught:
            run(proxy.url(bucket), lambda store: store.put("k", [b"x"]))
        assert proxy.count() == 1
    assert_no_secret(caught.value)


def test_only_a_missing_object_is_not_found(server: Server, bucket: str) -> None:
    with pytest.raises(ObjectNotFound):
        run(server.url(bucket), lambda store: store.get("k"))
    gone = server.url("no-such-bucket-here")
    for work in (
        lambda store: store.get("k"),
        lambda store: store.get("k", 5, 5),
        lambda store: store.list(),
        lambda store: store.put("k", [b"x"]),
        lambda store: store.put("k", [b"x"], if_absent=True),
    ):
        with pytest.raises(StoreForbidden, match="NoSuchBucket"):
            run(gone, work)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid:80"])
def test_an_endpoint_that_is_not_there(endpoint: str) -> None:
    url, host = f"s3://bucket/x?endpoint_url={endpoint}", endpoint.removesuffix(":80")
    options = S3Options(deadline_s=0.5, connect_timeout_s=1.0, stall_s=20.0)
    with pytest.raises(StoreError, match=rf"{host}.* cannot be reached \(.+\)") as caught:
        run(url, lambda store: store.get("k"), options)
    assert type(caught.value) is StoreError


# -- conditional puts ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 17 * MIB])
def test_a_conditional_put_whose_answer_got_lost_is_ours(
    server: Server, bucket: str, proxy: FaultProxy, size: int
) -> None:
    last = "PUT" if size < MIB else "POST"
    proxy.inject(Reset("after"), method=last, target="uploadId|/k(\\?x-id=.*)?$", times=1)
    data = os.urandom(size)
    run(proxy.url(bucket), lambda store: store.put("k", [data], if_absent=True))
    assert content(server, bucket, "k") == data
    with pytest.raises(ObjectExists):
        run(proxy.url(bucket), lambda store: store.put("k", [data], if_absent=True))
    assert server.uploads(bucket) == []


def test_a_conditional_put_that_another_won_meanwhile(moto: Server) -> None:
    bucket = moto.make_bucket(f"b-{uuid.uuid4().hex[:12]}")
    with proxied(moto.port) as proxy:
        proxy.inject(Reset("before"), method="PUT", times=1)

        async def work(store: S3Store) -> None:
            put = asyncio.ensure_future(store.put("k", [b"mine"], if_absent=True))
            await until_async(lambda: bool(store.statistics().retries), "the requests")
            again = Hold()
            held = proxy.inject(again, method="PUT")
            await until_async(lambda: held.hits > 0, "the requests")
            other = open_s3(moto.url(bucket))
            await other.put("k", [b"theirs"], if_absent=True)
            await other.close()
            again.let_go()
            with pytest.raises(ObjectExists):
                await put

        run(proxy.url(bucket), work, S3Options(first_pause_s=0.5))
    assert content(moto, bucket, "k") == b"theirs"


# -- uploads in parts ----------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [r"\?uploads", "uploadId"])
def test_lost_answers_leave_no_upload_behind(
    server: Server, bucket: str, proxy: FaultProxy, lost: str
) -> None:
    rule = proxy.inject(Reset("after"), method="POST", target=lost, times=1)
    data = os.urandom(17 * MIB)
    run(proxy.url(bucket), lambda store: store.put("k", [data]))
    assert rule.hits == 1
    assert content(server, bucket, "k") == data
    assert server.uploads(bucket) == []


@pytest.mark.parametrize("again", ["put", "fail", "sweep"])
def test_an_upload_that_could_not_be_aborted_is_not_forgotten(
    server: Server, bucket: str, proxy: FaultProxy, again: str
) -> None:
    """Its creation got lost on the way back, and so did the listing that would have shown it."""
    proxy.inject(Reset("after"), method="POST", target=r"\?uploads", times=1)
    proxy.inject(Answer(500, "InternalError"), method="GET", target=r"\?uploads", times=1)

    async def work(store: S3Store) -> None:
        with pytest.raises(StoreError):
            await store.put("w0/k", [bytes(17 * MIB)])
        assert server.uploads(bucket) == ["run/w0/k"]
        assert store.dangling_uploads
        if again == "fail":  # aborting the second one is not enough
            proxy.inject(Reset("before"), method="POST", target="uploadId", times=1)
            with pytest.raises(StoreError):
                await store.put("w0/k", [bytes(17 * MIB)])
        elif again == "put":
            await store.put("w0/k", [bytes(17 * MIB)])
        else:
            assert await store.sweep_uploads("w0/") == 1
        assert not store.dangling_uploads

    run(proxy.url(bucket), work, replace(PATIENT, deadline_s=0.0))
    assert server.uploads(bucket) == []


def test_a_part_that_is_refused_ends_the_upload(
    server: Server, bucket: str, proxy: FaultProxy
) -> None:
    proxy.inject(Answer(403, "AccessDenied"), method="PUT", target="partNumber=2")
    with pytest.raises(StoreForbidden, match="put 'k'"):
        run(proxy.url(bucket), lambda store: store.put("k", [bytes(40 * MIB)]))
    assert server.uploads(bucket) == []
    assert run(proxy.url(bucket), lambda store: store.list()) == []


@pytest.mark.parametrize(
    "moment", [r"POST .*\?uploads", r"PUT .*partNumber=1", r"PUT .*partNumber=3"]
)
def test_a_cancelled_upload_is_aborted(
    server: Server, bucket: str, proxy: FaultProxy, moment: str
) -> None:
    method, target = moment.split(" ")
    # Right after the server has created it, or while a part is under way.
    fault = Latency(0.3) if method == "POST" else HalfOpen(reads=False)
    rule = proxy.inject(fault, method=method, target=target)

    async def work(store: S3Store) -> None:
        put = asyncio.ensure_future(store.put("k", [bytes(40 * MIB)]))
        await until_async(lambda: rule.hits > 0, "the requests")
        if method == "POST":
            await until_async(lambda: bool(server.uploads(bucket)), "the requests")
        put.cancel()
        await asyncio.sleep(0)
        put.cancel()  # once more, while it cleans up
        with pytest.raises(asyncio.CancelledError):
            await put
        assert store.statistics().in_flight_bytes == 0
        # The transport keeps what the silent server did not take until the connection ends.
        proxy.clear()
        proxy.drop()
        assert await store.list() == []

    run(proxy.url(bucket), work)
    deadline = time.monotonic() + 5
    while server.uploads(bucket) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.uploads(bucket) == []


def test_what_a_killed_writer_left_is_swept(server: Server, bucket: str) -> None:
    client = server.client()
    for key in ("run/w0/a", "run/w0/b", "run/w1/a"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    assert run(server.url(bucket), lambda store: store.sweep_uploads("w0/")) == 2
    assert server.uploads(bucket) == ["run/w1/a"]


def test_a_cancelled_put_sends_no_later_content_of_its_buffers(rclone: Server) -> None:
    bucket, size = rclone.make_bucket(f"b-{uuid.uuid4().hex[:12]}"), 15 * MIB
    data = bytearray(size)
    with proxied(rclone.port) as proxy:
        rule = proxy.inject(Latency(0.5), method="PUT")  # meanwhile nobody takes the body

        async def work(store: S3Store) -> None:
            put = asyncio.ensure_future(store.put("k", [data]))
            await until_async(lambda: rule.hits > 0, "the requests")
            put.cancel()
            with pytest.raises(asyncio.CancelledError):
                await put
            data[:] = b"\xff" * size
            await store.put("marker", [b"x"])  # comes after what is left of the first

        run(proxy.url(bucket), work)
        proxy.clear()
        found = run(proxy.url(bucket), lambda store: store.list())
    assert "marker" in found
    assert "k" not in found or b"\xff" not in content(rclone, bucket, "k")


# -- asked early ---------------------------------------------------------------------------------


def _refused(url: str, kind: type[StoreError], words: str) -> None:
    started = time.monotonic()
    with pytest.raises(kind, match=words) as caught:
        check_writable(url)
    assert time.monotonic() - started < 30
    assert "no answer within" not in str(caught.value)
    assert_no_secret(caught.value)


def test_check_says_what_is_wrong(rclone: Server, aws: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bucket = rclone.make_bucket(f"b-{uuid.uuid4().hex[:12]}")
    url = rclone.url(bucket)
    check_writable(url)
    assert run(url, lambda store: store.list()) == []
    _refused(rclone.url("not-there"), StoreForbidden, "no such bucket")
    _refused("s3://bucket/x?endpoint_url=http://127.0.0.1:9", StoreError, "cannot be reached")
    aws.setenv("AWS_SECRET_ACCESS_KEY", OTHER_SECRET)
    _refused(url, StoreForbidden, "secret access key does not match")
    aws.setenv("AWS_ACCESS_KEY_ID", "SOMEBODYELSE")
    _refused(url, StoreForbidden, "does not know this access key")
    aws.delenv("AWS_ACCESS_KEY_ID")
    aws.delenv("AWS_SECRET_ACCESS_KEY")
    _refused(url, StoreForbidden, "no AWS credentials")
    aws.setenv("AWS_PROFILE", "nobody")
    _refused(url, StoreForbidden, "no such AWS profile")


def test_check_tells_read_only_from_no_rights(moto: Server, aws: pytest.MonkeyPatch) -> None:
    bucket = moto.make_bucket(f"b-{uuid.uuid4().hex[:12]}")
    reader = add_user(moto, f"reader-{bucket}", ["s3:GetObject", "s3:ListBucket"])
    writer = add_user(moto, f"writer-{bucket}", ["s3:PutObject"])
    nobody = add_user(moto, f"nobody-{bucket}", ["s3:ListAllMyBuckets"])
    with enforce_rights(moto):
        for (key, secret), words in (
            (reader, "can be read but not written"),
            (nobody, "lack a permission"),
        ):
            aws.setenv("AWS_ACCESS_KEY_ID", key)
            aws.setenv("AWS_SECRET_ACCESS_KEY", secret)
            aws.delenv("AWS_SESSION_TOKEN", raising=False)
            _refused(moto.url(bucket), StoreForbidden, words)
        aws.setenv("AWS_ACCESS_KEY_ID", writer[0])
        aws.setenv("AWS_SECRET_ACCESS_KEY", writer[1])
        aws.delenv("AWS_SESSION_TOKEN", raising=False)
        check_writable(moto.url(bucket))


def test_check_of_a_read_only_server(tmp_path: Path) -> None:
    (tmp_path / "data" / "bucket").mkdir(parents=True)
    with start_rclone(tmp_path, "--read-only") as server:
        _refused(server.url("bucket"), StoreError, "can be read but not written")


def test_check_of_a_server_that_is_silent(rclone: Server) -> None:
    with proxied(rclone.port) as proxy:
        proxy.inject(HalfOpen())
        _refused(proxy.url("bucket"), StoreError, "network failed")


# -- settings ------------------------------------------------------------------------------------


def test_the_endpoint_of_the_environment_and_of_the_profile(
    rclone: Server, aws: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = rclone.make_bucket(f"b-{uuid.uuid4().hex[:12]}")
    port_name = f"http://localhost:{rclone.port}"  # a name: by path only if we say so
    with aws.context() as inner:
        inner.setenv("AWS_ENDPOINT_URL", port_name)
        run(f"s3://{bucket}/run", lambda store: store.put("a", [b"x"]))
        inner.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        inner.setenv("AWS_ENDPOINT_URL_S3", port_name)
        run(f"s3://{bucket}/run", lambda store: store.put("b", [b"x"]))
    config = tmp_path / "config"
    config.write_text(
        "[profile mine]\nservices = here\nregion = eu-west-1\n"
        f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
        f"[services here]\ns3 =\n  endpoint_url = {port_name}\n"
    )
    aws.setenv("AWS_CONFIG_FILE", str(config))
    run(f"s3://{bucket}/run?profile=mine", lambda store: store.put("c", [b"x"]))
    assert run(rclone.url(bucket), lambda store: store.list()) == ["a", "b", "c"]


def test_the_url_opens_the_same_store_again() -> None:
    url = "s3://bucket/a/b%20c#1?endpoint_url=http://h:9000&region=eu-west-1&profile=me"
    store = open_store(url)
    assert open_store(store.url).url == store.url
    assert store.url.startswith("s3://bucket/a/b%20c#1?endpoint_url=http://h:9000&")
    assert open_store("s3://bucket").url == "s3://bucket"
    assert open_store("s3://bucket//a/").url == "s3://bucket/a"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "not a bucket name"),
        ("s3:///prefix", "not a bucket name"),
        ("s3://buc ket/x", "not a bucket name"),
        ("s3://me:hidden@bucket/x", "must not contain credentials or a port"),
        ("s3://bucket:80/x", "must not contain credentials or a port"),
        ("s3://bucket/a//b", "not a valid prefix"),
        ("s3://bucket/../b", "not a valid prefix"),
        ("s3://bucket/x?endpoint=http://h", "did you mean 'endpoint_url'"),
        ("s3://bucket/x?endpoint_url=", "is empty"),
        ("s3://bucket/x?endpoint_url=h:80", "not an endpoint_url"),
        ("s3://bucket/x?endpoint_url=http://me:hidden@h", "must not contain credentials"),
        ("s3://bucket/x?aws_secret_access_key=hidden", "must not be in a URL"),
        ("s3://bucket/x?addressing_style=sideways", "one of"),
    ],
)
def test_invalid_urls_are_rejected(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_store(url)
    assert "hidden" not in str(caught.value)


def test_without_the_sdk_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['aiobotocore'] = None\n"
        "from smdist.storage import open_store\n"
        "open_store('s3://bucket/x')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'smdist[s3]'" in done.stderr
