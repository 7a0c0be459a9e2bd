"""The records of one rank in the order of capture, repaired after interruptions.

Every operation of a `Capture` runs through here, under one lock. An operation that finds the previous
one cut off by an exception (see `Reentrancy`) first repairs journal and buffer, and records which
tensors were lost. No operation waits: one that finds no room ends, and is tried again as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from smdist.format.journal_records import Record
from smdist.identity import StepRef
from smdist.workers.capture.buffer import CaptureBuffer
from smdist.workers.capture.device_commits import DeviceCommits
from smdist.workers.capture.journal_room import JournalRoom
from smdist.workers.capture.part_plan import PartPlan, Stamp, stamp_of
from smdist.workers.capture.reentrancy import Reentrancy
from smdist.workers.capture.room_policy import RoomPolicy
from smdist.workers.spool.journal import JournalWriter

__all__ = ["RecordLog"]

R = TypeVar("R")

_INTERRUPTED = "an exception interrupted its capture"
_NESTED = "a signal handler saved it in the middle of another save"
_NO_SAVE: Final = "not a save"  # is under way


class RecordLog:
    def __init__(
        self,
        journal: JournalWriter,
        buffer: CaptureBuffer,
        room: JournalRoom,
        policy: RoomPolicy,
        on_device_error: Callable[[BaseException], None],
    ) -> None:
        self._journal, self._buffer, self._policy, self.room = journal, buffer, policy, room
        self.on_device_error = on_device_error
        self.device = DeviceCommits(on_device_error)
        self.state = Reentrancy()
        self.ref: StepRef | None = None  # the step that records belong to
        self.ended = False
        self._owed: list[Record] = []  # of refused saves, to be written by the next operation

    def perform(self, action: Callable[[], R], *, after_end: bool = False) -> R | None:
        """Run `action` as one operation and return its result.

        Return None without running it after the end, or inside of another operation (the call of a
        signal handler).
        """
        state = self.state
        with state.lock:
            if self.ended and not after_end:
                return None
            if state.busy is not None and not self.repair():
                return None
            state.busy = _NO_SAVE
            if state.waiting or self._owed:
                self._record_lost_saves()
            result = action()
            state.busy = None
        return result

    def repair(self) -> bool:
        """Repair what an exception has cut off. Return False if it is still under way."""
        if self.state.is_nested:
            return False
        cut = self.state.busy
        self._journal.repair()
        self.room.repair()
        self._buffer.repair(self._journal.next_ordinal - 1, self.device.range_keys())
        if self.ref is not None:
            self._journal.set_step(self.ref.mode.value, self.ref.mode_step, self.ref.step)
            if isinstance(cut, PartPlan):
                self.commit(self._policy.drop(stamp_of(self.ref), cut, _INTERRUPTED))
        self.state.busy = None
        return True

    def refuse_nested(self, stamp: Stamp, plan: PartPlan) -> None:
        """Note a save inside of another operation. It is recorded when that has ended."""
        self._owed.append(self._policy.drop(stamp, plan, _NESTED))

    def _record_lost_saves(self) -> None:
        wait = self.state.interrupted_wait()
        if wait is not None:
            self.commit(self._policy.drop(wait.stamp, wait.plan, _INTERRUPTED))
            self.state.end_wait()
        while self._owed:
            self.commit(self._owed[0])
            del self._owed[0]

    def commit(self, record: Record) -> None:
        """Append a record that names no part, in order with parts that wait for a device."""
        if self.device.pending:
            self.device.submit((), partial(self._commit_in_order, record))
        else:
            self.room.append(record)

    def _commit_in_order(self, record: Record, _error: Exception | None) -> None:
        self.perform(partial(self.room.append, record), after_end=True)
