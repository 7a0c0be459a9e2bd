"""Save a part of any kind: copy its tensors, append its record, or wait for room, or drop it.

Gradients that are already in host memory take the shorter path of `Capture` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from smdist import kernel
from smdist.errors import SpoolUnavailable
from smdist.format.journal_records import Flush, Inline, Part
from smdist.workers.capture.buffer import ArenaRange, CaptureBuffer
from smdist.workers.capture.journal_room import BufferLimitReached
from smdist.workers.capture.part_plan import INLINE_BYTES, PartPlan, Stamp
from smdist.workers.capture.record_log import RecordLog
from smdist.workers.capture.room_policy import Counters, RoomPolicy
from smdist.workers.capture.tensor_access import TensorAccess
from smdist.workers.capture.tensor_copier import CopiedPart, TensorCopier

__all__ = ["PartSaver"]

T = TypeVar("T")


class PartSaver(Generic[T]):
    def __init__(
        self,
        access: TensorAccess[T],
        buffer: CaptureBuffer,
        log: RecordLog,
        policy: RoomPolicy,
        counters: Counters,
        reclaim: Callable[[], None],
    ) -> None:
        """`reclaim` frees everything in the buffer that is stored by now."""
        self._copier = TensorCopier(access)
        self._buffer, self._log, self._policy, self._counters = buffer, log, policy, counters
        self._reclaim = reclaim
        self._scratch = bytearray(INLINE_BYTES)
        self._scratch_address = kernel.address_of(self._scratch)

    def attempt(self, plan: PartPlan, stamp: Stamp, tensors: Sequence[T]) -> bool | None:
        """Save a part within an operation. Return False if dropped, None if it may wait for room."""
        if self._log.ended:
            return False
        return self._find_room(partial(self._save_part, plan, stamp, tensors), plan, stamp)

    def wait_for_room(
        self, plan: PartPlan, stamp: Stamp, attempt: Callable[[], bool | None]
    ) -> bool:
        """Repeat `attempt`, each time as an operation of its own, until it succeeds or gives up.

        Other threads may save meanwhile. Return False if the part was dropped.
        """
        log, saved = self._log, None
        if self._policy.can_wait:
            log.perform(partial(log.commit, Flush()), after_end=True)
            saved = self._policy.wait(stamp[2], partial(log.perform, attempt, after_end=True))
        if saved is None:
            record = self._policy.drop(stamp, plan, self._policy.reason_after_wait())
            log.perform(partial(log.commit, record), after_end=True)
        log.state.end_wait()  # last: an interruption before this records the part as dropped
        return saved is True

    def _find_room(self, save: Callable[[], None], plan: PartPlan, stamp: Stamp) -> bool | None:
        """Call `save`, if need be again after reclaiming memory. Drop the part if it cannot wait."""
        reason = self._error_of(save)
        if reason is None:
            self._reclaim()
            reason = self._error_of(save)
        if reason is None:
            reason = self._policy.reason_to_drop(plan.nbytes) or None
        if reason:
            self._log.commit(self._policy.drop(stamp, plan, reason))
        return None if reason is None else not reason

    @staticmethod
    def _error_of(save: Callable[[], None]) -> str | None:
        """Return why `save` failed for good, empty if it succeeded, None without room."""
        try:
            save()
        except SpoolUnavailable as error:
            return str(error)
        except BufferLimitReached:
            return None
        return ""

    def _save_part(self, plan: PartPlan, stamp: Stamp, tensors: Sequence[T]) -> None:
        if plan.nbytes <= INLINE_BYTES and not self._log.device.pending:
            self._save_inline(plan, stamp, tensors)
            return
        place = self._buffer.allocate(plan.nbytes)
        if place is None:
            raise BufferLimitReached
        copied = self._copier.copy(plan, tensors, place.address, self._buffer.view(place))
        if copied.pending or self._log.device.pending:
            arrived = partial(self._on_arrival, plan, stamp, place, copied)
            self._log.device.submit(copied.pending, arrived, place.key)
        else:
            try:
                self._append_part(plan, stamp, place, copied)
            except (BufferLimitReached, SpoolUnavailable):
                self._buffer.release(place)
                raise
        self._counters.step_bytes += plan.nbytes

    def _save_inline(self, plan: PartPlan, stamp: Stamp, tensors: Sequence[T]) -> None:
        target = memoryview(self._scratch)[: plan.nbytes]
        for wait in self._copier.copy(plan, tensors, self._scratch_address, target).pending:
            wait()
        data = bytes(target)
        self._log.room.append_part(plan, lambda kind: Inline(*stamp, kind, data), values=True)
        self._counters.captured_bytes += plan.nbytes

    def _append_part(
        self, plan: PartPlan, stamp: Stamp, place: ArenaRange, copied: CopiedPart
    ) -> None:
        guard = copied.guard()
        ordinal = self._log.room.append_part(
            plan, lambda kind: Part(*stamp, kind, place.arena, place.offset, guard)
        )
        self._buffer.hold_until_ack(place, ordinal)
        self._counters.captured_bytes += plan.nbytes

    def _on_arrival(
        self,
        plan: PartPlan,
        stamp: Stamp,
        place: ArenaRange,
        copied: CopiedPart,
        error: Exception | None,
    ) -> None:
        """Append the record of a part whose device copies have ended. Runs on their thread."""
        log, saved = self._log, None
        if error is not None:
            reason = f"device copy failed: {error}"
            log.on_device_error(error)
            drop = partial(self._policy.drop, stamp, plan, reason)
            log.perform(lambda: log.room.append(drop()), after_end=True)
        else:
            append = partial(self._append_part, plan, stamp, place, copied)
            attempt = partial(self._find_room, append, plan, stamp)
            saved = log.perform(attempt, after_end=True)
            if saved is None:
                saved = self.wait_for_room(plan, stamp, attempt)
        if not saved:
            with log.state.lock:
                self._buffer.release(place)
