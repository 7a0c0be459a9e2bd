"""The capture of one rank: tensors in, journalled bytes out. Framework-neutral.

Called by a hook, in the training process, in this order:

    begin(step)             closes the step before
    save(plan, tensors)*    on return the bytes survive the death of this process
    close_step()            everything planned for the step is saved; later parts are still accepted
    end(reason)             nothing more will come
    drain(timeout)          wait until the uploader has stored it all
    close()                 release memory and files

Any thread may call `save`; a lock keeps the journal in order. `save` copies on the calling thread and
does nothing else: it creates no file, compresses nothing and waits for no other process, unless the
buffer is full and `on_full` is "block". None of these calls raises for want of room. A part without
room is dropped, and the drop is recorded in the journal as soon as that has room itself.

A signal handler may raise at any moment, in the middle of any of these. The next operation repairs
what was cut off, and records which tensors were lost (see record_log.py and reentrancy.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from smdist.format.journal_records import Close, Describe, Drop, End, Flush, Trouble
from smdist.identity import StepRef
from smdist.messages import encodable
from smdist.workers.capture.arena import ALIGNMENT
from smdist.workers.capture.buffer import CaptureBuffer
from smdist.workers.capture.journal_room import JournalRoom
from smdist.workers.capture.part_plan import PartPlan, stamp_of
from smdist.workers.capture.part_saver import PartSaver
from smdist.workers.capture.prefaulter import Prefaulter
from smdist.workers.capture.record_log import RecordLog
from smdist.workers.capture.room_policy import CaptureLimits, Counters, RoomPolicy
from smdist.workers.capture.tensor_access import TensorAccess
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalFileFull, JournalWriter
from smdist.workers.spool.spool import Doorbell, Spool

__all__ = ["Capture", "CaptureLimits", "Usage"]

T = TypeVar("T")

_STEPS_AHEAD = 3  # prefault memory for so many steps of the last size
_MAX_ERRORS = 100  # different texts that are recorded
_FINAL_WAIT_S = 10.0  # at the end, for room in the journal when all else is stored


class Usage(NamedTuple):
    """What `hook.usage()` shows."""

    buffer_bytes: int
    buffer_limit_bytes: int
    captured_bytes: int
    captured_steps: int
    stored_bytes: int
    stored_steps: int
    dropped_tensors: int
    dropped_bytes: int
    blocked_s: float
    troubles: int
    pending_records: int


class Capture(Generic[T]):
    def __init__(
        self,
        spool: Spool,
        access: TensorAccess[T],
        limits: CaptureLimits,
        warn: Callable[[str], None],
    ) -> None:
        """`warn` shows one line to the user; it is called rarely."""
        self._access = access
        self._counters = Counters()
        self._journal = JournalWriter(spool)
        self._ack_page = AckPage(spool.path / "ack_page")
        self._doorbell = Doorbell(spool)
        self._buffer = CaptureBuffer(spool, limits.buffer_bytes, warn)
        self._policy = RoomPolicy(limits, self._counters, self._ack_page, self._doorbell, warn)
        self._room = JournalRoom(self._journal, self._buffer, self._ack_page, self._doorbell)
        self._log = RecordLog(
            self._journal, self._buffer, self._room, self._policy, self._on_device_error
        )
        self._parts = PartSaver(
            access, self._buffer, self._log, self._policy, self._counters, self._reclaim
        )
        self._prefaulter = Prefaulter(self._buffer)
        # Parts of others that the short path of a gradient uses.
        self._state, self._device, self._kinds = self._log.state, self._log.device, self._room.kinds
        self._is_open = self._planned = False
        self._errors: dict[str, int] = {}

    def set_uploader_alive(self, is_alive: Callable[[], bool]) -> None:
        """Use `is_alive` to decide whether an uploader will make room: without one, do not wait."""
        self._policy.uploader_alive = is_alive

    # -- steps --------------------------------------------------------------------------------

    def begin(self, ref: StepRef, *, planned: bool = True) -> bool:
        """Begin step `ref` and close the step before. Return False if it did not begin.

        `planned` is false if nothing is due at this step and only the script saves values.
        """
        return bool(self._log.perform(partial(self._begin, ref, planned)))

    def _begin(self, ref: StepRef, planned: bool) -> bool:
        log = self._log
        if ref != log.ref:
            self._close_step()
        log.ref, self._planned = ref, planned
        self._is_open, self._counters.step_bytes = True, 0
        self._journal.set_step(ref.mode.value, ref.mode_step, ref.step)
        self._buffer.seal_region(self._journal.next_ordinal - 1)
        self._buffer.reclaim(self._ack_page.acked)
        return True

    def close_step(self) -> None:
        self._log.perform(self._close_step)

    def _close_step(self) -> None:
        if not self._is_open or self._log.ref is None:
            return
        self._log.commit(Close(*stamp_of(self._log.ref), self._planned))
        # Not earlier: a step that is interrupted here is closed twice, rather than never.
        self._is_open = False
        self._counters.captured_steps += 1
        self._doorbell.ring()
        self._prefaulter.request(_STEPS_AHEAD * self._counters.step_bytes)

    def mark_incomplete(self, ref: StepRef, reason: str) -> None:
        """Record that some of what was planned for step `ref` was not captured."""
        self._log.perform(partial(self._mark_incomplete, ref, reason))

    def _mark_incomplete(self, ref: StepRef, reason: str) -> None:
        self._policy.warn_once(ref.step, reason, f"not everything was captured: {reason}")
        self._log.commit(Drop(*stamp_of(ref), (), 0, encodable(reason)))

    def save(self, plan: PartPlan, tensors: Sequence[T]) -> bool:
        """Capture `tensors`, described by `plan`, at the current step. Return False if dropped."""
        log, state = self._log, self._state
        with state.lock:
            ref = log.ref
            if ref is None or log.ended:
                return False
            if state.busy is not None and not log.repair():
                log.refuse_nested(stamp_of(ref), plan)
                return False
            state.busy = plan
            if plan.single and not self._device.pending and self._save_single(plan, tensors[0]):
                state.busy = None
                return True
            stamp = stamp_of(ref)
            saved = self._parts.attempt(plan, stamp, tensors)
            if saved is None:
                state.begin_wait(stamp, plan)
            state.busy = None
        if saved is None:
            attempt = partial(self._parts.attempt, plan, stamp, tensors)
            return self._parts.wait_for_room(plan, stamp, attempt)
        return saved

    def _save_single(self, plan: PartPlan, tensor: T) -> bool:
        """Save one raw tensor in host memory, of a declared kind, if there is room for it.

        Return False if any of that does not hold. Backward brings gradients one by one, each time
        with the caches of the processor full of other data: as little code as possible runs here.
        """
        kind, address = self._kinds.get(plan), self._access.address(tensor)
        if kind is None or not address:
            return False
        journal, region, nbytes = self._journal, self._buffer.region, plan.nbytes
        left = region.end - region.at
        if left < nbytes and not self._buffer.open_region(nbytes, journal.next_ordinal - 1):
            return False
        at = region.at
        # Moved first: a signal may end this call after the record is written.
        region.at = at + nbytes + -nbytes % ALIGNMENT
        try:
            journal.append_part(region.address + at, address, nbytes, kind, region.arena, at)
        except JournalFileFull:
            return False
        counters = self._counters
        counters.captured_bytes += nbytes
        counters.step_bytes += nbytes
        return True

    def _reclaim(self) -> None:
        self._buffer.seal_region(self._journal.next_ordinal - 1)
        # Journal bytes count until they are stored, even if the journal does not grow again.
        self._buffer.mark_journal(self._journal.written_bytes, self._journal.next_ordinal)
        self._buffer.reclaim(self._ack_page.acked)

    # -- other records -------------------------------------------------------------------------

    def describe(self, key: str, data: bytes) -> None:
        """Record an object that the uploader stores under `key`."""
        self._log.perform(partial(self._log.commit, Describe(key, data)))

    def record_error(self, message: str) -> None:
        """Record an error of smdist. Each text is written once and counted every time."""
        self._log.perform(partial(self._record_error, encodable(message)), after_end=True)

    def _record_error(self, message: str) -> None:
        seen = self._errors.get(message, 0)
        if seen == 0 and len(self._errors) >= _MAX_ERRORS:
            message = "further errors"
            seen = self._errors.get(message, 0)
        if seen == 0 and not self._log.ended:
            step = -1 if self._log.ref is None else self._log.ref.step
            self._log.commit(Trouble(message, step, time.time()))
        self._errors[message] = seen + 1

    def _on_device_error(self, error: BaseException) -> None:
        self.record_error(f"device copy failed: {error}")

    def flush(self) -> None:
        """Have everything captured so far stored at once; `drain` waits for that."""
        self._log.perform(partial(self._log.commit, Flush()))
        self._doorbell.ring()

    # -- the end -------------------------------------------------------------------------------

    def end(self, reason: str = "") -> None:
        """Record the end. Without a `reason` the open step is closed; with one it stays open."""
        self._log.perform(partial(self._end, reason))
        self._doorbell.ring()

    def _end(self, reason: str) -> None:
        if not reason:
            self._close_step()
        self._log.commit(End(encodable(reason), time.time()))
        self._log.ended = True

    def drain(
        self, timeout_s: float, progress: Callable[[Usage, str], None] = lambda _u, _e: None
    ) -> bool:
        """Wait for the uploader. Return False after `timeout_s`.

        `progress` is called a few times a second with the usage and the uploader's last error.
        """
        deadline = time.monotonic() + timeout_s
        final_deadline = time.monotonic() + _FINAL_WAIT_S
        if not self._device.join(timeout_s):
            return False
        while (behind := self._ack_page.acked < self._journal.next_ordinal) or self._room.kept:
            now = time.monotonic()
            if behind:
                final_deadline = now + _FINAL_WAIT_S
            if now > (deadline if behind else min(deadline, final_deadline)):
                return False
            self._log.perform(self._room.write_kept, after_end=True)
            self._doorbell.ring()
            progress(self.usage(), self._ack_page.last_error)
            time.sleep(0.02)
        return True

    def usage(self) -> Usage:
        ack_page, counters = self._ack_page, self._counters
        return Usage(
            buffer_bytes=self._buffer.used_bytes,
            buffer_limit_bytes=self._buffer.limit_bytes,
            captured_bytes=counters.captured_bytes,
            captured_steps=counters.captured_steps,
            stored_bytes=ack_page.bytes_stored,
            stored_steps=ack_page.steps_stored,
            dropped_tensors=counters.dropped_tensors,
            dropped_bytes=counters.dropped_bytes,
            blocked_s=counters.blocked_s,
            troubles=sum(self._errors.values()),
            pending_records=self._journal.next_ordinal - ack_page.acked + self._room.kept,
        )

    @property
    def unwritten_reason(self) -> str:
        """Return why the journal lacks its last records, empty if it has them all."""
        return self._room.obstacle if self._room.kept else ""

    @property
    def uploader_pid(self) -> int:
        """Return the uploader's process id once it has stored something, else 0."""
        return self._ack_page.uploader_pid if self._ack_page.acked else 0

    @property
    def is_reentrant_call(self) -> bool:
        """Return whether this thread is inside of a call here: a signal handler must wait."""
        return self._state.is_reentrant_call

    def close(self) -> None:
        """Release memory and files. Safe to repeat after an interruption."""
        with self._state.lock:
            self._log.ended = True
            stopped = self._prefaulter.stop()
            self._journal.close()
            self._doorbell.close()
            if stopped:
                self._buffer.close()
            self._ack_page.close()
