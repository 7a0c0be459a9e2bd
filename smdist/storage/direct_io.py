"""Write large files past the page cache (`O_DIRECT`).

A segment is not read back soon, so its pages would only take memory from the training job. Fresh pages
are expensive, too: on a virtual machine that returns free memory to its host, 50 MB into the cache
took 120 ms of a processor. The same bytes through one small warm buffer take 10 ms.

On a slow disk the page cache is used: it holds the bytes better than the job's buffer would.
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

_BLOCK = 4096  # offsets, sizes and addresses are multiples of it: any disk accepts that
_BUFFER = 2 << 20  # as fast as larger ones, and fits into the cache of a core
_MIN_BYTES = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_SLOW_BYTES_PER_S = 100e6
_MEASURED_BYTES = 8 << 20
_PAUSE_S = 10.0


class DirectWriter:
    """The buffers of one store and the speed of its disk. Several threads may use it at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buffers: list[mmap.mmap] = []
        self._not_before = clock()

    def write(self, descriptor: int, views: list[memoryview], check: Callable[[], None]) -> None:
        """Write the front of `views` as far as possible and remove it; the rest stays in `views`.

        `check` is called before each write and may raise.
        """
        left = sum(view.nbytes for view in views)
        if (
            left < _MIN_BYTES
            or self._clock() < self._not_before
            or not _set_direct(descriptor, True)
        ):
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
            if error.errno != errno.EINVAL:  # the file system has other requirements
                raise
        finally:
            _set_direct(descriptor, False)
        self._note_speed(size - left, self._clock() - began)

    @contextlib.contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = mmap.mmap(-1, _BUFFER)
        with memoryview(buffer) as view:
            yield view
        self._buffers.append(buffer)

    def _note_speed(self, written: int, seconds: float) -> None:
        if written >= _MEASURED_BYTES and written < _SLOW_BYTES_PER_S * seconds:
            self._not_before = self._clock() + _PAUSE_S


def _set_direct(descriptor: int, on: bool) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:  # not supported by this file system
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
    """Remove the first `size` bytes from `views`."""
    whole = 0
    while whole < len(views) and views[whole].nbytes <= size:
        size -= views[whole].nbytes
        whole += 1
    del views[:whole]
    if size:
        views[0] = views[0][size:]
