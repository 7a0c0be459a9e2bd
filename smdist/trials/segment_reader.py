"""Reads tensor data out of segments, by ranges.

`plan_reads` is pure: ranges of one object that lie near each other become one request. `SegmentReader`
carries it out, some requests at a time, on the event loop that owns the store, or in the thread of
the caller if the store is a directory; checking and decoding always happen there. Small things of a block (its checksums, its
statistics) are read whole and kept, as the next question is likely about them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from smdist.errors import CorruptObject, ObjectNotFound, StoreError
from smdist.format.block import (
    DataRanges,
    ObjectLocation,
    read_statistics,
    read_tensor,
    statistics_ranges,
    statistics_row,
    tensor_ranges,
)
from smdist.storage.store import HasBlockingRead, Store
from smdist.trials.catalogue import TensorLocation
from smdist.trials.numbers_reader import InlineValues, SessionOf, span_of, summary_of

__all__ = [
    "AT_ONCE",
    "GAP",
    "REMOTE_GAP",
    "Array",
    "ObjectRange",
    "ReadRequest",
    "SegmentReader",
    "StatisticsRow",
    "batches",
    "plan_reads",
]

Array = np.ndarray[Any, np.dtype[Any]]
StatisticsRow = tuple[tuple[str, ...], Array]
"""Columns of the statistics, and their values."""

T = TypeVar("T")

GAP = 64 << 10
REMOTE_GAP = 256 << 10  # where a request costs as much as this
SPAN = 16 << 20
BATCH = 128 << 20
FEW = 16  # objects of a directory that one thread reads as fast as several
_SUMMARIES = 8  # at once: they may be long
AT_ONCE = 64  # requests: a tensor of a thousand ranks lies in as many objects


class ObjectRange(NamedTuple):
    key: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class ReadRequest(NamedTuple):
    """One request, and which of the wanted ranges (by their place in the list) it covers."""

    range: ObjectRange
    members: tuple[int, ...]


def plan_reads(
    wanted: Sequence[ObjectRange], gap: int = GAP, span: int = SPAN
) -> list[ReadRequest]:
    """Plan requests that cover `wanted`. Ranges up to `gap` apart share one of `span` bytes.

    A range is never split, so one larger than `span` is a request of its own size.
    """
    requests: list[ReadRequest] = []
    members: list[int] = []
    current: ObjectRange | None = None
    for place in sorted(range(len(wanted)), key=wanted.__getitem__):
        new = wanted[place]
        if current is not None:
            stop = max(current.stop, new.stop)
            near = new.key == current.key and new.start - current.stop <= gap
            if near and (stop - current.start <= span or new.stop <= current.stop):
                current = current._replace(stop=stop)
                members.append(place)
                continue
            requests.append(ReadRequest(current, tuple(members)))
        current, members = new, [place]
    if current is not None:
        requests.append(ReadRequest(current, tuple(members)))
    return requests


Take = Callable[[ReadRequest, bytes], None]
_ATTACHED = "manifests/"  # a segment that came in its manifest bears the key of that


class CoroutineRunner(Protocol):
    """Run a coroutine on the loop that owns the store, from any other thread."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


@dataclass
class _Cache:
    """Least recently used goes first. A string is the key of a whole manifest's segment."""

    limit: int

    def __post_init__(self) -> None:
        self._items: OrderedDict[ObjectRange | str, bytes] = OrderedDict()
        self._lock = Lock()
        self._nbytes = 0

    def get(self, key: ObjectRange | str) -> bytes | None:
        with self._lock:
            data = self._items.get(key)
            if data is not None:
                self._items.move_to_end(key)
            return data

    def put(self, key: ObjectRange | str, data: bytes) -> None:
        with self._lock:
            if key in self._items or len(data) > self.limit // 8:
                return
            self._items[key] = data
            self._nbytes += len(data)
            while self._nbytes > self.limit:
                _, old = self._items.popitem(last=False)
                self._nbytes -= len(old)


