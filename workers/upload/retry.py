"""Retry store operations until they succeed.

`Retrier.run` repeats one operation with growing, jittered pauses. Each failure is shown to the user once and
then at growing intervals, and is written to the acknowledgement page so that the hook can show it. After the
training process has exited, retrying stops when nothing has succeeded for the idle deadline
(RetryDeadlineExceeded); any progress restarts that clock.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from smdist.errors import CaptureError
from smdist.messages import readable_bytes
from smdist.workers.spool.ack_page import AckPage

__all__ = ["ForeignObject", "Retrier", "RetryDeadlineExceeded"]

T = TypeVar("T")

_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.05, 10.0
_REPEAT_S = (60.0, 300.0, 900.0)  # when to say the same again; the last one for ever


class RetryDeadlineExceeded(CaptureError):
    """Nothing succeeded until the idle deadline."""


class ForeignObject(CaptureError):
    """The store holds an object of another process under a key of this rank. Retrying does not help."""


class _Failing(NamedTuple):
    since: float  # by the wall clock
    text: str
    serious: bool  # the user is told of it


class Retrier:
    """Used on one event loop."""

    def __init__(
        self, ack_page: AckPage, say: Callable[[str], None], pending_bytes: Callable[[], int]
    ) -> None:
        self._ack_page, self.say, self._pending_bytes = ack_page, say, pending_bytes
        self._failing: dict[object, _Failing] = {}  # by operation; what fails longest is first
        self._said_at, self._times_said = 0.0, 0
        self._limit_s: float | None = None
        self._last_progress_at = 0.0  # when something last went well, or the limit was set
        self._moved = 0
        self._stopped = False
        self.failures = 0  # so far, of all operations

    def set_idle_deadline(self, seconds: float) -> None:
        """Stop retrying once nothing has succeeded for `seconds`, from now on. Only the first call counts."""
        if self._limit_s is None:
            self._limit_s, self._last_progress_at = seconds, time.monotonic()

    def stop(self) -> None:
        """Stop retrying now."""
        self._stopped = True

    def note_progress(self, count: int) -> None:
        """Record how many parts of long operations were stored so far.

        Ignored while an operation fails: sending the same part again is no progress.
        """
        if count > self._moved and not self._failing:
            self._last_progress_at = time.monotonic()
        self._moved = count

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._deadline

    def raise_if_expired(self) -> None:
        if self.expired:
            silence = "the store has not answered for"
            why = "told to stop" if self._stopped else f"{silence} {self._limit_s:.0f} s"
            raise RetryDeadlineExceeded(self._ack_page.last_error or why)

    @property
    def _deadline(self) -> float:
        if self._stopped:
            return float("-inf")
        return float("inf") if self._limit_s is None else self._last_progress_at + self._limit_s

    async def run(
        self,
        description: str,
        operation: Callable[[], Awaitable[T]],
        retry_on: tuple[type[Exception], ...] = (Exception,),
    ) -> T:
        """Return the result of `operation`, repeated while it raises one of `retry_on`.

        `description` names the operation in messages to the user. Raises RetryDeadlineExceeded.
        """
        pause_s, token = _FIRST_PAUSE_S, object()
        while True:
            try:
                result = await operation()
            except (RetryDeadlineExceeded, ForeignObject):
                raise
            except retry_on as error:
                self.failed(token, description, error)
            else:
                self._last_progress_at = time.monotonic()
                self.succeeded(token)
                return result
            await self._pause(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, _MOST_PAUSE_S)

    async def _pause(self, pause_s: float) -> None:
        self.raise_if_expired()
        await asyncio.sleep(min(pause_s, max(self._deadline - time.monotonic(), 0.0)))

    def failed(
        self, token: object, what: str, error: Exception, *, notify_user: bool = True
    ) -> None:
        """Record a failed attempt of the operation `token`. `notify_user=False` for optional writes."""
        self.failures += 1
        since = self._failing[token].since if token in self._failing else time.time()
        clock = time.strftime("%H:%M:%S", time.localtime(since))
        why = str(error) or type(error).__name__
        self._failing[token] = _Failing(since, f"{what} fails since {clock}: {why}", notify_user)
        self._show()
        now = time.monotonic()
        again_s = _REPEAT_S[min(self._times_said, len(_REPEAT_S)) - 1]
        if notify_user and (not self._times_said or now >= self._said_at + again_s):
            self._times_said, self._said_at = self._times_said + 1, now
            nbytes = self._pending_bytes()
            waiting = f"{readable_bytes(nbytes)} wait, " if nbytes else ""
            self.say(f"{self._ack_page.last_error}. It is tried again; {waiting}nothing is lost")

    def succeeded(self, token: object) -> None:
        if self._failing.pop(token, None) is None:
            return
        self._show()
        # An optional write that failed may never be repeated.
        if self._times_said and not any(failing.serious for failing in self._failing.values()):
            self.say("the store works again")
            self._times_said = 0

    def _show(self) -> None:
        """Write the failure that blocks the upload to the acknowledgement page; optional writes come last."""
        failing = sorted(self._failing.values(), key=lambda each: not each.serious)
        self._ack_page.last_error = failing[0].text if failing else ""
