"""Warm shared memory that captured tensors are copied into.

An arena is a sparse file as large as the limit, mapped whole by the training process. A range is
reserved with `posix_fallocate` before it is written. A full file system therefore raises ENOSPC here
instead of SIGBUS in the middle of a copy.

Freed ranges are allocated again lowest first, with their pages still mapped. A copy into such pages
runs at the speed of memcpy; one into fresh pages is ten times slower. `prefault` makes pages resident
before they are needed, off the training thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable
from pathlib import Path

from smdist import kernel

__all__ = ["ALIGNMENT", "Arena", "FreeList", "arena_name", "round_up"]

ALIGNMENT = 64
GROWTH = 2 << 20


def arena_name(index: int) -> str:
    return f"arena-{index}"


def round_up(nbytes: int, unit: int = ALIGNMENT) -> int:
    return nbytes + (-nbytes % unit)


class FreeList:
    """Which ranges are free. First fit from the lowest offset: few pages are used and stay warm."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (offset, nbytes), sorted, never adjacent
        self.free_bytes = 0

    @classmethod
    def excluding(cls, in_use: Iterable[tuple[int, int]], end: int) -> FreeList:
        """Return a list of all bytes below `end` that are not `in_use`."""
        free, at = cls(), 0
        for offset, nbytes in sorted(in_use):
            free.free(at, offset - at)
            at = offset + nbytes
        free.free(at, end - at)
        return free

    def allocate(self, nbytes: int) -> int:
        """Take `nbytes` and return their offset, -1 when no range is large enough."""
        for index, (offset, size) in enumerate(self._free):
            if size >= nbytes:
                if size == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (offset + nbytes, size - nbytes)
                self.free_bytes -= nbytes
                return offset
        return -1

    def allocate_some(self, least: int, most: int) -> tuple[int, int]:
        """Take up to `most` bytes of the first range with `least`. Return (-1, 0) without one."""
        for _, size in self._free:
            if size >= least:
                taken = min(size, most)
                return self.allocate(taken), taken  # earlier ranges have fewer than `least`
        return -1, 0

    def free(self, offset: int, nbytes: int) -> None:
        """Return a range and join it with its neighbours."""
        if nbytes == 0:
            return
        self.free_bytes += nbytes
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + nbytes:
            nbytes += self._free.pop(index)[1]
        if index > 0:
            before, size = self._free[index - 1]
            if before + size == offset:
                self._free[index - 1] = (before, size + nbytes)
                return
        insort(self._free, (offset, nbytes))

    def tail(self, end: int) -> int:
        """Return the size of the free range that ends at `end`, 0 if that byte is in use."""
        if self._free and sum(self._free[-1]) == end:
            return self._free[-1][1]
        return 0


class Arena:
    """Owned by the training process; any of its threads may call `allocate` and `free`."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.capacity = round_up(capacity, mmap.PAGESIZE)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._fd, self.capacity)
            self._map = mmap.mmap(self._fd, self.capacity)
        except BaseException:
            os.close(self._fd)
            raise
        anchor = ctypes.c_char.from_buffer(self._map)
        self._anchor: ctypes.c_char | None = anchor
        self.address = ctypes.addressof(anchor)
        self.view = memoryview(self._map)
        self._list = FreeList()
        self._reserved = 0
        self._lock = threading.Lock()
        self._growing = threading.Lock()

    @property
    def reserved(self) -> int:
        return self._reserved

    @property
    def used(self) -> int:
        return self._reserved - self._list.free_bytes

    @property
    def spare(self) -> int:
        """Return the bytes that are reserved and free: no page has to be requested for them."""
        return self._list.free_bytes

    def allocate(self, nbytes: int) -> int:
        """Return the offset of a range, or -1 at the limit. Raise OSError if the disk is full."""
        need = round_up(nbytes)
        while True:
            with self._lock:
                offset = self._list.allocate(need)
            if offset >= 0:
                return offset
            if not self._grow(need, prefault=False):
                return -1

    def allocate_some(self, least: int, most: int) -> tuple[int, int]:
        """Return offset and size of a reserved range; (-1, 0) when none has `least` bytes."""
        with self._lock:
            return self._list.allocate_some(round_up(least), most)

    def free(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._list.free(offset, round_up(nbytes))

    def reset(self, in_use: Iterable[tuple[int, int]]) -> None:
        """Rebuild the free list after an interruption: everything reserved except `in_use`."""
        with self._lock:
            self._list = FreeList.excluding(in_use, self._reserved)

    def prefault(self, nbytes: int) -> None:
        """Reserve `nbytes` more, if the limit allows, and fault their pages in."""
        self._grow(nbytes, prefault=True)

    def _grow(self, nbytes: int, *, prefault: bool) -> bool:
        with self._growing:
            start = self._reserved
            size = min(round_up(nbytes, GROWTH), self.capacity - start)
            if size < nbytes and not (size > 0 and self._tail_fits(nbytes, size)):
                return False
            os.posix_fallocate(self._fd, start, size)
            if prefault:
                kernel.populate(self.address + start, size)
            with self._lock:
                self._reserved = start + size
                self._list.free(start, size)
        return True

    def _tail_fits(self, nbytes: int, size: int) -> bool:
        """Check whether the last `size` bytes and the free range before them hold `nbytes`."""
        with self._lock:
            return self._list.tail(self._reserved) + size >= nbytes

    def close(self) -> None:
        """Release memory and file. Safe to repeat after an interruption."""
        self._anchor = None
        self.view.release()
        with contextlib.suppress(BufferError):  # a framework holds a view: freed at exit
            self._map.close()
        # Cleared first: after the close another file may get the same descriptor number.
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)
