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

A signal handler may raise at any moment, in the middle of any of these. `_busy` says what is under way;
if it still does when the next operation begins, that one first makes good what was cut off, and says in
the journal which tensors were lost by it. Nobody waits within an operation: what finds no room ends, and
is tried again from its beginning.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from smdist import kernel
from smdist.errors import SpoolUnavailable
from smdist.format.journal_records import (
    Close,
    Describe,
    Drop,
    End,
    Flush,
    Inline,
    Part,
    Record,
    Trouble,
)
from smdist.identity import StepRef
from smdist.kernel.tensor_stats import measure_into
from smdist.messages import encodable
from smdist.workers.capture.arena import ALIGNMENT
from smdist.workers.capture.buffer import Buffer, Spot
from smdist.workers.capture.deferred import Deferred
from smdist.workers.capture.journal_room import JournalRoomTaken, Records
from smdist.workers.capture.part_plan import INLINE_BYTES, PartPlan
from smdist.workers.capture.tensor_access import CopyHandle, TensorAccess
from smdist.workers.capture.warmer import Warmer
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalFileFull, JournalWriter
from smdist.workers.spool.spool import Doorbell, Spool

__all__ = ["Capture", "CaptureLimits", "Usage"]

T = TypeVar("T")
Stamp = tuple[int, int, int, float]

_STEPS_AHEAD = 3  # warm room for so many steps of the size last seen
_MOST_TROUBLES = 100
_PATIENCE_S = 2.0  # a longer wait for room is told to the user
_LAST_CHANCE_S = 10.0  # at the end, for room to appear, once nothing else is waited for
_MOST_REASONS = 5  # to drop, told to the user
_CUT_OFF = "an exception interrupted its capture"
_NESTED = "a signal handler saved it in the middle of another save"
_OTHER: Final = "not a save"  # is under way


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


class _Waiting(NamedTuple):
    """A save that waits for room."""

    frame: FrameType
    stamp: Stamp
    plan: PartPlan


