"""The capture of one rank: tensors in, journalled bytes out. Framework-neutral.

Called by a hook, in the training process, in this order:

    begin(step)             closes the step before
    save(plan, tensors)*    on return the bytes survive the death of this process
    close_step()            everything planned for the step is there; later parts are still welcome
    end(reason)             no more will come
    drain(timeout)          wait until the uploader has stored it all
    close()                 let go of memory and files

Any thread may call `save`; a lock keeps the journal in order. `save` copies on the calling thread and
does no other work: no file is created, nothing is compressed, nobody is waited for, unless the buffer
is full and `on_full` says "block". None of these raises for want of room: what finds none is dropped, and
that it was dropped is said in the journal, as soon as that has room itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from smdist import kernel
from smdist.errors import SpoolUnavailable
from smdist.identity import StepRef, encodable
from smdist.record import Close, Describe, Drop, End, Flush, Inline, Part, Record, Trouble
from smdist.statistics import measure_into
from smdist.workers.arena import ALIGNMENT
from smdist.workers.buffer import Buffer, Spot
from smdist.workers.deferred import Deferred
from smdist.workers.host import Host, Wait
from smdist.workers.journal import JournalFileFull, JournalWriter
from smdist.workers.ledger import Ledger
from smdist.workers.part import INLINE_BYTES, PartPlan
from smdist.workers.records import JournalRoomTaken, Records
from smdist.workers.spool import Doorbell, Spool
from smdist.workers.warmer import Warmer

__all__ = ["Capture", "CaptureLimits", "Usage"]

T = TypeVar("T")
R = TypeVar("R")
Stamp = tuple[int, int, int, float]

_STEPS_AHEAD = 3  # warm room for so many steps of the size last seen
_MOST_TROUBLES = 100
_PATIENCE_S = 2.0  # a longer wait for room is told to the user
_LAST_CHANCE_S = 10.0  # at the end, for room to appear, once nothing else is waited for
_MOST_REASONS = 5  # to drop, told to the user


class CaptureLimits(msgspec.Struct, frozen=True):
    buffer_bytes: int
    on_full: Literal["block", "drop"] = "block"
    block_timeout_s: float = 600.0  # after so long a wait, drop (and say so) rather than hang


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
        self, spool: Spool, host: Host[T], limits: CaptureLimits, say: Callable[[str], None]
    ) -> None:
        """`say` gives one line to the user; it is called rarely."""
        self._host, self._limits, self._say = host, limits, say
        self._journal = JournalWriter(spool)
        self._ledger = Ledger(spool.path / "ledger")
        self._doorbell = Doorbell(spool)
        self._buffer = Buffer(spool, limits.buffer_bytes, say)
        self._records = Records(self._journal, self._buffer, self._ledger, self._doorbell)
        self._warmer = Warmer(self._buffer)
        self._deferred = Deferred(lambda error: self.trouble(f"device copy failed: {error}"))
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._scratch = bytearray(INLINE_BYTES)
        self._scratch_address = kernel.address_of(self._scratch)
        self._ref: StepRef | None = None
        self._is_open = self._planned = False
        self._step_bytes = 0
        self._captured_bytes = self._captured_steps = 0
        self._dropped_tensors = self._dropped_bytes = 0
        self._blocked_s = 0.0
        self._waiting = 0  # the thread that waits for room, and has let go of the lock for that
        self._reasons: set[str] = set()  # to drop, that were told
        self._stalled_at = -1  # how far the store had come when a wait for room ran out
        self._troubles: dict[str, int] = {}
        self._ended = False
        self._attended: Callable[[], bool] = lambda: True

    def attended_by(self, running: Callable[[], bool]) -> None:
        """`running` tells whether an uploader is at work or will be; if not, no wait is worth it."""
        self._attended = running

    # -- steps --------------------------------------------------------------------------------

    @property
    def open_step(self) -> StepRef | None:
        return self._ref if self._is_open else None

    def begin(self, ref: StepRef, *, planned: bool = True) -> None:
        """`planned` false: nothing is due at this step, the script has values of its own."""
        with self._lock:
            if self._ended:
                return
            self.close_step()
            self._ref, self._is_open, self._step_bytes = ref, True, 0
            self._planned = planned
            self._journal.begin(ref.mode.value, ref.mode_step, ref.step)
            self._buffer.retire(self._journal.next_ordinal - 1)
            self._buffer.reclaim(self._ledger.acked)

    def close_step(self) -> None:
        with self._lock:
            if not self._is_open or self._ref is None:
                return
            self._is_open = False
            self._captured_steps += 1
            self._commit(Close(*self._stamp(self._ref), self._planned))
            self._doorbell.ring()
            self._warmer.want(_STEPS_AHEAD * self._step_bytes)

    def save(self, plan: PartPlan, tensors: Sequence[T]) -> bool:
        """Capture `tensors`, which are as `plan` says, at the current step. False: dropped."""
        with self._lock:
            ref = self._ref
            if ref is None or self._ended:
                return False
            if not self._deferred.pending:
                if plan.single and self._save_single(plan, tensors[0]):
                    return True
                if plan.nbytes <= INLINE_BYTES:
                    return self._save_inline(ref, plan, tensors)
            return self._save_in_arena(ref, plan, tensors)

    # -- the rest of what a hook says ----------------------------------------------------------

    def describe(self, key: str, data: bytes) -> None:
        with self._lock:
            if not self._ended:
                self._commit(Describe(key, data))

    def trouble(self, message: str) -> None:
        """Note an error of ours; each text is journalled once, however often it comes."""
        message = encodable(message)
        with self._lock:
            seen = self._troubles.get(message, 0)
            if seen == 0 and len(self._troubles) >= _MOST_TROUBLES:
                message = "further errors"
                seen = self._troubles.get(message, 0)
            self._troubles[message] = seen + 1
            if seen == 0 and not self._ended:
                step = -1 if self._ref is None else self._ref.step
                self._commit(Trouble(message, step, time.time()))

    def end(self, reason: str = "") -> None:
        """An orderly end closes the open step; an end with a reason leaves it open."""
        with self._lock:
            if self._ended:
                return
            if not reason:
                self.close_step()
            self._commit(End(encodable(reason), time.time()))
            self._ended = True
        self._doorbell.ring()

    def flush(self) -> None:
        """Have what is there stored at once, be it little; `drain` waits for that."""
        with self._lock:
            if not self._ended:
                self._commit(Flush())
        self._doorbell.ring()

    def drain(
        self, timeout_s: float, progress: Callable[[Usage, str], None] = lambda _u, _t: None
    ) -> bool:
        """Wait for the uploader; `progress` gets the usage and its trouble a few times a second."""
        deadline = time.monotonic() + timeout_s
        last_chance = time.monotonic() + _LAST_CHANCE_S
        if not self._deferred.join(timeout_s):
            return False
        while (behind := self._ledger.acked < self._journal.next_ordinal) or self._records.kept:
            now = time.monotonic()
            if behind:
                last_chance = now + _LAST_CHANCE_S
            if now > (deadline if behind else min(deadline, last_chance)):
                return False
            with self._lock:
                self._records.write_kept()
            self._doorbell.ring()
            progress(self.usage(), self._ledger.trouble)
            time.sleep(0.02)
        return True

    def usage(self) -> Usage:
        ledger = self._ledger
        return Usage(
            buffer_bytes=self._buffer.used_bytes,
            buffer_limit_bytes=self._buffer.limit_bytes,
            captured_bytes=self._captured_bytes,
            captured_steps=self._captured_steps,
            stored_bytes=ledger.bytes_stored,
            stored_steps=ledger.steps_stored,
            dropped_tensors=self._dropped_tensors,
            dropped_bytes=self._dropped_bytes,
            blocked_s=self._blocked_s,
            troubles=sum(self._troubles.values()),
            pending_records=self._journal.next_ordinal - ledger.acked + self._records.kept,
        )

    @property
    def unwritten(self) -> str:
        """Why the journal lacks its last records, empty if it has them all."""
        return self._records.obstacle if self._records.kept else ""

    @property
    def uploader(self) -> int:
        """The uploader's process once it has stored something, else 0."""
        return self._ledger.uploader_pid if self._ledger.acked else 0

    @property
    def interrupted(self) -> bool:
        """Whether this thread is at work in here: asked by a signal handler, which has to wait."""
        within = self._room._is_owned() or self._waiting == threading.get_ident()  # type: ignore[attr-defined]
        return bool(within)

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._warmer.stop()
            self._journal.close()
            self._doorbell.close()
            self._buffer.close()
            self._ledger.close()

    # -- copying ------------------------------------------------------------------------------

    def _save_inline(self, ref: StepRef, plan: PartPlan, tensors: Sequence[T]) -> bool:
        target = memoryview(self._scratch)[: plan.nbytes]
        for wait in self._copy(plan, tensors, self._scratch_address, target):
            wait()
        data, stamp = bytes(target), self._stamp(ref)

        def record_of(kind: int) -> Record:
            return Inline(*stamp, kind, data)

        outcome = self._append_or_wait(plan, stamp, record_of, values=True)
        if isinstance(outcome, str):
            self._commit(self._dropped(stamp, plan, outcome))
            return False
        self._captured_bytes += plan.nbytes
        return True

    def _save_single(self, plan: PartPlan, tensor: T) -> bool:
        """The way of a gradient: one raw tensor in host memory, of a kind that was declared, with
        room for it. False: not so.

        Backward brings them one by one, each with the processor's caches full of other things:
        what counts here is how little code runs.
        """
        kind, address = self._records.kinds.get(plan), self._host.address(tensor)
        if kind is None or not address:
            return False
        journal, strip, nbytes = self._journal, self._buffer.strip, plan.nbytes
        left = strip.end - strip.at
        if left < nbytes and not self._buffer.renew(nbytes, journal.next_ordinal - 1):
            return False
        at = strip.at
        strip.at = (
            at + nbytes + -nbytes % ALIGNMENT
        )  # first: a signal may end this after the record
        try:
            journal.put(strip.address + at, address, nbytes, kind, strip.arena, at)
        except JournalFileFull:
            return False
        self._captured_bytes += nbytes
        self._step_bytes += nbytes
        return True

    def _save_in_arena(self, ref: StepRef, plan: PartPlan, tensors: Sequence[T]) -> bool:
        def take() -> Spot | None:
            return self._buffer.take(plan.nbytes)

        stamp = self._stamp(ref)
        spot: Spot | str | None = take()
        if spot is None:
            spot = self._wait_for_room(ref.step, plan.nbytes, take)
        if isinstance(spot, str):
            self._commit(self._dropped(stamp, plan, spot))
            return False
        return self._save_at(spot, stamp, plan, tensors)

    def _save_at(self, spot: Spot, stamp: Stamp, plan: PartPlan, tensors: Sequence[T]) -> bool:
        try:
            waits = self._copy(plan, tensors, spot.address, self._buffer.view(spot))
        except BaseException:
            self._buffer.give_back(spot)
            raise
        self._step_bytes += plan.nbytes
        if not waits and not self._deferred.pending:
            return self._commit_part(plan, stamp, spot)

        def commit() -> None:
            self._commit_part(plan, stamp, spot)

        self._deferred.submit(waits, commit)
        return True

    def _commit_part(self, plan: PartPlan, stamp: Stamp, spot: Spot) -> bool:
        def record_of(kind: int) -> Record:
            return Part(*stamp, kind, spot.arena, spot.offset)

        with self._lock:
            try:
                outcome = self._append_or_wait(plan, stamp, record_of)
            except BaseException:
                self._buffer.give_back(spot)
                raise
            if isinstance(outcome, str):
                self._buffer.give_back(spot)
                self._records.append(self._dropped(stamp, plan, outcome))
                return False
            self._buffer.pin(spot, outcome)
            self._captured_bytes += plan.nbytes
            return True

    def _copy(
        self, plan: PartPlan, tensors: Sequence[T], base: int, target: memoryview
    ) -> list[Wait]:
        """Raw bytes and statistics to their places; what is left to wait for."""
        host, waits = self._host, []
        targets, sources, sizes = [], [], []
        for index, offset, size in zip(plan.raw, plan.raw_offsets, plan.raw_sizes, strict=True):
            tensor = tensors[index]
            if address := host.address(tensor):
                targets.append(base + offset)
                sources.append(address)
                sizes.append(size)
            elif host.on_device(tensor):
                waits.append(host.start_copy(tensor, target[offset : offset + size]))
            elif size:
                host.write(tensor, target[offset : offset + size])
        kernel.copy(targets, sources, sizes)
        if plan.measured:
            waits += self._measure(plan, tensors, base, target)
        return waits

    def _measure(
        self, plan: PartPlan, tensors: Sequence[T], base: int, target: memoryview
    ) -> list[Wait]:
        host, stride, waits, keep = self._host, plan.stride, [], []
        addresses: list[int] = []
        for row, index in enumerate(plan.measured):
            tensor = tensors[index]
            if host.on_device(tensor):
                place = target[row * stride : (row + 1) * stride]
                waits.append(host.start_measure(tensor, plan.columns, place))
                continue
            address = host.address(tensor)
            if not address and plan.measured_counts[row]:
                keep.append(host.contiguous(tensor))
                address = host.address(keep[-1])
            addresses.append(address)
        if not waits:
            measure_into(
                addresses, plan.measured_counts, plan.measured_dtypes, plan.columns, base, stride
            )
        else:
            self._measure_between(plan, tensors, addresses, base)
        return waits

    def _measure_between(
        self, plan: PartPlan, tensors: Sequence[T], addresses: list[int], base: int
    ) -> None:
        """Rows of tensors in host memory in a part that also has some on a device."""
        left = iter(addresses)
        for row, index in enumerate(plan.measured):
            if not self._host.on_device(tensors[index]):
                counts, dtypes = plan.measured_counts[row], plan.measured_dtypes[row]
                place = base + row * plan.stride
                measure_into([next(left)], [counts], [dtypes], plan.columns, place, plan.stride)

    # -- room ---------------------------------------------------------------------------------

    def _wait_for_room(self, step: int, nbytes: int, take: Callable[[], R | None]) -> R | str:
        """The buffer is full: do what `on_full` says, until `take` succeeds. A text is the reason to
        drop."""
        self._buffer.retire(self._journal.next_ordinal - 1)
        # What the journal has by now counts until it is stored, and not until it grows again.
        self._buffer.mark(self._journal.written, self._journal.next_ordinal)
        self._buffer.reclaim(self._ledger.acked)
        spot = take()
        if spot is not None:
            return spot
        limit = self._buffer.limit_bytes
        if nbytes > limit:
            return f"{nbytes} bytes at once exceed buffer_bytes={limit}; raise it"
        if self._limits.on_full == "drop":
            return f"the buffer of {limit} bytes was full"
        # One such wait is enough: a job must not stand still once more for every tensor.
        if self._ledger.acked != self._stalled_at:
            began, before = time.monotonic(), self._waiting
            self._waiting = threading.get_ident()
            try:
                spot = self._block(step, take, began)
            finally:
                self._waiting = before
            self._blocked_s += time.monotonic() - began
            self._stalled_at = self._ledger.acked if spot is None else -1
        if spot is not None:
            return spot
        if not self._attended():
            return "the buffer was full and no uploader is left to empty it"
        wait = f"{self._limits.block_timeout_s:.0f} s"
        return f"no room for {wait}; {self._ledger.trouble or 'slow uploader'}"

    def _block(self, step: int, take: Callable[[], R | None], began: float) -> R | None:
        told = False
        self._commit(Flush())
        while (waited := time.monotonic() - began) < self._limits.block_timeout_s:
            if not self._attended():
                return None
            self._doorbell.ring()
            self._room.wait(min(0.0005 + waited / 20, 0.02))  # lets other threads commit meanwhile
            self._buffer.reclaim(self._ledger.acked)
            spot = take()
            if spot is not None:
                return spot
            if waited > _PATIENCE_S and not told:
                told = True
                self._say(
                    f"step {step}: training waits for room in the capture buffer "
                    f"({self._buffer.limit_bytes} bytes); "
                    f"{self._ledger.trouble or 'the uploader is slower than capture'}; "
                    "raise buffer_bytes, save less often, or pass on_full='drop'"
                )
        return None

    def _dropped(self, stamp: Stamp, plan: PartPlan, reason: str) -> Drop:
        if reason not in self._reasons and len(self._reasons) < _MOST_REASONS:
            self._reasons.add(reason)
            self._say(f"step {stamp[2]}: {len(plan.names)} tensors not captured: {reason}")
        self._dropped_tensors += len(plan.names)
        self._dropped_bytes += plan.nbytes
        return Drop(*stamp, plan.names, plan.nbytes, reason)

    # -- journal ------------------------------------------------------------------------------

    @staticmethod
    def _stamp(ref: StepRef) -> Stamp:
        return (ref.mode.value, ref.mode_step, ref.step, time.time())

    def _commit(self, record: Record) -> None:
        """Append a record that names no part, in order with parts that wait for a device."""
        if self._deferred.pending:
            self._deferred.submit((), lambda: self._append_locked(record))
        else:
            self._records.append(record)

    def _append_locked(self, record: Record) -> None:
        with self._lock:
            self._records.append(record)

    def _append_or_wait(
        self,
        plan: PartPlan,
        stamp: Stamp,
        record_of: Callable[[int], Record],
        *,
        values: bool = False,
    ) -> int | str:
        """The ordinal of a part's record, or the reason to drop the part."""
        try:
            return self._records.append_of(plan, record_of, values=values)
        except SpoolUnavailable as error:
            return str(error)
        except JournalRoomTaken:
            pass

        def append() -> int | None:
            try:
                return self._records.append_of(plan, record_of, values=values)
            except JournalRoomTaken:
                return None

        try:
            return self._wait_for_room(stamp[2], plan.nbytes, append)
        except SpoolUnavailable as error:
            return str(error)
