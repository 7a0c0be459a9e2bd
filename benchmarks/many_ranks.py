"""Many simulated ranks: merging what they commit, and reading the run through its snapshot.

    python -m benchmarks.many_ranks [--ranks 1024] [--steps 1000] [--tensors 200]
                                    [--store memory|directory|rclone|moto]

Journal records are folded, laid out and turned into manifests by the code that uploaders run. The
history of the run goes from one rank's encoder into the merge; the last step of every rank is put
into the store with its segments and manifests, and merged by itself. Then the trial is opened anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.machine import load, status_bytes
from benchmarks.table import Row, plain
from smdist.coordination.snapshot.pack import POINTER_KEY, PackedSnapshot, pack
from smdist.coordination.view.run_view import View, add
from smdist.format.fold import fold
from smdist.format.inline_segment import extract_segment
from smdist.format.journal_records import Close, Declare, Inline, Piece, TensorSpec
from smdist.format.layout import Layout
from smdist.format.manifest import (
    RUN_KEY,
    CollectionInfo,
    Collections,
    RankManifest,
    RankState,
    Run,
    Session,
    StepEntry,
    collections_key,
    layout_key,
    manifest_key,
    segment_key,
    session_key,
)
from smdist.format.segment import Segment, compose
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys, worker_name
from smdist.storage import LocalStore, MemoryStore, open_store
from smdist.storage import loop_thread as sync
from smdist.storage.store import Buffer, Store
from smdist.trials.catalogue import Catalogue
from smdist.trials.segment_reader import AT_ONCE
from smdist.trials.trial import Trial

MB = 1 << 20
TRAIN = ModeKeys.TRAIN.value
BEGUN = 1_700_000_000.0
ELEMENTS = 4


class Size(NamedTuple):
    ranks: int
    steps: int
    tensors: int
    batch: int  # steps in a manifest


# -- what ranks write ------------------------------------------------------------------------


def session_of(size: Size, rank: int) -> Session:
    host = f"node-{rank // 8:04d}.cluster.internal"
    return Session(f"{rank:032x}", rank, size.ranks, 0, "all", BEGUN, host, 1000 + rank, "job")


def declaration(size: Size) -> Declare:
    width = 4 * ELEMENTS
    specs = tuple(
        TensorSpec(f"layers.{i}.weight", "F32", (ELEMENTS,), width, i * width, -1, ("weights",))
        for i in range(size.tensors)
    )
    return Declare(0, (), specs, width * size.tensors)


def segment_of(size: Size, rank: int, seq: int, steps: Sequence[int], kind: Declare) -> Segment:
    """What an uploader makes of the records of `steps`."""
    data = np.full((size.tensors, ELEMENTS), rank, np.float32).tobytes()
    pieces = []
    for step in steps:
        where = (TRAIN, step, step, BEGUN + step + rank / 1e4)
        pieces.append(Piece(2 * step, Inline(*where, 0, data), kind))
        pieces.append(Piece(2 * step + 1, Close(*where), None))
    key = segment_key(worker_name(rank), 0, seq, f"{rank:08x}")
    session = session_of(size, rank)
    blocks = fold(pieces).blocks
    return compose(blocks, _no_arena, key=key, run_id="simulated", session=session, seq=seq)


def _no_arena(arena: int, offset: int, nbytes: int) -> memoryview:
    raise AssertionError("everything is inline here")


def manifest_of(
    size: Size, rank: int, seq: int, entries: Sequence[StepEntry], state: RankState
) -> RankManifest:
    first, upto = 2 * entries[0].step, 2 * entries[-1].step + 2
    now = entries[-1].time
    name = f"{rank:032x}"
    return RankManifest(
        name, rank, size.ranks, 0, "all", seq, first, upto, state, now, tuple(entries)
    )


def history(size: Size, layouts: dict[str, Layout]) -> Iterator[list[bytes]]:
    """The manifests of all ranks, round by round. One rank's blocks stand for those of the others,
    with their own places and times: laying out a million blocks is not what is measured."""
    kind = declaration(size)
    for seq, begin in enumerate(range(0, size.steps - 1, size.batch)):
        steps = range(begin, min(begin + size.batch, size.steps - 1))
        model = segment_of(size, 0, seq, steps, kind)
        layouts |= model.layouts
        yield [
            msgspec.json.encode(
                manifest_of(
                    size, rank, seq, [_moved(e, rank, seq) for e in model.entries], "active"
                )
            )
            for rank in range(size.ranks)
        ]


def _moved(entry: StepEntry, rank: int, seq: int) -> StepEntry:
    key = segment_key(worker_name(rank), 0, seq, f"{rank:08x}")
    at = entry.time + rank / 1e4
    return msgspec.structs.replace(entry, segment=key, began=at, time=at)


def last_step(size: Size) -> Iterator[tuple[Segment, bytes, str]]:
    kind, seq = declaration(size), -(-(size.steps - 1) // size.batch)
    for rank in range(size.ranks):
        segment = segment_of(size, rank, seq, [size.steps - 1], kind)
        manifest = manifest_of(size, rank, seq, segment.entries, "ended")
        key = manifest_key(worker_name(rank), 0, seq)
        yield segment, encode(manifest, key), key


# -- merging ---------------------------------------------------------------------------------


class Merge:
    """A coordinator without its reading and its rights."""

    def __init__(self, size: Size, layouts: dict[str, Layout]) -> None:
        self.size, self.layouts = size, layouts
        self.view, self.number = View(), 0
        self.packed: PackedSnapshot | None = None
        self.objects: dict[str, Buffer] = {}
        for rank in range(size.ranks):
            add(self.view, session_of(size, rank))

    def fold(self, manifests: Sequence[bytes]) -> None:
        for data in manifests:
            manifest, _ = extract_segment("", msgspec.json.decode(data, type=RankManifest))
            add(self.view, manifest)

    def pack(self, *, final: bool = False) -> PackedSnapshot:
        self.number += 1
        self.packed = pack(
            self.view,
            self.packed,
            run_id="simulated",
            epoch=1,
            number=self.number,
            writer="benchmark",
            now=time.time(),
            interval_s=1.0,
            final=final,
            layouts=self.layouts,
        )
        self.view = self.packed.view
        for key, data in self.packed.objects:
            self.objects[key] = data
        for key in self.packed.replaced:
            self.objects.pop(key, None)
        return self.packed


class Merged(NamedTuple):
    """`write_s` was spent in the simulated ranks."""

    merging: Merge
    merge_s: float
    write_s: float
    manifests: int


def merge_history(
    size: Size, layouts: dict[str, Layout], clock: Callable[[], float] = time.perf_counter
) -> Merged:
    merging, merge_s, write_s, count = Merge(size, layouts), 0.0, 0.0, 0
    began = clock()
    for manifests in history(size, layouts):
        made = clock()
        merging.fold(manifests)
        merging.pack()
        count += len(manifests)
        write_s += made - began
        began = clock()
        merge_s += began - made
    return Merged(merging, merge_s, write_s, count)


async def put_all(store: Store, objects: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
    gate = asyncio.Semaphore(16)

    async def put(key: str, data: Sequence[Buffer]) -> None:
        async with gate:
            await store.put(key, data)

    await asyncio.gather(*(put(key, data) for key, data in objects))


async def publish(store: Store, packed: PackedSnapshot) -> None:
    await put_all(store, [(key, [data]) for key, data in packed.objects])
    await store.put(packed.head_key, [packed.head])
    await store.put(POINTER_KEY, [encode(packed.pointer, POINTER_KEY)])


def measure_merge(size: Size, store: Store) -> list[Row]:
    layouts: dict[str, Layout] = {}
    before = status_bytes()["VmRSS"]
    merging, merge_s, write_s, count = merge_history(size, layouts)
    memory = (status_bytes()["VmRSS"] - before) / MB
    columns = sum(c.columns.nbytes for s in merging.view.sealed.values() for c in s.chunks) / MB
    run = Run("simulated", BEGUN, "pytorch")
    described = Collections(worker_name(0), (CollectionInfo("weights", ("weight",)),))
    start = [
        (RUN_KEY, [encode(run, RUN_KEY)]),
        (collections_key(worker_name(0)), [encode(described, collections_key(worker_name(0)))]),
    ]
    for rank in range(size.ranks):
        key = session_key(worker_name(rank), 0)
        start.append((key, [encode(session_of(size, rank), key)]))
    sync.run(put_all(store, start))
    sync.run(put_all(store, [(key, [data]) for key, data in merging.objects.items()]))
    last, objects = [], []
    for segment, manifest, key in last_step(size):
        layouts |= segment.layouts
        objects += [(segment.key, segment.chunks), (key, [manifest])]
        last.append(manifest)
    objects += [(layout_key(d), [layout.to_json()]) for d, layout in layouts.items()]
    sync.run(put_all(store, objects))
    began = time.perf_counter()
    merging.fold(last)
    folded = time.perf_counter()
    packed = merging.pack(final=True)
    made = time.perf_counter()
    sync.run(publish(store, packed))
    done = time.perf_counter()
    what = f"{size.ranks} ranks x {size.steps} steps x {size.tensors} tensors"
    split = f"fold {folded - began:.2f}, pack {made - folded:.2f}, put {done - made:.2f} s"
    head = f"head {len(packed.head) / 1e3:.0f} kB, {len(packed.chunks)} chunks"
    return [
        Row("simulated ranks: manifests per second", count / write_s, "/s"),
        Row("merge: all but the last step", merge_s, "s", note=f"{what}; {count} manifests"),
        Row("merge: manifests per second", count / merge_s, "/s", note=f"of {size.batch} steps"),
        Row("merge: memory", memory, "MB", note=f"columns {columns:.0f} MB"),
        Row("merge: one new step of all ranks", 1e3 * (done - began), "ms", None, 1000.0, split),
        Row(
            "snapshot: bytes of the last step's chunks",
            sum(len(d) for _, d in packed.objects) / 1e6,
            "MB",
            note=head,
        ),
    ]


# -- reading ---------------------------------------------------------------------------------


class Counted:
    """A store, and how often it was asked."""

    def __init__(self, store: Store) -> None:
        self._store, self.requests = store, 0

    @property
    def url(self) -> str:
        return self._store.url

    async def check(self) -> None:
        await self._store.check()

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        await self._store.put(key, data, if_absent=if_absent)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.requests += 1
        return await self._store.get(key, start, stop)

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        keys = await self._store.list(prefix, after=after)
        self.requests += 1 + len(keys) // 1000  # as many pages as S3 has for them
        return keys

    async def delete(self, key: str) -> None:
        await self._store.delete(key)

    async def close(self) -> None:
        await self._store.close()


def measure_trial(size: Size, store: Store) -> list[Row]:
    counted = Counted(store)
    began = time.perf_counter()
    trial = Trial(counted, "simulated", counted.url, Catalogue())
    steps, names = trial.steps(), trial.tensor_names()
    opened, requests = time.perf_counter() - began, counted.requests
    assert (len(steps), len(names)) == (size.steps, size.tensors), (len(steps), len(names))
    began, counted.requests = time.perf_counter(), 0
    stack = trial.tensor(names[-1]).stack(size.steps - 1)
    read = time.perf_counter() - began
    assert stack[:, 0].tolist() == list(range(size.ranks))
    return [
        Row("trial: open, names and steps", 1e3 * opened, "ms", None, 2000.0),
        Row("trial: requests to open", requests, "", None, 20.0),
        Row(
            "trial: one tensor of all ranks", 1e3 * read, "ms", note=f"{counted.requests} requests"
        ),
    ]


def growth(size: Size) -> list[Row]:
    """A tenth of the steps, for half the ranks and for all."""
    steps = max(2 * size.batch, size.steps // 10)
    times = []
    for ranks in (size.ranks // 2, size.ranks):
        # Time of the processor: a busy machine does not grow with ranks.
        clock = time.process_time
        times.append(merge_history(size._replace(ranks=ranks, steps=steps), {}, clock).merge_s)
    note = f"{size.ranks // 2} to {size.ranks} ranks, {steps} steps, processor time"
    return [Row("merge: growth when ranks double", times[1] / times[0], "x", None, 2.2, note)]


@contextlib.contextmanager
def stores(kind: str) -> Iterator[tuple[Store, Store]]:
    """A store to write to, and one that has nothing cached or connected."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "memory":
            store = MemoryStore("many-ranks")
            yield store, store
        elif kind == "directory":
            yield LocalStore(Path(folder)), LocalStore(Path(folder))
        else:
            from tests.servers.s3 import KEY, SECRET, start_moto, start_rclone

            os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
            start = {"rclone": start_rclone, "moto": start_moto}[kind]
            with start(Path(folder)) as server:
                url = server.url(server.make_bucket("many-ranks"))
                writing, reading = open_store(url), open_store(url, concurrency=AT_ONCE)
                yield writing, reading
                sync.run(writing.close())
                sync.run(reading.close())


def measure(size: Size, kind: str) -> list[Row]:
    with stores(kind) as (writing, reading):
        rows = measure_merge(size, writing)
        rows += measure_trial(size, reading)
    return rows + growth(size)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.many_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--batch", type=int, default=10, help="steps in a manifest")
    kinds = ["memory", "directory", "rclone", "moto"]
    parser.add_argument("--store", choices=kinds, default="rclone")
    parser.add_argument("--json", action="store_true", help="rows for another program")
    parser.add_argument("--rounds", type=int, default=1, help="taken for the sake of `make bench`")
    given = parser.parse_args(arguments)
    before = load()
    rows = measure(Size(given.ranks, given.steps, given.tensors, given.batch), given.store)
    if given.json:
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    else:
        print(f"load average: {before} before, {load()} after", plain(rows), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
