"""Keep the capture buffer a few steps ahead: pages are faulted in off the training thread."""

from __future__ import annotations

from contextlib import suppress

from smdist.workers.capture.background_thread import BackgroundThread
from smdist.workers.capture.buffer import CaptureBuffer

__all__ = ["Prefaulter"]

_STOP_S = 10.0


class Prefaulter:
    def __init__(self, buffer: CaptureBuffer) -> None:
        self._buffer = buffer
        self._spare_bytes = 0
        self._thread = BackgroundThread(self._prefault)

    def request(self, spare_bytes: int) -> None:
        """Have at least `spare_bytes` ready soon. Returns at once."""
        if self._buffer.spare_bytes >= spare_bytes or spare_bytes > self._buffer.limit_bytes:
            return
        self._spare_bytes = spare_bytes
        self._thread.wake()

    def stop(self) -> bool:
        """Stop the thread. Return False if it still runs: the memory must stay mapped then."""
        return self._thread.stop(_STOP_S)

    def _prefault(self) -> None:
        missing = self._spare_bytes - self._buffer.spare_bytes
        if missing > 0:
            with suppress(OSError):  # reported by the training thread when it needs the room
                self._buffer.prefault(missing)
