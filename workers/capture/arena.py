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
from collections.abc import Iterable
from pathlib import Path

from smdist import kernel
from smdist.workers.capture.freelist import FreeList

__all__ = ["ALIGNMENT", "Arena", "arena_name", "round_up"]

ALIGNMENT = 64
GROWTH = 2 << 20


def arena_name(index: int) -> str:
    return f"arena-{index}"


def round_up(nbytes: int, unit: int = ALIGNMENT) -> int:
    return nbytes + (-nbytes % unit)


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
