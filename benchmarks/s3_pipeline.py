"""The whole way of smdist to S3 for a benchmark: an arena, a journal, an uploader.

The uploader is the one of a job, on the loop of whoever measures. What is captured lies in the arena
beforehand; the clock runs from the first journal record to the acknowledgement of the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from smdist import kernel
from smdist.format.journal_records import Close, Declare, End, Flush, Part, Record, TensorSpec
from smdist.format.manifest import Run, Session
from smdist.processes import start_ticks
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalFileFull, JournalWriter
from smdist.workers.spool.spool import Doorbell, Spool, SpoolInfo, UploadOptions
from smdist.workers.upload.uploader import Uploader

__all__ = ["Saving", "saving"]

# Seconds on the wall and of this process's processor, until the store has `count` steps more.
Saving = Callable[[int], Awaitable[tuple[float, float]]]


@contextlib.asynccontextmanager
async def saving(
    root: Path, out_dir: str, data: bytes, slots: int, segment_bytes: int
) -> AsyncIterator[Saving]:
    """Steps of one tensor each, `data`; as many as there are slots can be on their way at once."""
    options = UploadOptions(segment_bytes=segment_bytes, nice=0, attach_bytes=256 << 10)
    spool = Spool.create(_info(out_dir, options), root)
    rank = _Rank(spool, data, slots)
    uploader = asyncio.create_task(Uploader(spool, _complain, rank.heard).run())
    try:
        await rank.save(slots)  # the client is made, connections are open
        yield rank.save
    finally:
        rank.end()
        await uploader
        rank.close()
        spool.remove()


def _info(out_dir: str, options: UploadOptions) -> SpoolInfo:
    pid = os.getpid()
    session = Session(os.urandom(8).hex(), 0, 1, 0, "all", 0.0, "here", pid, "")
    return SpoolInfo(
        Run("benchmark", 0.0, "none"), session, out_dir, options, pid, start_ticks(pid), ""
    )


def _complain(text: str) -> None:
    raise RuntimeError(text)


class _Rank:
    def __init__(self, spool: Spool, data: bytes, slots: int) -> None:
        self._size, self._slots, self._step = len(data), slots, 0
        self._journal, self._doorbell = JournalWriter(spool), Doorbell(spool)
        self._ack_page = AckPage(spool.path / "ack_page")
        with (spool.path / "arena-0").open("wb+") as handle:
            os.posix_fallocate(handle.fileno(), 0, len(data) * slots)
            self._arena = mmap.mmap(handle.fileno(), len(data) * slots)
        for slot in range(slots):
            self._arena[slot * len(data) : (slot + 1) * len(data)] = data
        spec = TensorSpec("weight", "U8", (len(data),), len(data), 0, -1, ("weights",))
        self._declare = Declare(0, (), (spec,), len(data))
        self._guard = self._declare.guard(kernel.address_of(data))
        self._journal.append(self._declare)
        self._stored = asyncio.Event()

    def heard(self, _batch: object) -> None:
        self._stored.set()

    def _append(self, record: Record) -> int:
        try:
            return self._journal.append(record)
        except JournalFileFull:
            self._journal.make_room((self._declare, record))
            self._journal.append(self._declare)
            return self._journal.append(record)

    async def save(self, count: int) -> tuple[float, float]:
        assert count <= self._slots
        wall, cpu = time.perf_counter(), time.process_time()
        for slot in range(count):
            step, now = self._step, time.time()
            self._append(Part(1, step, step, now, 0, 0, slot * self._size, self._guard))
            self._append(Close(1, step, step, now))
            self._step += 1
        last = self._append(Flush())
        self._doorbell.ring()
        while self._ack_page.acked < last:  # nothing waits for a Flush
            self._stored.clear()
            await self._stored.wait()
        return time.perf_counter() - wall, time.process_time() - cpu

    def end(self) -> None:
        self._append(End("", time.time()))
        self._doorbell.ring()

    def close(self) -> None:
        self._journal.close()
        self._doorbell.close()
        self._ack_page.close()
        self._arena.close()
