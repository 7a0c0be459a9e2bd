"""Wait for conditions, with deadlines that a slow machine keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0


def until(
    condition: Callable[[], Any],
    what: str,
    timeout_s: float = PATIENCE_S,
    about: Callable[[], object] = lambda: "",
) -> Any:
    """Wait until `condition()` is true, and return what it returned.

    When time is up, raise AssertionError with `what` and the result of `about()`.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for: {what}; {about()}"
        time.sleep(0.005)
    return found


async def until_async(
    condition: Callable[[], Any],
    what: str,
    timeout_s: float = PATIENCE_S,
    about: Callable[[], object] = lambda: "",
) -> Any:
    """Do the same as `until` without blocking the event loop."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for: {what}; {about()}"
        await asyncio.sleep(0.005)
    return found
