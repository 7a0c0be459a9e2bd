"""From an arena to stored objects, next to raw puts of the same sizes and to other writers to S3.

    python -m benchmarks.s3_store 8 [--server moto]       objects of 8 MiB; prints rows as JSON

One process, one server on the loopback interface: each round has every contender once, in turn, so that
a busy moment of the machine hits all. `rclone serve s3` is quick; s3torchconnector cannot write to it, so
there is `moto_server` too, which is so slow that it hides most of what is compared. The contenders:

    aiobotocore            put_object of bytes, 8 at a time; as it comes: the payload is hashed and signed
    aiobotocore, unsigned  the same without that, as smdist does over TLS and on the loopback interface
    smdist                 journal, checksums, segment, layouts, manifest, acknowledgement; one object a step
    smdist, batched        the same with segments of 32 MiB, which is the default
    boto3 (s3transfer)     upload_fileobj on 8 threads
    s3torchconnector       its writer on 8 threads
    obstore                put_async of bytes, 8 at a time
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.environments import Unavailable, interpreter
from benchmarks.pipe import ROOT
from benchmarks.s3_pipeline import Saving, saving
from benchmarks.table import Row
from tests.servers.s3 import KEY, SECRET, Server, start_moto, start_rclone

MIB = 1 << 20
AT_ONCE = 8
CREDENTIALS = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
# rclone sends the checksum of the whole object with a range of it, which the SDK would refuse.
CHECKSUMS = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
RAW, UNSIGNED, OURS, BATCHED = "aiobotocore", "aiobotocore, unsigned", "smdist", "smdist, batched"
LEAST = 0.85  # of raw throughput

Contender = contextlib.AbstractAsyncContextManager[Saving]
Put = Callable[[str], Awaitable[object]]


def together(put: Put) -> Saving:
    async def save(count: int) -> tuple[float, float]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(i: int) -> None:
            async with gate:
                await put(f"k{i}")

        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(i) for i in range(count)))
        return time.perf_counter() - wall, time.process_time() - cpu

    return save


@contextlib.asynccontextmanager
async def raw(server: Server, data: bytes, *, signed: bool) -> AsyncIterator[Saving]:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    s3 = {"addressing_style": "path", "payload_signing_enabled": signed}
    config = AioConfig(s3=s3, max_pool_connections=AT_ONCE, **CHECKSUMS)
    made = AioSession().create_client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1", config=config, **CREDENTIALS
    )
    async with made as client:
        folder = "signed" if signed else "unsigned"
        yield together(
            lambda key: client.put_object(Bucket="bench", Key=f"{folder}/{key}", Body=data)
        )


@contextlib.asynccontextmanager
async def ours(
    server: Server, data: bytes, slots: int, *, batched: bool = False
) -> AsyncIterator[Saving]:
    size = 32 * MIB if batched else len(data)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="smdist-bench-") as root:
        url = server.url("bench", "batched" if batched else "ours")
        async with saving(Path(root), url, data, slots, size) as save:
            yield save


@contextlib.asynccontextmanager
async def s3transfer(server: Server, data: bytes) -> AsyncIterator[Saving]:
    import boto3
    from botocore.config import Config

    config: Any = Config(s3={"addressing_style": "path"}, max_pool_connections=64, **CHECKSUMS)
    client = boto3.client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1", config=config, **CREDENTIALS
    )
    upload = lambda key: client.upload_fileobj(io.BytesIO(data), "bench", f"boto3/{key}")
    async with _threads(upload) as save:
        yield save


@contextlib.asynccontextmanager
async def s3torchconnector(server: Server, data: bytes) -> AsyncIterator[Saving]:
    from s3torchconnector import S3ClientConfig  # type: ignore[import-not-found]
    from s3torchconnector._s3client import S3Client  # type: ignore[import-not-found]

    config = S3ClientConfig(force_path_style=True)
    client = S3Client("us-east-1", endpoint=server.endpoint, s3client_config=config)

    def upload(key: str) -> None:
        with client.put_object("bench", f"connector/{key}") as writer:
            writer.write(data)

    async with _threads(upload) as save:
        yield save


@contextlib.asynccontextmanager
async def obstore(server: Server, data: bytes) -> AsyncIterator[Saving]:
    import obstore as library  # type: ignore[import-not-found]
    from obstore.store import S3Store  # type: ignore[import-not-found]

    store = S3Store(
        "bench",
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id=KEY,
        secret_access_key=SECRET,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    yield together(lambda key: library.put_async(store, f"obstore/{key}", data))


@contextlib.asynccontextmanager
async def _threads(upload: Callable[[str], None]) -> AsyncIterator[Saving]:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield together(lambda key: loop.run_in_executor(pool, upload, key))


def contenders(server: Server, data: bytes, count: int) -> dict[str, Callable[[], Contender]]:
    return {
        RAW: lambda: raw(server, data, signed=True),
        UNSIGNED: lambda: raw(server, data, signed=False),
        OURS: lambda: ours(server, data, count),
        BATCHED: lambda: ours(server, data, count, batched=True),
        "boto3 (s3transfer)": lambda: s3transfer(server, data),
        "s3torchconnector": lambda: s3torchconnector(server, data),
        "obstore": lambda: obstore(server, data),
    }


Times = dict[str, list[tuple[float, float]]]


async def compare(
    server: Server, size: int, count: int, rounds: int, only: str
) -> tuple[Times, dict[str, str]]:
    """Seconds of each round of everybody, and who could not take part and why."""
    times: Times = {}
    missing: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        savers: dict[str, Saving] = {}
        for name, make in contenders(server, os.urandom(size), count).items():
            if only not in name:
                continue
            try:
                savers[name] = await stack.enter_async_context(make())
                await savers[name](min(count, 2))
                times[name] = []
            except Exception as problem:
                if name in (RAW, OURS):
                    raise
                savers.pop(name, None)
                missing[name] = f"{type(problem).__name__}: {problem}"[:200]
        for i in range(rounds):
            names = list(savers)
            for name in names[i % len(names) :] + names[: i % len(names)]:
                times[name].append(await savers[name](count))
    return times, missing


def rows_of(server: str, size: int, count: int, times: Times, missing: dict[str, str]) -> list[Row]:
    from benchmarks.timing import median

    base = f"S3 puts to {server}, {size // MIB} MiB"
    rows = []
    for name, taken in times.items():
        rates = [size * count / 1e6 / wall for wall, _ in taken]
        busy = median([cpu / (size * count / 1e9) for _, cpu in taken])
        note = f"{busy:.2f} s of this process's processor per GB"
        spread = (min(rates), max(rates))
        rows.append(Row(f"{base}: {name}", median(rates), "MB/s", note=note, spread=spread))
    rows += [Row(f"{base}: {name}", None, "MB/s", note=why) for name, why in missing.items()]
    for name in (OURS, BATCHED):
        for peer in (RAW, UNSIGNED):
            if name in times and peer in times:
                # Of one round each: what the machine does beside hits both.
                pairs = [a[0] / b[0] for a, b in zip(times[name], times[peer], strict=True)]
                note = f"{1 / median(pairs):.2f} of its throughput"
                what, spread = f"{base}: time of {name} / {peer}", (min(pairs), max(pairs))
                rows.append(Row(what, median(pairs), "x", None, 1 / LEAST, note, spread))
    return rows


def measure(name: str, mib: int, total: int, rounds: int, out: str | None, only: str) -> list[Row]:
    environ = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    os.environ.update(environ, AWS_EC2_METADATA_DISABLED="true", AWS_REGION="us-east-1")
    # aiohttp advises against large bytes bodies, which are what the raw contender is about.
    warnings.simplefilter("ignore", ResourceWarning)
    count = max(4, total // mib)
    start = {"rclone": start_rclone, "moto": start_moto}[name]
    with (
        tempfile.TemporaryDirectory(dir=out, prefix="smdist-bench-") as folder,
        start(Path(folder)) as server,
    ):
        server.make_bucket("bench")
        size = mib * MIB
        times, missing = asyncio.run(compare(server, size, count, rounds, only))
    return rows_of(name, size, count, times, missing)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.s3_store")
    parser.add_argument("mib", type=int, help="size of an object")
    parser.add_argument("--server", choices=["rclone", "moto"], default="rclone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="MiB per round are four times this")
    parser.add_argument("--out", help="folder for the server's objects")
    parser.add_argument("--only", default="", help="contenders whose names hold this")
    parser.add_argument("--here", action="store_true", help="in this interpreter, whatever it has")
    given = parser.parse_args(arguments)
    if not given.here:
        try:
            python = interpreter("s3_peers")
        except Unavailable as problem:
            print(f"peers are left out: {problem}", file=sys.stderr)
            python = Path(sys.executable)
        again = [str(python), "-m", "benchmarks.s3_store", *arguments, "--here"]
        # The server's program is beside this interpreter.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        environ = {**os.environ, "PATH": path}
        sys.exit(subprocess.run(again, check=False, cwd=ROOT, env=environ).returncode)
    total = 4 * given.steps
    rows = measure(given.server, given.mib, total, given.rounds, given.out, given.only)
    sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
