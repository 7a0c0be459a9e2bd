"""Keeps the buffer one step ahead: pages are faulted in on this thread, not on training's."""

from __future__ import annotations

from contextlib import suppress

from smdist.workers.capture.background_thread import Aside
from smdist.workers.capture.buffer import Buffer

__all__ = ["Warmer"]

_STOP_S = 10.0


class Warmer:
    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._wanted = 0
        self._aside = Aside(self._warm)

    def want(self, spare_bytes: int) -> None:
        """Have at least so much room ready; returns at once."""
        if self._buffer.spare_bytes >= spare_bytes or spare_bytes > self._buffer.limit_bytes:
            return
        self._wanted = spare_bytes
        self._aside.ring()

    def stop(self) -> bool:
        """False: it is still at work, and the memory must stay."""
        return self._aside.stop(_STOP_S)

    def _warm(self) -> None:
        missing = self._wanted - self._buffer.spare_bytes
        if missing > 0:
            with suppress(
                OSError
            ):  # the training thread will meet it, and say so, if it needs room
                self._buffer.warm(missing)
