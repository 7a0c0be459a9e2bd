"""What the user sees while `close()` waits for the uploader."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from smdist.messages import readable_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from smdist.workers.capture.capture import Usage

__all__ = ["DrainProgress", "left"]

_QUIET_S = 1.0
_EVERY_S = 10.0


class DrainProgress:
    """Quiet for the first second; then a bar on a terminal, else a line in the log now and then."""

    def __init__(
        self, worker: str, log: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker, self._log, self._clock = worker, log, clock
        self._began = self._told = clock()
        self._stored_before: int | None = None
        self._stack = ExitStack()
        self._bar: tuple[Progress, TaskID] | None = None
        self.trouble = ""  # what holds the uploader up, as of the last call

    def close(self) -> None:
        self._stack.close()

    def __call__(self, usage: Usage, trouble: str) -> None:
        now = self._clock()
        self.trouble = trouble
        if self._stored_before is None:
            self._stored_before = usage.stored_bytes
        if now - self._began < _QUIET_S:
            return
        if sys.stderr is not None and sys.stderr.isatty():
            self._draw(usage)
        elif now - self._told >= _EVERY_S:
            self._told = now
            waited_s = now - self._began
            speed = pace(usage, usage.stored_bytes - self._stored_before, waited_s)
            why = f" ({trouble})" if trouble else ""
            self._log.warning(
                "%s: waiting for the uploader: %s left, %s, %.0f s so far%s",
                self._worker,
                left(usage),
                speed,
                waited_s,
                why,
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


def left(usage: Usage) -> str:
    """What is captured and not stored. The uploader counts on while we ask: never below zero."""
    nbytes = max(usage.captured_bytes - usage.stored_bytes, 0)
    steps = max(usage.captured_steps - usage.stored_steps, 0)
    return (
        f"{readable_bytes(nbytes)} of {readable_bytes(usage.captured_bytes)}, "
        f"{steps} of {usage.captured_steps} steps ({usage.pending_records} records)"
    )


def pace(usage: Usage, stored_bytes: int, seconds: float) -> str:
    """How fast it goes, and how long it will take at that."""
    rate = stored_bytes / seconds if seconds > 0 else 0.0
    if rate <= 0:
        return "nothing stored meanwhile"
    remaining_s = max(usage.captured_bytes - usage.stored_bytes, 0) / rate
    return f"{readable_bytes(rate)}/s, {remaining_s:.0f} s to go"
