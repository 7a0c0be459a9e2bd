"""A daemon thread for work that the training thread does not wait for.

Safe where a signal handler may raise at any moment: the hand-over consists of single calls into C.
`threading.Condition`, `threading.Event` and `threading.Thread` are written in Python. An exception in
the middle of them can leave a lock that is never released.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable

__all__ = ["BackgroundThread"]


class BackgroundThread:
    def __init__(self, work: Callable[[], None]) -> None:
        """Call `work` on the thread at least once after each `wake`. It must not raise."""
        self._work = work
        self._wakeups: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._running = threading.Lock()  # held by the thread while it lives
        self._started = False

    def wake(self) -> None:
        if not self._started:
            _thread.start_new_thread(self._run, ())
            self._started = True  # a second thread, started after an interruption, ends at once
        self._wakeups.put(True)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current work. Return False if that takes longer."""
        self._wakeups.put(False)
        if self._started and not self._running.acquire(timeout=timeout_s):
            return False
        self._started = False
        return True

    def _run(self) -> None:
        if not self._running.acquire(blocking=False):
            return
        try:
            while self._wakeups.get():
                self._work()
        finally:
            self._running.release()