class Capture(Generic[T]):
    __slots__ = (  # more than a class keeps at hand otherwise
        "_ack_page",
        "_blocked_s",
        "_buffer",
        "_busy",
        "_captured_bytes",
        "_captured_steps",
        "_deferred",
        "_doorbell",
        "_dropped_bytes",
        "_dropped_tensors",
        "_ended",
        "_host",
        "_is_open",
        "_journal",
        "_limits",
        "_lock",
        "_owed",
        "_planned",
        "_reasons",
        "_records",
        "_ref",
        "_say",
        "_scratch",
        "_scratch_address",
        "_stalled_at",
        "_step_bytes",
        "_troubles",
        "_uploader_alive",
        "_waiting",
        "_warmer",
    )

    def __init__(
        self, spool: Spool, host: TensorAccess[T], limits: CaptureLimits, say: Callable[[str], None]
    ) -> None:
        """`say` gives one line to the user; it is called rarely."""
        self._host, self._limits, self._say = host, limits, say
        self._journal = JournalWriter(spool)
        self._ack_page = AckPage(spool.path / "ack_page")
        self._doorbell = Doorbell(spool)
        self._buffer = Buffer(spool, limits.buffer_bytes, say)
        self._records = Records(self._journal, self._buffer, self._ack_page, self._doorbell)
        self._warmer = Warmer(self._buffer)
        self._deferred = Deferred(lambda error: self.record_error(f"device copy failed: {error}"))
        self._lock = threading.RLock()
        self._busy: PartPlan | str | None = None  # what is under way, or was when it was cut off
        self._waiting: dict[int, _Waiting] = {}  # by thread
        self._owed: list[Record] = []  # to be written when what is under way has ended
        self._scratch = bytearray(INLINE_BYTES)
        self._scratch_address = kernel.address_of(self._scratch)
        self._ref: StepRef | None = None
        self._is_open = self._planned = False
        self._step_bytes = 0
        self._captured_bytes = self._captured_steps = 0
        self._dropped_tensors = self._dropped_bytes = 0
        self._blocked_s = 0.0
        self._reasons: set[str] = set()  # to drop, that were told
        self._stalled_at = -1  # how far the store had come when a wait for room ran out
        self._troubles: dict[str, int] = {}
        self._ended = False
        self._uploader_alive: Callable[[], bool] = lambda: True

    def set_uploader_alive(self, running: Callable[[], bool]) -> None:
        """`running` tells whether an uploader is at work or will be; if not, no wait is worth it."""
        self._uploader_alive = running

    # -- steps --------------------------------------------------------------------------------

    @property
    def open_step(self) -> StepRef | None:
        return self._ref if self._is_open else None

    def begin(self, ref: StepRef, *, planned: bool = True) -> bool:
        """`planned` false: nothing is due at this step, the script has values of its own.

        False: it did not begin.
        """
        with self._lock:
            if self._ended or not self._ready():
                return False
            self._busy = _OTHER
            if ref != self._ref:
                self._close_step()
            self._ref, self._planned = ref, planned
            self._is_open, self._step_bytes = True, 0
            self._journal.begin(ref.mode.value, ref.mode_step, ref.step)
            self._buffer.retire(self._journal.next_ordinal - 1)
            self._buffer.reclaim(self._ack_page.acked)
            self._busy = None
        return True

    def close_step(self) -> None:
        with self._lock:
            if not self._ended and self._ready():
                self._busy = _OTHER
                self._close_step()
                self._busy = None

    def _close_step(self) -> None:
        if not self._is_open or self._ref is None:
            return
        self._commit(Close(*self._stamp(self._ref), self._planned))
        self._is_open = (
            False  # not before: interrupted in between it is closed again, rather than not
        )
        self._captured_steps += 1
        self._doorbell.ring()
        self._warmer.want(_STEPS_AHEAD * self._step_bytes)

    def mark_incomplete(self, ref: StepRef, reason: str) -> None:
        """Step `ref` must not look complete: some of what was planned for it did not come."""
        with self._lock:
            if not self._ended and self._ready():
                self._busy = _OTHER
                self._tell_once(ref.step, reason, f"not everything was captured: {reason}")
                self._commit(Drop(*self._stamp(ref), (), 0, encodable(reason)))
                self._busy = None

    def save(self, plan: PartPlan, tensors: Sequence[T]) -> bool:
        """Capture `tensors`, which are as `plan` says, at the current step. False: dropped."""
        with self._lock:
            ref = self._ref
            if ref is None or self._ended:
                return False
            if self._busy is not None and not self._settled():
                self._owed.append(self._dropped(self._stamp(ref), plan, _NESTED))
                return False
            self._busy = plan
            if plan.single and not self._deferred.pending and self._save_single(plan, tensors[0]):
                self._busy = None
                return True
            stamp = self._stamp(ref)
            saved = self._try_to_save(plan, stamp, tensors)
            if saved is None:
                self._waiting[threading.get_ident()] = _Waiting(sys._getframe(), stamp, plan)
            self._busy = None
        if saved is None:
            return self._insist(
                plan, stamp, lambda: not self._ended and self._try_to_save(plan, stamp, tensors)
            )
        return saved

    # -- what was cut off ----------------------------------------------------------------------

    def _ready(self) -> bool:
        """Called first by every operation. False: it is a signal handler's, inside of another one."""
        if self._busy is not None and not self._settled():
            return False
        if self._waiting:
            waiting = self._waiting.get(threading.get_ident())
            if waiting is not None and not _runs(waiting.frame):
                self._commit(self._dropped(waiting.stamp, waiting.plan, _CUT_OFF))
                self._waiting.pop(threading.get_ident(), None)
        while self._owed:
            self._commit(self._owed[0])
            del self._owed[0]
        return True

    def _settled(self) -> bool:
        """An operation was cut off by an exception: make it good. False: it is still under way."""
        if " count=1 " not in repr(self._lock):  # before 3.11 nothing else tells
            return False
        cut = self._busy
        self._journal.settle()
        self._records.settle()
        self._buffer.settle(self._journal.next_ordinal - 1, self._deferred.held())
        if self._ref is not None:
            self._journal.begin(self._ref.mode.value, self._ref.mode_step, self._ref.step)
            if isinstance(cut, PartPlan):
                self._commit(self._dropped(self._stamp(self._ref), cut, _CUT_OFF))
        self._busy = None
        return True

    # -- the rest of what a hook says ----------------------------------------------------------

    def describe(self, key: str, data: bytes) -> None:
        if not self._ended:
            self._do(Describe(key, data))

    def record_error(self, message: str) -> None:
        """Note an error of ours; each text is journalled once, however often it comes."""
        message = encodable(message)
        with self._lock:
            if not self._ready():
                return
            self._busy = _OTHER
            seen = self._troubles.get(message, 0)
            if seen == 0 and len(self._troubles) >= _MOST_TROUBLES:
                message = "further errors"
                seen = self._troubles.get(message, 0)
            if seen == 0 and not self._ended:
                step = -1 if self._ref is None else self._ref.step
                self._commit(Trouble(message, step, time.time()))
            self._troubles[message] = seen + 1
            self._busy = None

    def end(self, reason: str = "") -> None:
        """An orderly end closes the open step; an end with a reason leaves it open."""
        with self._lock:
            if self._ended or not self._ready():
                return
            self._busy = _OTHER
            if not reason:
                self._close_step()
            self._commit(End(encodable(reason), time.time()))
            self._ended = True
            self._busy = None
        self._doorbell.ring()

    def flush(self) -> None:
        """Have what is there stored at once, be it little; `drain` waits for that."""
        if not self._ended:
            self._do(Flush())
        self._doorbell.ring()

    def _do(self, record: Record) -> None:
        with self._lock:
            if self._ready():
                self._busy = _OTHER
                self._commit(record)
                self._busy = None

    def drain(
        self, timeout_s: float, progress: Callable[[Usage, str], None] = lambda _u, _t: None
    ) -> bool:
        """CopyHandle for the uploader; `progress` gets the usage and its trouble a few times a second."""
        deadline = time.monotonic() + timeout_s
        last_chance = time.monotonic() + _LAST_CHANCE_S
        if not self._deferred.join(timeout_s):
            return False
        while (behind := self._ack_page.acked < self._journal.next_ordinal) or self._records.kept:
            now = time.monotonic()
            if behind:
                last_chance = now + _LAST_CHANCE_S
            if now > (deadline if behind else min(deadline, last_chance)):
                return False
            with self._lock:
                if self._ready():
                    self._busy = _OTHER
                    self._records.write_kept()
                    self._busy = None
            self._doorbell.ring()
            progress(self.usage(), self._ack_page.last_error)
            time.sleep(0.02)
        return True

    def usage(self) -> Usage:
        ack_page = self._ack_page
        return Usage(
            buffer_bytes=self._buffer.used_bytes,
            buffer_limit_bytes=self._buffer.limit_bytes,
            captured_bytes=self._captured_bytes,
            captured_steps=self._captured_steps,
            stored_bytes=ack_page.bytes_stored,
            stored_steps=ack_page.steps_stored,
            dropped_tensors=self._dropped_tensors,
            dropped_bytes=self._dropped_bytes,
            blocked_s=self._blocked_s,
            troubles=sum(self._troubles.values()),
            pending_records=self._journal.next_ordinal - ack_page.acked + self._records.kept,
        )

    @property
    def unwritten_reason(self) -> str:
        """Why the journal lacks its last records, empty if it has them all."""
        return self._records.obstacle if self._records.kept else ""

    @property
    def uploader_pid(self) -> int:
        """The uploader's process once it has stored something, else 0."""
        return self._ack_page.uploader_pid if self._ack_page.acked else 0

    @property
    def is_reentrant_call(self) -> bool:
        """Whether this thread is at work in here: asked by a signal handler, which has to wait."""
        waiting = self._waiting.get(threading.get_ident())
        within = waiting is not None and _runs(waiting.frame)
        return within or bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def close(self) -> None:
        """Can be repeated if it is interrupted."""
        with self._lock:
            self._ended = True
            warm = self._warmer.stop()
            self._journal.close()
            self._doorbell.close()
            if warm:
                self._buffer.close()
            self._ack_page.close()

    # -- copying ------------------------------------------------------------------------------

    def _try_to_save(self, plan: PartPlan, stamp: Stamp, tensors: Sequence[T]) -> bool | None:
        """Within an operation. None: there is no room, and it is worth waiting for some."""

        def save() -> bool | str | None:
            if plan.nbytes <= INLINE_BYTES and not self._deferred.pending:
                return self._save_inline(plan, stamp, tensors)
            spot = self._buffer.take(plan.nbytes)
            return None if spot is None else self._save_at(spot, stamp, plan, tensors)

        return self._find_room(save, stamp, plan)

    def _save_inline(self, plan: PartPlan, stamp: Stamp, tensors: Sequence[T]) -> bool | str | None:
        target = memoryview(self._scratch)[: plan.nbytes]
        for wait in self._copy(plan, tensors, self._scratch_address, target)[0]:
            wait()
        data = bytes(target)

        def record_of(kind: int) -> Record:
            return Inline(*stamp, kind, data)

        outcome = self._append(plan, record_of, values=True)
        if not isinstance(outcome, int):
            return outcome
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

    def _save_at(
        self, spot: Spot, stamp: Stamp, plan: PartPlan, tensors: Sequence[T]
    ) -> bool | str | None:
        waits, guard = self._copy(plan, tensors, spot.address, self._buffer.view(spot))
        if waits or self._deferred.pending:
            arrived = partial(self._arrived, plan, stamp, spot, guard)
            self._deferred.submit(waits, arrived, spot.key)
        else:
            outcome = self._append_part(plan, stamp, spot, guard())
            if outcome is not True:
                self._buffer.give_back(spot)
                return outcome
        self._step_bytes += plan.nbytes
        return True

    def _append_part(
        self, plan: PartPlan, stamp: Stamp, spot: Spot, guard: int
    ) -> bool | str | None:
        def record_of(kind: int) -> Record:
            return Part(*stamp, kind, spot.arena, spot.offset, guard)

        outcome = self._append(plan, record_of)
        if not isinstance(outcome, int):
            return outcome
        self._buffer.pin(spot, outcome)
        self._captured_bytes += plan.nbytes
        return True

    def _arrived(
        self,
        plan: PartPlan,
        stamp: Stamp,
        spot: Spot,
        guard: Callable[[], int],
        error: Exception | None,
    ) -> None:
        """On the thread that waits for devices: what was under way is in its place, or never will be."""
        if error is not None:
            self.record_error(f"device copy failed: {error}")

        def append() -> bool | None:
            if error is not None:
                self._records.append(self._dropped(stamp, plan, f"device copy failed: {error}"))
                return False
            return self._find_room(
                lambda: self._append_part(plan, stamp, spot, guard()), stamp, plan
            )

        saved = self._as_operation(append)
        if saved is None:
            saved = self._insist(plan, stamp, append)
        if not saved:
            with self._lock:
                self._buffer.give_back(spot)

    def _copy(
        self, plan: PartPlan, tensors: Sequence[T], base: int, target: memoryview
    ) -> tuple[list[CopyHandle], Callable[[], int]]:
        """Raw bytes and statistics to their places; what is left to wait for, and their guard then."""
        host, waits = self._host, []
        targets, sources, sizes = [], [], []
        others, other_sizes = [], []  # that the kernel does not copy
        for index, offset, size in zip(plan.raw, plan.raw_offsets, plan.raw_sizes, strict=True):
            tensor = tensors[index]
            if address := host.address(tensor):
                targets.append(base + offset)
                sources.append(address)
                sizes.append(size)
                continue
            others.append(base + offset)
            other_sizes.append(size)
            if host.on_device(tensor):
                waits.append(host.start_copy(tensor, target[offset : offset + size]))
            elif size:
                host.write(tensor, target[offset : offset + size])
        copied = kernel.copy(targets, sources, sizes, base)
        if plan.reduced:
            waits += self._measure(plan, tensors, base, target)
            others.append(base)
            other_sizes.append(len(plan.reduced) * plan.stride)
        return waits, lambda: (copied + kernel.guard(others, other_sizes, base)) & 0xFFFFFFFF

    def _measure(
        self, plan: PartPlan, tensors: Sequence[T], base: int, target: memoryview
    ) -> list[CopyHandle]:
        host, stride, waits, keep = self._host, plan.stride, [], []
        addresses: list[int] = []
        for row, index in enumerate(plan.reduced):
            tensor = tensors[index]
            if host.on_device(tensor):
                place = target[row * stride : (row + 1) * stride]
                waits.append(host.start_measure(tensor, plan.columns, place))
                continue
            address = host.address(tensor)
            if not address and plan.reduced_counts[row]:
                keep.append(host.contiguous(tensor))
                address = host.address(keep[-1])
            addresses.append(address)
        if not waits:
            measure_into(
                addresses, plan.reduced_counts, plan.reduced_dtypes, plan.columns, base, stride
            )
        else:
            self._measure_between(plan, tensors, addresses, base)
        return waits

    def _measure_between(
        self, plan: PartPlan, tensors: Sequence[T], addresses: list[int], base: int
    ) -> None:
        """Rows of tensors in host memory in a part that also has some on a device."""
        left = iter(addresses)
        for row, index in enumerate(plan.reduced):
            if not self._host.on_device(tensors[index]):
                counts, dtypes = plan.reduced_counts[row], plan.reduced_dtypes[row]
                place = base + row * plan.stride
                measure_into([next(left)], [counts], [dtypes], plan.columns, place, plan.stride)

    # -- room ---------------------------------------------------------------------------------

    def _find_room(
        self, save: Callable[[], bool | str | None], stamp: Stamp, plan: PartPlan
    ) -> bool | None:
        """Whether it is saved, dropped if not. None: there is no room, and it is worth waiting for some.

        `save` says None when there is no room, and why it is to be dropped if it must be.
        """
        outcome = save()
        if outcome is None:
            self._buffer.retire(self._journal.next_ordinal - 1)
            # What the journal has by now counts until it is stored, and not until it grows again.
            self._buffer.mark(self._journal.written, self._journal.next_ordinal)
            self._buffer.reclaim(self._ack_page.acked)
            outcome = save()
        limit = self._buffer.limit_bytes
        if outcome is None and plan.nbytes > limit:
            outcome = f"{plan.nbytes} bytes at once exceed buffer_bytes={limit}; raise it"
        elif outcome is None and self._limits.on_full == "drop":
            outcome = f"the buffer of {limit} bytes was full"
        if isinstance(outcome, str):
            self._commit(self._dropped(stamp, plan, outcome))
            return False
        return outcome

    def _insist(self, plan: PartPlan, stamp: Stamp, save: Callable[[], bool | None]) -> bool:
        """CopyHandle for room, and let others at it meanwhile; `save` is tried as an operation of its own."""
        saved = None
        # One such wait is enough: a job must not stand still once more for every tensor.
        if self._ack_page.acked != self._stalled_at:
            began = time.monotonic()
            saved = self._block(stamp[2], save, began)
            self._blocked_s += time.monotonic() - began
            self._stalled_at = self._ack_page.acked if saved is None else -1
        if saved is None:
            self._drop(stamp, plan)
        self._waiting.pop(threading.get_ident(), None)
        return bool(saved)

    def _block(self, step: int, save: Callable[[], bool | None], began: float) -> bool | None:
        told = False
        self._do(Flush())
        while (waited := time.monotonic() - began) < self._limits.block_timeout_s:
            if not self._uploader_alive():
                return None
            self._doorbell.ring()
            time.sleep(min(0.0005 + waited / 20, 0.02))
            saved = self._as_operation(save)
            if saved is not None:
                return saved
            if waited > _PATIENCE_S and not told:
                told = True
                self._say(
                    f"step {step}: training waits for room in the capture buffer "
                    f"({self._buffer.limit_bytes} bytes); "
                    f"{self._ack_page.last_error or 'the uploader is slower than capture'}; "
                    "raise buffer_bytes, save less often, or pass on_full='drop'"
                )
        return None

    def _as_operation(self, save: Callable[[], bool | None]) -> bool | None:
        with self._lock:
            if self._busy is not None and not self._settled():
                return None
            self._busy = _OTHER
            saved = save()
            self._busy = None
        return saved

    def _drop(self, stamp: Stamp, plan: PartPlan) -> None:
        """The wait was in vain."""
        if self._uploader_alive():
            wait = f"{self._limits.block_timeout_s:.0f} s"
            reason = f"no room for {wait}; {self._ack_page.last_error or 'slow uploader'}"
        else:
            reason = "the buffer was full and no uploader is left to empty it"
        self._do(self._dropped(stamp, plan, reason))

    def _dropped(self, stamp: Stamp, plan: PartPlan, reason: str) -> Drop:
        self._tell_once(stamp[2], reason, f"{len(plan.names)} tensors not captured: {reason}")
        self._dropped_tensors += len(plan.names)
        self._dropped_bytes += plan.nbytes
        return Drop(*stamp, tuple(map(encodable, plan.names)), plan.nbytes, encodable(reason))

    def _tell_once(self, step: int, reason: str, message: str) -> None:
        if reason not in self._reasons and len(self._reasons) < _MOST_REASONS:
            self._reasons.add(reason)
            self._say(f"step {step}: {message}")

    # -- journal ------------------------------------------------------------------------------

    @staticmethod
    def _stamp(ref: StepRef) -> Stamp:
        return (ref.mode.value, ref.mode_step, ref.step, time.time())

    def _commit(self, record: Record) -> None:
        """Append a record that names no part, in order with parts that wait for a device."""
        if self._deferred.pending:
            self._deferred.submit((), lambda _: self._append_locked(record))
        else:
            self._records.append(record)

    def _append_locked(self, record: Record) -> None:
        with self._lock:
            if self._ready():
                self._busy = _OTHER
                self._records.append(record)
                self._busy = None

    def _append(
        self, plan: PartPlan, record_of: Callable[[int], Record], *, values: bool = False
    ) -> int | str | None:
        """The ordinal of a part's record, or the reason to drop the part; None: there is no room."""
        try:
            return self._records.append_of(plan, record_of, values=values)
        except SpoolUnavailable as error:
            return str(error)
        except JournalRoomTaken:
            return None


def _runs(frame: FrameType) -> bool:
    """Whether the calling thread is inside of it."""
    inner: FrameType | None = sys._getframe()
    while inner is not None and inner is not frame:
        inner = inner.f_back
    return inner is not None
