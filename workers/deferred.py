"""Commits that must wait for a device: in order, on a thread of their own.

The training thread submits and goes on; the thread waits for the copies to arrive, then runs the
action. While anything is in here, everything else has to go through here too, or the journal's order
would not be the order of capture.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from smdist.workers.host import Wait

__all__ = ["Deferred"]


class Deferred:
    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._queue: queue.SimpleQueue[tuple[Sequence[Wait], Callable[[], None]]] = (
            queue.SimpleQueue()
        )
        self._on_error = on_error
        self._idle = threading.Condition()
        self.pending = 0
        self._thread: threading.Thread | None = None

    def submit(self, waits: Sequence[Wait], action: Callable[[], None]) -> None:
        with self._idle:
            self.pending += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="smdist-deferred", daemon=True)
            self._thread.start()
        self._queue.put((waits, action))

    def join(self, timeout_s: float) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self.pending == 0, timeout_s)

    def _run(self) -> None:
        while True:
            waits, action = self._queue.get()
            try:
                for wait in waits:
                    wait()
                action()
            except Exception as error:  # noqa: BLE001 (reported; the next commits go on)
                self._on_error(error)
            finally:
                with self._idle:
                    self.pending -= 1
                    self._idle.notify_all()
