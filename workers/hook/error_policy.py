"""`on_error`: what happens when smdist itself fails beside a training job."""

from __future__ import annotations

import logging
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType

from smdist.errors import ConfigurationError, DrainTimeout
from smdist.messages import encodable

__all__ = ["ErrorPolicy", "raised_by_signal_handler"]

_MAX_KINDS = 200
_SUFFIX = "(training continues; further occurrences are counted, not logged)"
_STEP = re.compile(r"step \d+")
_NUMBER = re.compile(r"\d+")


class ErrorPolicy:
    """Counts errors, logs each kind once and notes it in the run; with `on_error="raise"` raises.

    Wrong settings are always raised: they show at the first step at the latest. So is what a signal
    handler of the script raised while smdist was at work: it belongs to the script.
    """

    def __init__(self, on_error: str, log: logging.Logger) -> None:
        self.count = 0
        self._raises = on_error == "raise"
        self._log = log
        self._seen: set[str] = set()
        self._journal: Callable[[str], None] | None = None
        self._pending: list[str] = []

    def attach_journal(self, journal: Callable[[str], None]) -> None:
        """Note messages in the run by `journal` from now on; earlier ones are handed to it."""
        self._journal = journal
        while self._pending:
            journal(self._pending[0])
            del self._pending[0]

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Apply the policy to any exception of the `with` block. Too slow for the hot path."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self.on_exception(error, doing)

    def on_exception(self, error: Exception, doing: str) -> None:
        """Raise `error`, or report it and return so that training continues.

        To be called in an `except` clause.
        """
        if self._raises or isinstance(error, ConfigurationError) or raised_by_signal_handler(error):
            raise error
        message = encodable(f"{doing}: {type(error).__name__}: {error}")
        # An error of every step has another number each time. Elsewhere a number may be all that
        # distinguishes two tensors.
        kind = _NUMBER.sub("#", message) if _STEP.fullmatch(doing) else message
        self._report(kind, message, error)

    def report_not_drained(self, error: DrainTimeout) -> None:
        """Raise or log what is not stored after the end, and how to store it."""
        if self._raises:
            raise error
        self.count += 1
        self._log.warning("%s", error)

    def warn_once(self, message: str) -> None:
        message = encodable(message)
        self._report(message, message)

    def warn_not_captured(self, name: str, error: Exception) -> None:
        """Warn that the tensor `name` was skipped, as `error` says why it cannot be read."""
        self.warn_once(f"{name} was not captured: {error}")

    def _report(self, kind: str, message: str, error: BaseException | None = None) -> None:
        self.count += 1
        if kind in self._seen or len(self._seen) >= _MAX_KINDS:
            return
        self._seen.add(kind)
        self._log.warning("%s %s", message, _SUFFIX, exc_info=error)
        if self._journal is None:
            self._pending.append(message)
            return
        try:
            self._journal(message)
        except Exception as failed:  # noqa: BLE001 (reporting an error must not raise another)
            self._log.warning("that could not be noted in the run: %r", failed)


def raised_by_signal_handler(error: BaseException) -> bool:
    """Check whether a signal handler of the script raised `error` or one of its causes."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    cause: BaseException | None = error
    while cause is not None:
        if any(f.f_code in handlers for f, _ in traceback.walk_tb(cause.__traceback__)):
            return True
        cause = cause.__cause__
    return False


def _code(handler: object) -> CodeType | None:
    """Return the code of a function, a method, a partial of one, or a callable object."""
    called = getattr(handler, "func", handler)
    if not hasattr(called, "__code__"):
        called = getattr(type(called), "__call__", None)  # noqa: B004 (the method itself is needed)
    code = getattr(called, "__code__", None)
    return code if isinstance(code, CodeType) else None
