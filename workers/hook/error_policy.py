"""Errors of ours beside a training job: one policy for all of them."""

from __future__ import annotations

import logging
import re
import signal
import traceback
from collections.abc import Callable
from types import CodeType

from smdist.errors import ConfigurationError, DrainTimeout
from smdist.messages import encodable

__all__ = ["ErrorPolicy", "raised_by_signal_handler"]

_MOST_KINDS = 200
_STEP = re.compile(r"step \d+")
_NUMBER = re.compile(r"\d+")


class ErrorPolicy:
    """`on_error="warn"`: counted, logged once each, noted in the run. `"raise"`: raised.

    A wrong setting is raised in either case: it shows at the first step at the latest. So is what a
    signal handler of the script raised while we were at work: it is not ours.
    """

    def __init__(self, on_error: str, log: logging.Logger) -> None:
        self.count = 0
        self._raises = on_error == "raise"
        self._log = log
        self._seen: set[str] = set()
        self._journal: Callable[[str], None] | None = None
        self._pending: list[str] = []

    def attach_journal(self, note: Callable[[str], None]) -> None:
        """From now on `note` writes into the run; what happened before is handed to it."""
        self._journal = note
        while self._pending:
            note(self._pending[0])
            del self._pending[0]

    def on_exception(self, error: Exception, doing: str) -> None:
        """Called in an `except` clause; returns if training is to go on."""
        if self._raises or isinstance(error, ConfigurationError) or raised_by_signal_handler(error):
            raise error
        message = encodable(f"{doing}: {type(error).__name__}: {error}")
        # What goes wrong at every step does so with another number each time. Elsewhere a number
        # may be all that tells two tensors apart.
        kind = _NUMBER.sub("#", message) if _STEP.fullmatch(doing) else message
        self._report(kind, message, error)

    def report_not_drained(self, error: DrainTimeout) -> None:
        """After the end: what is not stored, and how to send it. Words are all that helps then."""
        if self._raises:
            raise error
        self.count += 1
        self._log.warning("%s", error)

    def warn_once(self, message: str) -> None:
        message = encodable(message)
        self._report(message, message)

    def _report(self, kind: str, message: str, error: BaseException | None = None) -> None:
        self.count += 1
        if kind in self._seen or len(self._seen) >= _MOST_KINDS:
            return
        self._seen.add(kind)
        self._log.warning("%s (training goes on; said once)", message, exc_info=error)
        if self._journal is None:
            self._pending.append(message)
            return
        try:
            self._journal(message)
        except Exception as failed:  # noqa: BLE001 (telling of an error must not be the next one)
            self._log.warning("that could not be noted in the run: %r", failed)


def raised_by_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the script raised it, or what it came from."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    cause: BaseException | None = error
    while cause is not None:
        if any(f.f_code in handlers for f, _ in traceback.walk_tb(cause.__traceback__)):
            return True
        cause = cause.__cause__
    return False


def _code(handler: object) -> CodeType | None:
    """Of a function, a method, a partial of one, or an object that can be called."""
    called = getattr(handler, "func", handler)
    if not hasattr(called, "__code__"):
        called = getattr(type(called), "__call__", None)  # noqa: B004 (what is there to be called)
    code = getattr(called, "__code__", None)
    return code if isinstance(code, CodeType) else None
