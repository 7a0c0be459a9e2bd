"""Puts of our S3 store next to raw aiobotocore and boto3, on the loopback interface.

    python benchmarks/s3_store.py [--rounds 5] [--servers rclone,moto]

Interleaved: each round runs every contender once, in turn, so that a busy moment of the machine
hits all. Prints medians of throughput and of the client's CPU time, and ratios to raw aiobotocore
(bytes bodies, the SDK's own defaults but checksums off, as rclone needs them off).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.config import Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from smdist.storage.base import Buffer
from smdist.storage.s3 import S3Options, open_s3
from tests.servers.s3 import KEY, SECRET, Server, start_moto, start_rclone

CONCURRENCY = 8
SIZES = ((64 << 10, 64), (8 << 20, 16))
CREDENTIALS = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
CHECKSUMS = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}

Put = Callable[[str], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw(server: Server, data: bytes, *, signed: bool) -> AsyncIterator[Put]:
    s3 = {"addressing_style": "path", "payload_signing_enabled": signed}
    config = AioConfig(s3=s3, max_pool_connections=CONCURRENCY, **CHECKSUMS)
    made = AioSession().create_client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1", config=config, **CREDENTIALS
    )
    async with made as client:

        async def put(key: str) -> None:
            await client.put_object(Bucket="bench", Key=key, Body=data)

        yield put


@contextlib.asynccontextmanager
async def ours(server: Server, data: bytes) -> AsyncIterator[Put]:
    store = open_s3(server.url("bench", "ours"), S3Options(concurrency=CONCURRENCY))
    # As the uploader has it: a header and pieces of a mapped arena.
    view = memoryview(bytearray(data))
    pieces: list[Buffer] = [bytes(view[:1000]), view[1000 : len(data) // 2], view[len(data) // 2 :]]

    async def put(key: str) -> None:
        await store.put(key, pieces)

    try:
        yield put
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def threads(server: Server, data: bytes) -> AsyncIterator[Put]:
    config: Any = Config(
        s3={"addressing_style": "path"}, max_pool_connections=CONCURRENCY, **CHECKSUMS
    )
    client = boto3.client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1", config=config, **CREDENTIALS
    )
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(CONCURRENCY) as pool:

        async def put(key: str) -> None:
            call = lambda: client.put_object(Bucket="bench", Key=key, Body=data)
            await loop.run_in_executor(pool, call)

        yield put


CONTENDERS: dict[str, Callable[[Server, bytes], contextlib.AbstractAsyncContextManager[Put]]] = {
    "aiobotocore": lambda server, data: raw(server, data, signed=True),
    "aiobotocore, unsigned": lambda server, data: raw(server, data, signed=False),
    "smdist": ours,
    "boto3, threads": threads,
}


async def measure(put: Put, count: int) -> tuple[float, float]:
    """Wall and CPU seconds of `count` puts, CONCURRENCY at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(i: int) -> None:
        async with gate:
            await put(f"k{i}")

    await one(0)
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(i) for i in range(count)))
    return time.perf_counter() - wall, time.process_time() - cpu


async def compare(server: Server, size: int, count: int, rounds: int) -> None:
    data = os.urandom(size)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    async with contextlib.AsyncExitStack() as stack:
        puts = {
            name: await stack.enter_async_context(make(server, data))
            for name, make in CONTENDERS.items()
        }
        for i in range(rounds):
            names = list(puts)
            for name in names[i % len(names) :] + names[: i % len(names)]:
                times[name].append(await measure(puts[name], count))
    report(server.name, size, count, times)


def report(server: str, size: int, count: int, times: dict[str, list[tuple[float, float]]]) -> None:
    print(f"\n{server}: {count} x {size >> 10} KiB")
    base_wall, base_cpu = (statistics.median(t[i] for t in times["aiobotocore"]) for i in (0, 1))
    for name, taken in times.items():
        wall, cpu = (statistics.median(t[i] for t in taken) for i in (0, 1))
        rate = size * count / wall / 1e6
        # Of pairs of one round: what the machine does beside hits both.
        paired = statistics.median(
            b[0] / t[0] for b, t in zip(times["aiobotocore"], taken, strict=True)
        )
        print(
            f"  {name:<24} {rate:8.1f} MB/s  {base_wall / wall:5.2f}x (paired {paired:5.2f}x)"
            f"   CPU {cpu * 1e3 / count:6.2f} ms/put  {cpu / base_cpu:5.2f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", default="rclone,moto")
    given = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    # aiohttp advises against large bytes bodies, which are what the raw contender is about.
    warnings.simplefilter("ignore", ResourceWarning)
    # The cache of folders that the tests turn off is part of a usual rclone.
    start: dict[str, Callable[[Path], contextlib.AbstractContextManager[Server]]] = {
        "rclone": lambda folder: start_rclone(folder, "--dir-cache-time", "5m"),
        "moto": start_moto,
    }
    for name in given.servers.split(","):
        with tempfile.TemporaryDirectory() as folder, start[name](Path(folder)) as server:
            server.make_bucket("bench")
            for size, count in SIZES:
                asyncio.run(compare(server, size, count, given.rounds))


if __name__ == "__main__":
    main()
