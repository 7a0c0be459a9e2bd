"""A thread beside the training thread, for work that nobody waits for.

Safe to use where a signal handler may raise at any moment: the hand-over is made of calls that C code
does at one stroke. `threading.Condition`, `threading.Event` and `threading.Thread` are written in Python,
and an exception in the middle of them can leave a lock that nobody opens again.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable

__all__ = ["Aside"]


class Aside:
    def __init__(self, work: Callable[[], None]) -> None:
        """`work` is called on that thread, at least once after each `ring`. It raises nothing."""
        self._work = work
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._alone = threading.Lock()  # held by the thread for as long as it lives
        self._started = False

    def ring(self) -> None:
        if not self._started:
            _thread.start_new_thread(self._run, ())
            self._started = True  # one that is started twice ends at once
        self._bell.put(True)

    def stop(self, timeout_s: float) -> bool:
        """Have the thread end after what it is at; False if that takes longer."""
        self._bell.put(False)
        if self._started and not self._alone.acquire(timeout=timeout_s):
            return False
        self._started = False
        return True

    def _run(self) -> None:
        if not self._alone.acquire(blocking=False):
            return
        try:
            while self._bell.get():
                self._work()
        finally:
            self._alone.release()
