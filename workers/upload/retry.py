"""How the uploader bears a store that refuses: it tries again, tells, and loses nothing.

`insist` repeats one operation with growing, jittered pauses until it succeeds. Meanwhile the acknowledgement page
says what is wrong and since when (the hook shows it), and the user gets one line at once and
another one rarely. Once the training process is gone, it ends when nothing has succeeded for as long
as `give_up_after` says: RetryDeadlineExceeded. A drain that goes on, however slowly, is never given up.
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
    """The store refused until the deadline."""


class ForeignObject(CaptureError):
    """The store holds something under our keys that is not ours; trying again changes nothing."""


class _Failing(NamedTuple):
    since: float  # by the wall clock
    text: str
    serious: bool  # the user is told of it


class Retrier:
    """Used on one event loop."""

    def __init__(
        self, ack_page: AckPage, say: Callable[[str], None], pending_bytes: Callable[[], int]
    ) -> None:
        self._ack_page, self._say, self._pending_bytes = ack_page, say, pending_bytes
        self._failing: dict[object, _Failing] = {}  # by operation; what fails longest is first
        self._said_at, self._times_said = 0.0, 0
        self._limit_s: float | None = None
        self._last_progress_at = 0.0  # when something last went well, or the limit was set
        self._moved = 0
        self._stopped = False
        self.failures = 0  # so far, of all operations

    def set_idle_deadline(self, seconds: float) -> None:
        """From now on, `seconds` in which nothing succeeds are the end; the first call counts."""
        if self._limit_s is None:
            self._limit_s, self._last_progress_at = seconds, time.monotonic()

    def say(self, message: str) -> None:
        self._say(message)

    def stop(self) -> None:
        """Give up now, whatever goes well."""
        self._stopped = True

    def note_progress(self, count: int) -> None:
        """How much has gone well within operations that are under way, and may take long.

        While one of them fails it counts for nothing: what is sent again and again is no progress.
        """
        if count > self._moved and not self._failing:
            self._last_progress_at = time.monotonic()
        self._moved = count

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._deadline

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
        """`what` names the operation, in words for the user; `only` says what to bear."""
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
        if self.expired:
            raise RetryDeadlineExceeded(self._ack_page.last_error)
        await asyncio.sleep(min(pause_s, max(self._deadline - time.monotonic(), 0.0)))

    def failed(
        self, token: object, what: str, error: Exception, *, notify_user: bool = True
    ) -> None:
        """Note that an operation, known by `token`, does not succeed; not `tell`: a courtesy."""
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
            self._say(f"{self._ack_page.last_error}. It is tried again; {waiting}nothing is lost")

    def succeeded(self, token: object) -> None:
        if self._failing.pop(token, None) is None:
            return
        self._show()
        # A courtesy that failed may never be tried again.
        if self._times_said and not any(failing.serious for failing in self._failing.values()):
            self._say("the store works again")
            self._times_said = 0

    def _show(self) -> None:
        """In the acknowledgement page, what holds the drain up; a courtesy that fails holds nothing up."""
        failing = sorted(self._failing.values(), key=lambda each: not each.serious)
        self._ack_page.last_error = failing[0].text if failing else ""
