"""Which ranges of an arena are free. Pure: touches no memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

__all__ = ["FreeList"]


class FreeList:
    """First fit from the lowest offset, so that few pages are used and those stay warm."""

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
