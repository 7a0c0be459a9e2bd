"""Commits that must wait for a device: in order, on a thread of their own.

The training thread submits and goes on; the thread waits for the copies to arrive, then runs the
action, which is told what went wrong with them. While anything is in here, everything else has to go through here too, or the journal's order
would not be the order of capture.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from smdist.workers.capture.background_thread import Aside
from smdist.workers.capture.tensor_access import CopyHandle

__all__ = ["Deferred"]

_LOOK_S = 0.001

Action = Callable[[Optional[Exception]], None]  # noqa: UP045 (3.10)


class _Commit(NamedTuple):
    waits: Sequence[CopyHandle]
    action: Action
    held: int  # the range in the buffer that it is about, -1 for none


class Deferred:
    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self.pending: deque[_Commit] = deque()  # each stays until it is done
        self._aside = Aside(self._work)

    def held(self) -> set[int]:
        """The ranges that are still to be written to."""
        return {commit.held for commit in tuple(self.pending)}

    def submit(self, waits: Sequence[CopyHandle], action: Action, held: int = -1) -> None:
        self.pending.append(_Commit(waits, action, held))
        self._aside.ring()

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if self.pending:
            self._aside.ring()  # should `submit` have been interrupted before it did
        while self.pending:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _work(self) -> None:
        while self.pending:
            commit = self.pending[0]
            try:
                commit.action(_error_of(commit.waits))
            except Exception as error:  # noqa: BLE001 (reported; the next commits go on)
                self._on_error(error)
            finally:
                self.pending.popleft()


def _error_of(waits: Sequence[CopyHandle]) -> Exception | None:
    try:
        for wait in waits:
            wait()
    except Exception as error:  # noqa: BLE001 (the action reports it)
        return error
    return None
