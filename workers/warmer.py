"""Keeps the buffer one step ahead: pages are faulted in on this thread, not on training's."""

from __future__ import annotations

import threading

from smdist.workers.buffer import Buffer

__all__ = ["Warmer"]


class Warmer:
    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._wanted = 0
        self._stopped = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    def want(self, spare_bytes: int) -> None:
        """Have at least so much room ready; returns at once."""
        if self._buffer.spare_bytes >= spare_bytes or spare_bytes > self._buffer.limit_bytes:
            return
        with self._wake:
            self._wanted = spare_bytes
            self._wake.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="smdist-warmer", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._wanted or self._stopped)
                missing, self._wanted = self._wanted - self._buffer.spare_bytes, 0
                if self._stopped:
                    return
            if missing > 0:
                self._buffer.warm(missing)
