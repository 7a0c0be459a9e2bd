"""Large files written past the page cache.

Nobody reads a segment back soon, so its pages would only take memory from the training job, and fresh
pages are dear: on a virtual machine that gives free memory back to its host, 50 MB into the cache took
120 ms of a processor. The same bytes through one small buffer that stays warm, straight to the disk
(`O_DIRECT`), take 10 ms.

A slow disk is spared: what it cannot take at once is better kept by the cache than by the job's buffer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator

__all__ = ["DirectWriter", "drop_front"]

_BLOCK = 4096  # offsets, sizes and addresses are multiples of it: what any disk accepts
_BUFFER = 2 << 20  # as fast as larger ones, and the copy into it stays in the cache of a core
_LEAST = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_SLOW = 100e6  # bytes per second
_JUDGED = 8 << 20
_SPARED_S = 10.0


class DirectWriter:
    """The buffers of one store, and how its disk fares. Used by several threads at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buffers: list[mmap.mmap] = []
        self._not_before = clock()

    def write(self, descriptor: int, views: list[memoryview], check: Callable[[], None]) -> None:
        """Take from the front of `views` what can be written so, if any; the rest stays in it.

        `check` is called before each write, and may raise.
        """
        left = sum(view.nbytes for view in views)
        if left < _LEAST or self._clock() < self._not_before or not _set_direct(descriptor, True):
            return
        began, size = self._clock(), left
        try:
            with self._buffer() as buffer:
                while left >= _BLOCK:
                    check()
                    wanted = min(_BUFFER, left - left % _BLOCK)
                    _fill(buffer, views, wanted)
                    written = os.write(descriptor, buffer[:wanted])
                    drop_front(views, written)
                    left -= written
                    if written % _BLOCK:
                        break
        except OSError as error:
            if error.errno != errno.EINVAL:  # what a file system says that wants it otherwise
                raise
        finally:
            _set_direct(descriptor, False)
        self._judge(size - left, self._clock() - began)

    @contextlib.contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = mmap.mmap(-1, _BUFFER)
        with memoryview(buffer) as view:
            yield view
        self._buffers.append(buffer)

    def _judge(self, written: int, seconds: float) -> None:
        if written >= _JUDGED and written < _SLOW * seconds:
            self._not_before = self._clock() + _SPARED_S


def _set_direct(descriptor: int, on: bool) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:  # a file system that knows no such thing
        return False
    return bool(_DIRECT)


def _fill(buffer: memoryview, views: list[memoryview], size: int) -> None:
    at = 0
    for view in views:
        piece = view[: size - at]
        buffer[at : at + piece.nbytes] = piece
        at += piece.nbytes
        if at == size:
            return


def drop_front(views: list[memoryview], size: int) -> None:
    """Forget the first `size` bytes of `views`."""
    whole = 0
    while whole < len(views) and views[whole].nbytes <= size:
        size -= views[whole].nbytes
        whole += 1
    del views[:whole]
    if size:
        views[0] = views[0][size:]
