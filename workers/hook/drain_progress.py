"""Wait for the uploader in `close()`, and show the user how far it is. On the thread that closes."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smdist.messages import readable_bytes
from smdist.workers.capture.capture import Capture, Usage
from smdist.workers.upload.process import Supervisor

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["DrainProgress", "Drained", "describe_pending", "drain"]

_QUIET_S = 1.0
_LOG_INTERVAL_S = 10.0


@dataclass(frozen=True)
class Drained:
    is_complete: bool
    pending: str  # what is captured and not stored
    last_error: str  # what held the uploader up at last


class _UploaderGoneError(Exception):
    pass


def drain(
    capture: Capture[Any],
    supervisor: Supervisor | None,
    timeout_s: float,
    worker: str,
    log: logging.Logger,
) -> Drained:
    """Wait until everything is stored, for `timeout_s` seconds and while there is an uploader."""
    with closing(DrainProgress(worker, log)) as progress:

        def watch(usage: Usage, last_error: str) -> None:
            if supervisor is not None and not supervisor.running:
                raise _UploaderGoneError
            progress(usage, last_error)

        try:
            complete = capture.drain(timeout_s, watch)
        except _UploaderGoneError:  # it may have finished in this moment
            complete = capture.usage().pending_records == 0
        return Drained(complete, describe_pending(capture.usage()), progress.last_error)


class DrainProgress:
    """Quiet for the first second; then a bar on a terminal, otherwise a log line every 10 seconds."""

    def __init__(
        self, worker: str, log: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker, self._log, self._clock = worker, log, clock
        self._began = self._logged_at = clock()
        self._stored_before: int | None = None
        self._stack = ExitStack()
        self._bar: tuple[Progress, TaskID] | None = None
        self.last_error = ""  # what holds the uploader up, as of the last call

    def close(self) -> None:
        self._stack.close()

    def __call__(self, usage: Usage, last_error: str) -> None:
        now = self._clock()
        self.last_error = last_error
        if self._stored_before is None:
            self._stored_before = usage.stored_bytes
        if now - self._began < _QUIET_S:
            return
        if sys.stderr is not None and sys.stderr.isatty():
            self._draw(usage)
        elif now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            waited_s = now - self._began
            speed = describe_rate(usage, usage.stored_bytes - self._stored_before, waited_s)
            cause = f" ({last_error})" if last_error else ""
            self._log.warning(
                "%s: waiting for the uploader: %s left, %s, %.0f s so far%s",
                self._worker,
                describe_pending(usage),
                speed,
                waited_s,
                cause,
            )

    def _draw(self, usage: Usage) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (
                "{task.description}",
                BarColumn(),
                DownloadColumn(binary_units=True),
                "{task.fields[steps]}",
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._stack.enter_context(bar)
            label = f"{self._worker}: storing"
            self._bar = bar, bar.add_task(label, total=usage.captured_bytes, steps="")
        progress, task = self._bar
        steps = f"{usage.stored_steps}/{usage.captured_steps} steps"
        progress.update(task, completed=usage.stored_bytes, total=usage.captured_bytes, steps=steps)


def describe_pending(usage: Usage) -> str:
    """Return what is captured and not stored, as text."""
    # Never below zero: the uploader goes on counting meanwhile.
    nbytes = max(usage.captured_bytes - usage.stored_bytes, 0)
    steps = max(usage.captured_steps - usage.stored_steps, 0)
    return (
        f"{readable_bytes(nbytes)} of {readable_bytes(usage.captured_bytes)}, "
        f"{steps} of {usage.captured_steps} steps ({usage.pending_records} records)"
    )


def describe_rate(usage: Usage, stored_bytes: int, seconds: float) -> str:
    """Return the rate of storing, and the time that the rest will take, as text."""
    rate = stored_bytes / seconds if seconds > 0 else 0.0
    if rate <= 0:
        return "nothing stored so far"
    remaining_s = max(usage.captured_bytes - usage.stored_bytes, 0) / rate
    return f"{readable_bytes(rate)}/s, {remaining_s:.0f} s to go"
