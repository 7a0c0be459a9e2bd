"""Which operation of a capture is under way: tells an interrupted one from a nested call.

A signal handler may raise between any two instructions of an operation, or call the capture again.
`busy` is set while an operation runs. If it is still set when the next operation begins, then either
the earlier one was cut off by an exception (its lock is free), or it is still running below this call
(its thread holds the lock twice).
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import NamedTuple

from smdist.workers.capture.part_plan import PartPlan, Stamp

__all__ = ["Reentrancy", "WaitingSave"]


class WaitingSave(NamedTuple):
    """A `save` that waits for room, outside of any operation."""

    frame: FrameType
    stamp: Stamp
    plan: PartPlan


class Reentrancy:
    __slots__ = ("busy", "lock", "waiting")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.busy: PartPlan | str | None = None  # what is under way, or was when it was cut off
        self.waiting: dict[int, WaitingSave] = {}  # by thread

    @property
    def is_nested(self) -> bool:
        """Return whether an outer call of this thread holds the lock, too."""
        return " count=1 " not in repr(self.lock)  # before Python 3.11 nothing else tells

    @property
    def is_reentrant_call(self) -> bool:
        """Return whether this thread is inside of an operation: a signal handler must wait."""
        waiting = self.waiting.get(threading.get_ident())
        is_waiting = waiting is not None and _is_running(waiting.frame)
        return is_waiting or bool(self.lock._is_owned())  # type: ignore[attr-defined]

    def begin_wait(self, stamp: Stamp, plan: PartPlan) -> None:
        """Note that the calling function waits for room. Its frame tells whether it still does."""
        waiting = WaitingSave(sys._getframe(1), stamp, plan)
        self.waiting[threading.get_ident()] = waiting

    def end_wait(self) -> None:
        self.waiting.pop(threading.get_ident(), None)

    def interrupted_wait(self) -> WaitingSave | None:
        """Return the wait of this thread that an exception has ended, if any."""
        waiting = self.waiting.get(threading.get_ident())
        return None if waiting is None or _is_running(waiting.frame) else waiting


def _is_running(frame: FrameType) -> bool:
    """Check whether the calling thread is inside of `frame`."""
    inner: FrameType | None = sys._getframe()
    while inner is not None and inner is not frame:
        inner = inner.f_back
    return inner is not None
