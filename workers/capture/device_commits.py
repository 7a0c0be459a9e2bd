"""Journal records that must wait for a device copy: committed in order, on a thread of their own.

The training thread submits and continues. The thread waits for the copies to arrive, then calls the
action with the error of the copy, if any. While a commit is pending, every other record must pass
through this queue too: the order of the journal is the order of capture.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from smdist.workers.capture.background_thread import BackgroundThread
from smdist.workers.capture.tensor_access import CopyHandle

__all__ = ["DeviceCommits"]

_POLL_S = 0.001

Action = Callable[[Optional[Exception]], None]  # noqa: UP045 (3.10)


class _Commit(NamedTuple):
    copies: Sequence[CopyHandle]
    action: Action
    range_key: int  # of the buffer range that is written to, -1 for none


class DeviceCommits:
    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self.pending: deque[_Commit] = deque()  # each stays until it is done
        self._thread = BackgroundThread(self._work)

    def range_keys(self) -> set[int]:
        """Return the keys of buffer ranges that are still to be written to."""
        return {commit.range_key for commit in tuple(self.pending)}

    def submit(self, copies: Sequence[CopyHandle], action: Action, range_key: int = -1) -> None:
        self.pending.append(_Commit(copies, action, range_key))
        self._thread.wake()

    def join(self, timeout_s: float) -> bool:
        """Wait until nothing is pending. Return False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        if self.pending:
            self._thread.wake()  # `submit` may have been interrupted before it did
        while self.pending:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _work(self) -> None:
        while self.pending:
            commit = self.pending[0]
            try:
                commit.action(_error_of(commit.copies))
            except Exception as error:  # noqa: BLE001 (reported; later commits continue)
                self._on_error(error)
            finally:
                self.pending.popleft()


def _error_of(copies: Sequence[CopyHandle]) -> Exception | None:
    try:
        for wait in copies:
            wait()
    except Exception as error:  # noqa: BLE001 (the action reports it)
        return error
    return None
