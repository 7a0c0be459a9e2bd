"""Warm shared memory that captured tensors are copied into.

A sparse file as large as the limit, mapped whole by the training process. A range is reserved with
`posix_fallocate` before it is written, so a file system without room says ENOSPC here instead of SIGBUS in
the middle of a copy. Freed ranges are handed out again lowest first, with their pages still mapped:
a copy into such pages runs at the speed of memcpy, one into fresh pages ten times slower. `warm` makes pages
resident ahead of need, off the training thread.
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

__all__ = ["ALIGNMENT", "Arena", "arena_name", "rounded"]

ALIGNMENT = 64
GROWTH = 2 << 20


def arena_name(index: int) -> str:
    return f"arena-{index}"


def rounded(nbytes: int, unit: int = ALIGNMENT) -> int:
    return nbytes + (-nbytes % unit)


class Arena:
    """Owned by the training process; `take` and `give` may be called from any of its threads."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.capacity = rounded(capacity, mmap.PAGESIZE)
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
        """Bytes reserved and free: what can be taken without asking the kernel for pages."""
        return self._list.free_bytes

    def take(self, nbytes: int) -> int:
        """Offset of a range, -1 when the limit leaves no room. OSError when the file system does."""
        need = rounded(nbytes)
        while True:
            with self._lock:
                offset = self._list.take(need)
            if offset >= 0:
                return offset
            if not self._grow(need, warm=False):
                return -1

    def take_some(self, least: int, most: int) -> tuple[int, int]:
        """Offset and size of a range of what is reserved already; (-1, 0) when none has `least`."""
        with self._lock:
            return self._list.take_some(rounded(least), most)

    def give(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._list.give(offset, rounded(nbytes))

    def reset(self, in_use: Iterable[tuple[int, int]]) -> None:
        """Free all that is reserved, but for those ranges: an exception may have come in between."""
        with self._lock:
            self._list = FreeList.beside(in_use, self._reserved)

    def warm(self, nbytes: int) -> None:
        """Reserve `nbytes` more, if the limit allows, and fault their pages in."""
        self._grow(nbytes, warm=True)

    def _grow(self, nbytes: int, *, warm: bool) -> bool:
        with self._growing:
            start = self._reserved
            size = min(rounded(nbytes, GROWTH), self.capacity - start)
            if size < nbytes and not (size > 0 and self._tail_fits(nbytes, size)):
                return False
            os.posix_fallocate(self._fd, start, size)
            if warm:
                kernel.populate(self.address + start, size)
            with self._lock:
                self._reserved = start + size
                self._list.give(start, size)
        return True

    def _tail_fits(self, nbytes: int, size: int) -> bool:
        """Would the last piece up to the limit, joined with free space before it, hold `nbytes`?"""
        with self._lock:
            return self._list.tail(self._reserved) + size >= nbytes

    def close(self) -> None:
        """Can be repeated if it is interrupted."""
        self._anchor = None
        self.view.release()
        with contextlib.suppress(BufferError):  # a framework holds a view: freed with the process
            self._map.close()
        descriptor, self._fd = self._fd, -1  # first: another file may have that number afterwards
        if descriptor >= 0:
            os.close(descriptor)
