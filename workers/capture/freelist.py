"""Which ranges of an arena are free. Pure: no memory is touched here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

__all__ = ["FreeList"]


class FreeList:
    """First fit from the lowest offset, so that as few pages as possible are in use and stay warm."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (offset, nbytes), sorted, never touching
        self.free_bytes = 0

    @classmethod
    def beside(cls, in_use: Iterable[tuple[int, int]], end: int) -> FreeList:
        """All of the bytes up to `end`, but for those ranges."""
        free, at = cls(), 0
        for offset, nbytes in sorted(in_use):
            free.give(at, offset - at)
            at = offset + nbytes
        free.give(at, end - at)
        return free

    def take(self, nbytes: int) -> int:
        """Offset of `nbytes` taken, -1 when no range is large enough."""
        for index, (offset, size) in enumerate(self._free):
            if size >= nbytes:
                if size == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (offset + nbytes, size - nbytes)
                self.free_bytes -= nbytes
                return offset
        return -1

    def take_some(self, least: int, most: int) -> tuple[int, int]:
        """Offset and size of what is taken of the first range that has `least`; (-1, 0): none has."""
        for _, size in self._free:
            if size >= least:
                taken = min(size, most)
                return self.take(
                    taken
                ), taken  # of this range: those before it have not even `least`
        return -1, 0

    def give(self, offset: int, nbytes: int) -> None:
        """Return a range; joins its neighbours."""
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
        """Size of the free range that ends at `end`, the end of all; 0 when it is taken."""
        if self._free and sum(self._free[-1]) == end:
            return self._free[-1][1]
        return 0
