"""What happens to a part that finds no room: wait or drop, and how the user learns of it.

`on_full="block"` waits up to `block_timeout_s`, then drops. `on_full="drop"` drops at once. Each reason
is reported to the user once; every drop is counted and written to the journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import msgspec

from smdist.format.journal_records import Drop
from smdist.messages import encodable
from smdist.workers.capture.part_plan import PartPlan, Stamp
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.spool import Doorbell

__all__ = ["CaptureLimits", "Counters", "RoomPolicy"]

_WARN_AFTER_S = 2.0
_MAX_REASONS = 5  # reported to the user


class CaptureLimits(msgspec.Struct, frozen=True):
    buffer_bytes: int
    on_full: Literal["block", "drop"] = "block"
    block_timeout_s: float = 600.0  # then drop, rather than hang the job


class Counters:
    """What a capture has done so far; `Capture.usage` shows it."""

    def __init__(self) -> None:
        self.captured_bytes = self.captured_steps = self.step_bytes = 0
        self.dropped_tensors = self.dropped_bytes = 0
        self.blocked_s = 0.0


class RoomPolicy:
    def __init__(
        self,
        limits: CaptureLimits,
        counters: Counters,
        ack_page: AckPage,
        doorbell: Doorbell,
        warn: Callable[[str], None],
    ) -> None:
        self._limits, self._counters, self._warn = limits, counters, warn
        self._ack_page, self._doorbell = ack_page, doorbell
        self._warned: set[str] = set()  # reasons to drop
        self._gave_up_waiting_at = -1  # acknowledged ordinal when a wait ran out
        self.uploader_alive: Callable[[], bool] = lambda: True

    def drop(self, stamp: Stamp, plan: PartPlan, reason: str) -> Drop:
        """Count the tensors of `plan` as dropped, and return the record of it."""
        self.warn_once(stamp[2], reason, f"{len(plan.names)} tensors not captured: {reason}")
        self._counters.dropped_tensors += len(plan.names)
        self._counters.dropped_bytes += plan.nbytes
        return Drop(*stamp, tuple(map(encodable, plan.names)), plan.nbytes, encodable(reason))

    def warn_once(self, step: int, reason: str, message: str) -> None:
        if reason not in self._warned and len(self._warned) < _MAX_REASONS:
            self._warned.add(reason)
            self._warn(f"step {step}: {message}")

    def reason_to_drop(self, nbytes: int) -> str:
        """Return why a part without room must be dropped at once, empty if it may wait."""
        limit = self._limits.buffer_bytes
        if nbytes > limit:
            return f"{nbytes} bytes at once exceed buffer_bytes={limit}; raise it"
        if self._limits.on_full == "drop":
            return f"the buffer of {limit} bytes was full"
        return ""

    @property
    def can_wait(self) -> bool:
        """Return whether a wait is worth it.

        After one that ran out, the job must not stop again for every tensor until the store has
        made progress.
        """
        return self._ack_page.acked != self._gave_up_waiting_at

    def wait(self, step: int, attempt: Callable[[], bool | None]) -> bool | None:
        """Call `attempt` until it does not return None. Return None after `block_timeout_s`."""
        began = time.monotonic()
        saved = self._wait_for_space(step, attempt, began)
        self._counters.blocked_s += time.monotonic() - began
        self._gave_up_waiting_at = self._ack_page.acked if saved is None else -1
        return saved

    def _wait_for_space(
        self, step: int, attempt: Callable[[], bool | None], began: float
    ) -> bool | None:
        warned = False
        while (waited := time.monotonic() - began) < self._limits.block_timeout_s:
            if not self.uploader_alive():
                return None
            self._doorbell.ring()
            time.sleep(min(0.0005 + waited / 20, 0.02))
            saved = attempt()
            if saved is not None:
                return saved
            if waited > _WARN_AFTER_S and not warned:
                warned = True
                self._warn(
                    f"step {step}: training waits for room in the capture buffer "
                    f"({self._limits.buffer_bytes} bytes): "
                    f"{self._ack_page.last_error or 'the uploader is slower than capture'}. "
                    "Raise buffer_bytes, save less often, or pass on_full='drop'."
                )
        return None

    def reason_after_wait(self) -> str:
        """Return why a part was dropped that has waited, or that could not."""
        if not self.uploader_alive():
            return "the buffer was full and no uploader is left to empty it"
        cause = self._ack_page.last_error or "slow uploader"
        return f"no room for {self._limits.block_timeout_s:.0f} s; {cause}"
