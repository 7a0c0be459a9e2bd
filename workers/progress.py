"""What the user sees while `close()` waits for the uploader."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from smdist.workers.capture import Usage

__all__ = ["DrainProgress"]

_QUIET_S = 1.0
_EVERY_S = 10.0


class DrainProgress:
    """Quiet for the first second; then a bar on a terminal, else a line in the log now and then."""

    def __init__(self, worker: str, log: logging.Logger) -> None:
        self._worker, self._log = worker, log
        self._began = self._told = time.monotonic()
        self._stack = ExitStack()
        self._bar: tuple[Progress, TaskID] | None = None

    def close(self) -> None:
        self._stack.close()

    def __call__(self, usage: Usage, trouble: str) -> None:
        now = time.monotonic()
        if now - self._began < _QUIET_S:
            return
        if sys.stderr is not None and sys.stderr.isatty():
            self._draw(usage)
        elif now - self._told >= _EVERY_S:
            self._told = now
            left = _mib(max(usage.captured_bytes - usage.stored_bytes, 0))
            self._log.warning(
                "%s: waiting for the uploader: %s of %s left, %.0f s so far%s",
                self._worker,
                left,
                _mib(usage.captured_bytes),
                now - self._began,
                f" ({trouble})" if trouble else "",
            )

    def _draw(self, usage: Usage) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

            columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._stack.enter_context(bar)
            self._bar = bar, bar.add_task(f"{self._worker}: storing", total=usage.captured_bytes)
        progress, task = self._bar
        progress.update(task, completed=usage.stored_bytes, total=usage.captured_bytes)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