class SegmentReader:
    def __init__(
        self,
        store: Store,
        run: CoroutineRunner,
        *,
        concurrency: int = AT_ONCE,
        cache_bytes: int = 64 << 20,
        gap: int = GAP,
        session: SessionOf = lambda _: "",
        damaged: Callable[[StoreError], None] = lambda _: None,
    ) -> None:
        """`damaged` is told what cannot be read for good, before it is raised."""
        self._store = store
        self.url = store.url
        self._near = store if isinstance(store, HasBlockingRead) else None
        self._gap = gap
        self._run = run
        self._concurrency = concurrency
        self._cache = _Cache(cache_bytes)
        self.troubles: dict[str, str] = {}  # objects that others say the same as
        self._numbers = InlineValues(store, self.troubles, session)
        self.damaged = damaged

    def keep(self, attached: Mapping[str, bytes]) -> None:
        """Keep segments that came in manifests, by the keys of these."""
        for key, data in attached.items():
            self._cache.put(key, data)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (CorruptObject, ObjectNotFound) as error:
            self.damaged(error)
            raise

    def values(self, found: Sequence[TensorLocation]) -> list[Array]:
        """Return the raw tensors, checksums verified. All of `found` must have raw bytes."""
        with self._telling():
            each = batches(found, lambda one: one.tensor.nbytes)
            return [value for batch in each for value in self._values(batch)]

    def _values(self, found: Sequence[TensorLocation]) -> list[Array]:
        spans = [tensor_ranges(one.layout, one.tensor) for one in found]
        return [
            # A copy, so that the array is writable and keeps nothing else alive.
            read_tensor(one.tensor, data, checksum, self._place(one), one.checksum_seed).copy()
            for one, data, checksum in self._read(found, spans)
        ]

    def warm(self, found: Sequence[TensorLocation]) -> None:
        """Read ahead, so that `values` of these finds them in the cache, as far as it goes."""
        wanted: list[ObjectRange] = []
        room = self._cache.limit
        for one in found:
            data, checksum, _ = _parts(one, tensor_ranges(one.layout, one.tensor))
            room -= data.nbytes + checksum.nbytes
            if room < 0:
                break
            wanted += [data, checksum]
        with self._telling():
            self._fetch(wanted)

    def rows(self, found: Sequence[TensorLocation]) -> list[StatisticsRow]:
        """Return the statistics of each. All of `found` must have a row in the statistics."""
        with self._telling():
            return self._rows(found)

    def _rows(self, found: Sequence[TensorLocation]) -> list[StatisticsRow]:
        spans = [statistics_ranges(one.layout) for one in found]
        matrices: dict[tuple[str, int], Array] = {}
        rows: list[StatisticsRow] = []
        for one, data, checksum in self._read(found, spans):
            block = (one.entry.segment, one.entry.offset)
            if block not in matrices:
                matrices[block] = read_statistics(
                    one.layout, data, checksum, self._place(one), one.checksum_seed
                )
            row = statistics_row(one.layout, one.tensor, matrices[block])
            if row is None:
                raise ValueError(f"{one.tensor.name!r} has no statistics in this block")
            rows.append(row)
        return rows

    def pieces(self, wanted: Sequence[ObjectRange]) -> list[bytes | None]:
        """Return the bytes of each range; None in objects that cannot be read, which are reported."""
        try:
            return [*self._fetch(wanted)]
        except (CorruptObject, ObjectNotFound) as error:
            keys = sorted({one.key for one in wanted})
            if len(keys) == 1:
                self.damaged(error)
                return [None] * len(wanted)
        found: dict[ObjectRange, bytes | None] = {}
        middle = keys[len(keys) // 2]
        for half in (True, False):
            some = [one for one in wanted if (one.key < middle) is half]
            found.update(zip(some, self.pieces(some), strict=True))
        return [found[one] for one in wanted]

    def _place(self, one: TensorLocation) -> ObjectLocation:
        return ObjectLocation(self.url, one.entry.segment)

    def _read(
        self, found: Sequence[TensorLocation], spans: Sequence[DataRanges | None]
    ) -> Iterator[tuple[TensorLocation, bytes, bytes]]:
        """Yield the bytes and the checksum of each; few checksums of a block are read together."""
        parts = [_parts(one, span) for one, span in zip(found, spans, strict=True)]
        data = self._fetch([want for part in parts for want in part[:2]])
        for place, (one, (_, _, at)) in enumerate(zip(found, parts, strict=True)):
            yield one, data[2 * place], data[2 * place + 1][at : at + 4]

    def _fetch(self, wanted: Sequence[ObjectRange]) -> list[bytes]:
        """Return the bytes of each range, from the cache or by the requests of `plan_reads`."""
        data: dict[ObjectRange, bytes] = {}
        absent: list[ObjectRange] = []
        for want in dict.fromkeys(wanted):
            kept = self._cache.get(want) if want.nbytes else b""
            if kept is None:
                absent.append(want)
            else:
                data[want] = kept

        def take(request: ReadRequest, got: bytes) -> None:
            if len(got) != request.range.nbytes:
                detail = f"ends early: {len(got)} of {request.range.nbytes} bytes"
                raise CorruptObject(self.url, request.range.key, "read", detail)
            for place in request.members:
                want = absent[place]
                at = want.start - request.range.start
                piece = got if want.nbytes == len(got) else got[at : at + want.nbytes]
                data[want] = piece
                self._cache.put(want, piece)

        requests = plan_reads(absent, self._gap)
        if self._near is not None:
            self._read_here(self._near, requests, take)
        elif requests:
            self._run(self._request(requests, take))
        return [data[want] for want in wanted]

    def _read_here(
        self, store: HasBlockingRead, requests: Sequence[ReadRequest], take: Take
    ) -> None:
        """Read object by object; many of them in threads, as a directory may be on a remote disk."""

        def read(key: str, group: Sequence[ReadRequest]) -> None:
            if not key.startswith(_ATTACHED):
                found = store.read(key, [(one.range.start, one.range.stop) for one in group])
            else:
                whole = self._cache.get(key)
                if whole is None:
                    whole = self._numbers.attached(key, store.read(key, [(0, None)])[0])
                    self._cache.put(key, whole)
                found = [whole[one.range.start : one.range.stop] for one in group]
            for one, got in zip(group, found, strict=True):
                take(one, got)

        by_key = [(k, list(group)) for k, group in groupby(requests, lambda one: one.range.key)]
        if len(by_key) <= FEW:
            for key, group in by_key:
                read(key, group)
            return
        with ThreadPoolExecutor(FEW) as pool:
            for _ in pool.map(read, *zip(*by_key, strict=True)):
                pass  # raises what a thread met

    async def _request(self, requests: Sequence[ReadRequest], take: Take) -> None:
        gate, few = asyncio.Semaphore(self._concurrency), asyncio.Semaphore(_SUMMARIES)

        async def carry_out(request: ReadRequest) -> None:
            async with gate:
                got = await self._get(*request.range)
            take(request, got)

        async def found_in(summary: str, group: Sequence[ReadRequest]) -> list[ReadRequest]:
            """Read a summary or span; return the requests that it does not answer."""
            async with few:
                known = await self._numbers.load(summary)
                self.keep(known)
                for one in group:
                    if one.range.key in known:
                        take(one, known[one.range.key][one.range.start : one.range.stop])
            return [one for one in group if one.range.key not in known]

        async def of_span(span: str, group: Sequence[ReadRequest]) -> None:
            rest = await found_in(span, group) if _several(group) else group
            await asyncio.gather(*map(carry_out, rest))

        async def of_session(summary: str, group: Sequence[ReadRequest]) -> None:
            spans: dict[str, list[ReadRequest]] = {}
            for one in await found_in(summary, group):
                spans.setdefault(span_of(one.range.key), []).append(one)
            await asyncio.gather(*(of_span(span, some) for span, some in spans.items()))

        work: list[Coroutine[Any, Any, None]] = []
        for summary, group in self._by_summary(requests).items():
            if summary and _several(group):
                work.append(of_session(summary, group))
            else:
                work += map(carry_out, group)
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _by_summary(self, requests: Sequence[ReadRequest]) -> dict[str, list[ReadRequest]]:
        """Group requests by the summary that holds the same; "" for segments and cached values."""
        found: dict[str, list[ReadRequest]] = {}
        for request in requests:
            key = request.range.key
            here = key.startswith(_ATTACHED) and self._cache.get(key) is not None
            found.setdefault("" if here else summary_of(key), []).append(request)
        return found

    async def _get(self, key: str, start: int, stop: int) -> bytes:
        if not key.startswith(_ATTACHED):
            return await self._store.get(key, start, stop)
        whole = self._cache.get(key)
        if whole is None:
            whole = self._numbers.attached(key, await self._store.get(key))
            self._cache.put(key, whole)
        return whole[start:stop]


def _several(requests: Sequence[ReadRequest]) -> bool:
    return len({one.range.key for one in requests}) > 1


def batches(items: Iterable[T], nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield batches that limit how many bytes are fetched and not decoded yet."""
    batch: list[T] = []
    nbytes = 0
    for one in items:
        if batch and nbytes + nbytes_of(one) > BATCH:
            yield batch
            batch, nbytes = [], 0
        batch.append(one)
        nbytes += nbytes_of(one)
    if batch:
        yield batch


def _parts(one: TensorLocation, spans: DataRanges | None) -> tuple[ObjectRange, ObjectRange, int]:
    """Return the range of the data, that of the checksum, and the checksum's place in it."""
    if spans is None:
        raise ValueError(f"{one.tensor.name!r} has no such data in this block")
    key, offset = one.entry.segment, one.entry.offset
    table, size = one.layout.checksums_offset, one.layout.checksums_nbytes
    data = ObjectRange(key, *spans.data.shifted(offset))
    if size > GAP:
        return data, ObjectRange(key, *spans.checksum.shifted(offset)), 0
    return (
        data,
        ObjectRange(key, table + offset, table + offset + size),
        spans.checksum.start - table,
    )
