"""How long after the slowest rank's commit a step can be seen, through the coordinator.

    python -m benchmarks.visibility [--ranks 8] [--steps 30] [--store directory|rclone]

A watcher, as the actor runs it, follows a run whose ranks commit one step after the other. Timed
from the answer to the last rank's manifest: until the watcher counts the step as complete, and until
a reader of the store finds a snapshot that has it. With hints, as uploaders send them, and without.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from benchmarks.many_ranks import (
    Size,
    declaration,
    manifest_of,
    segment_of,
    session_of,
    stores,
)
from benchmarks.table import Row, plain
from benchmarks.timing import median, p99
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer
from smdist.errors import ObjectNotFound
from smdist.format.manifest import RUN_KEY, Run, layout_key, manifest_key, session_key
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys, worker_name
from smdist.storage import loop_thread as sync
from smdist.storage.store import Store

INTERVAL_S = 0.5
TENSORS = 20


async def commit(store: Store, size: Size, seq: int, chance: random.Random) -> None:
    """The manifests of all ranks for step `seq`, one after the other in any order."""
    kind, ranks = declaration(size), list(range(size.ranks))
    chance.shuffle(ranks)
    for rank in ranks:
        segment = segment_of(size, rank, seq, [seq], kind)
        manifest = manifest_of(size, rank, seq, segment.entries, "active")
        key = manifest_key(worker_name(rank), 0, seq)
        await store.put(key, [encode(manifest, key)])


async def until_pointed(store: Store, number: int) -> float:
    """When a snapshot after `number` could be found."""
    while True:
        with suppress(ObjectNotFound):
            pointer = msgspec.json.decode(await store.get(POINTER_KEY), type=Pointer)
            if pointer.number > number:
                return time.perf_counter()
        await asyncio.sleep(0.002)


async def follow(store: Store, size: Size, hints: bool) -> tuple[list[float], list[float]]:
    chance = random.Random(1)
    await store.put(RUN_KEY, [encode(Run("bench", time.time(), "pytorch"), RUN_KEY)])
    for rank in range(size.ranks):
        session = msgspec.structs.replace(session_of(size, rank), started=time.time())
        key = session_key(worker_name(rank), 0)
        await store.put(key, [encode(session, key)])
    for digest, layout in segment_of(size, 0, 0, [0], declaration(size)).layouts.items():
        await store.put(layout_key(digest), [layout.to_json()])
    watcher = RunWatcher(store.url, store=store, interval_s=INTERVAL_S)
    await watcher.open()
    stop = asyncio.Event()
    running = asyncio.create_task(watcher.run(stop))
    complete, pointed = [], []
    for seq in range(size.steps):
        await commit(store, size, seq, chance)
        done, before = time.perf_counter(), watcher.queries.status().number
        if hints:
            for rank in range(size.ranks):
                watcher.hint(worker_name(rank), 0, seq)
        while watcher.queries.latest_complete_step(ModeKeys.TRAIN) < seq:
            before = watcher.queries.status().number
            await asyncio.sleep(0.001)
        complete.append(1e3 * (time.perf_counter() - done))
        pointed.append(1e3 * (await until_pointed(store, before) - done))
    stop.set()
    await running
    await watcher.close()
    return complete, pointed


def measure(ranks: int, steps: int, kind: str) -> list[Row]:
    size, rows = Size(ranks, steps, TENSORS, 1), []
    for hints in (True, False):
        with stores(kind) as (store, _):
            complete, pointed = sync.run(follow(store, size, hints))
        base = f"visible, {ranks} ranks, {kind}, {'pushed' if hints else 'polled'}"
        note = f"snapshots every {INTERVAL_S} s at most"
        rows.append(Row(f"{base}: complete", median(complete), "ms", p99(complete)))
        rows.append(Row(f"{base}: in a snapshot", median(pointed), "ms", p99(pointed), None, note))
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.visibility", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1, help="taken for the sake of `make bench`")
    parser.add_argument("--store", choices=["directory", "rclone"], default="rclone")
    parser.add_argument("--json", action="store_true", help="rows for another program")
    given = parser.parse_args(arguments)
    rows = measure(given.ranks, given.steps, given.store)
    print(msgspec.json.encode(rows).decode() if given.json else plain(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
