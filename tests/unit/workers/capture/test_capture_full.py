"""A journal without room: nothing is raised, everything that is missing is said."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from smdist.format.dtypes import dtype_code
from smdist.format.journal_records import (
    Close,
    Drop,
    End,
    Flush,
    Inline,
    Part,
    Record,
    TensorSpec,
    Trouble,
)
from smdist.format.manifest import Run, Session
from smdist.identity import ModeKeys, StepRef
from smdist.planning import TensorPlan
from smdist.workers.capture import capture as capture_module
from smdist.workers.capture import journal_room as records
from smdist.workers.capture.capture import Capture, CaptureLimits
from smdist.workers.capture.deferred_records import DeferredRecords
from smdist.workers.capture.part_plan import CaptureRequest, PartPlan, plan_part
from smdist.workers.capture.tensor_access import NumpyAccess
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import FILE_BYTES, JournalReader
from smdist.workers.spool.spool import Spool, SpoolInfo, UploadOptions

Array = npt.NDArray[np.generic]
RAW = TensorPlan(raw=True, reductions=frozenset(), collections=("weights",))
VALUE = np.arange(60.0)  # travels in the journal
LARGE = np.arange(1000.0)  # does not


def step(number: int) -> StepRef:
    return StepRef(ModeKeys.TRAIN, number, number)


def plan_of(name: str, array: Array) -> PartPlan:
    return plan_part(
        [CaptureRequest(name, dtype_code(array.dtype), array.shape, array.nbytes, RAW)]
    )


class Rig:
    """A capture, what it said, and an uploader that stores when it is told to."""

    def __init__(self, root: Path) -> None:
        session = Session("s" * 32, 0, 1, 0, "all", 0.0, "host", 1, "")
        info = SpoolInfo(Run("run", 0.0, "numpy"), session, "/", UploadOptions(), 1, 0)
        self.spool = Spool.create(info, root, root / "disk")
        self.lines: list[str] = []
        self.capture: Capture[Array]
        self.plans = {"value": plan_of("value", VALUE), "large": plan_of("large", LARGE)}

    def start(self, host: NumpyAccess | None = None, **limits: object) -> None:
        self.capture = Capture(
            self.spool,
            host or NumpyAccess(),
            CaptureLimits(**limits),  # type: ignore[arg-type]
            self.lines.append,
        )
        self.ack_page = AckPage(self.spool.path / "ack_page")
        self.reader = JournalReader(self.spool)
        self.records: list[Record] = []

    def save(self, number: int, what: str = "value") -> bool:
        self.capture.begin(step(number))
        return self.capture.save(self.plans[what], [VALUE if what == "value" else LARGE])

    def store(self) -> None:
        """As an uploader does: read, acknowledge, remove the files that are done with."""
        pieces = self.reader.read()
        self.records += [piece.record for piece in pieces]
        if pieces:
            self.ack_page.acked = pieces[-1].ordinal + 1
            self.reader.remove_before(self.ack_page.acked)

    def steps_with(self, *kinds: type) -> set[int]:
        return {r.step for r in self.records if isinstance(r, kinds)}  # type: ignore[union-attr]

    def close(self) -> None:
        self.capture.close()
        self.reader.close()
        self.ack_page.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "spools")
    yield made
    made.close()


@pytest.fixture
def rig_on_small_disk(small_disk: Path) -> Iterator[Rig]:
    made = Rig(small_disk)
    yield made
    made.close()


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def until_dropped(rig: Rig, number: int = 0) -> int:
    """Save steps until the journal's file is full and no other can be made."""
    first = number
    while rig.save(number):
        number += 1
        assert (number - first) * VALUE.nbytes < 2 * FILE_BYTES
    return number


@pytest.mark.parametrize("on_full", ["block", "drop"])
@pytest.mark.parametrize("what", ["value", "large"])
def test_a_full_disk_under_the_journal_drops_until_there_is_room(
    rig_on_small_disk: Rig,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_full: str,
    what: str,
) -> None:
    monkeypatch.setattr(records, "_RETRY_S", 0.0)
    rig = rig_on_small_disk
    rig.start(buffer_bytes=1 << 30, on_full=on_full)
    begun = 0
    if what == "large":  # the arena has what it needs
        assert rig.save(0, what)
        rig.store()
        begun = 1
    fill(small_disk)
    first = until_dropped(rig, begun)
    dropped = {first}
    # Records that are shorter may still fit.
    dropped |= {number for number in range(first + 1, first + 40) if not rig.save(number, what)}
    assert len(dropped) > 20
    rig.capture.record_error("something else")
    usage = rig.capture.usage()
    assert usage.dropped_tensors == len(dropped)
    assert usage.dropped_bytes >= 20 * VALUE.nbytes
    (line,) = [line for line in rig.lines if "not captured" in line]
    assert "free some disk space" in line
    subprocess.run(["mount", "-o", "remount,size=32m", small_disk], check=True)
    for number in range(first + 40, first + 45):
        assert rig.save(number, what)
    rig.capture.end()
    rig.store()
    assert rig.steps_with(Drop) == dropped
    assert rig.steps_with(Part, Inline) == set(range(first + 45)) - dropped
    assert rig.steps_with(Close) == set(range(first + 45))
    assert "something else" in {r.message for r in rig.records if isinstance(r, Trouble)}
    assert isinstance(rig.records[-1], End)
    assert rig.capture.drain(5.0)
    assert not rig.capture.unwritten_reason


def test_an_end_on_a_full_disk_is_no_error(
    rig_on_small_disk: Rig, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "_FINAL_WAIT_S", 0.2)
    rig = rig_on_small_disk
    rig.start(buffer_bytes=1 << 30)
    fill(small_disk)
    until_dropped(rig)
    rig.capture.end("RuntimeError: \udc80")
    rig.store()
    assert not rig.capture.drain(60.0)
    assert "free some disk space" in rig.capture.unwritten_reason
    assert rig.capture.usage().pending_records > 0


@pytest.mark.parametrize("room_after", [1, 3000])
def test_small_values_are_bounded_by_the_buffer(rig: Rig, room_after: int) -> None:
    limit = 256 << 10
    rig.start(buffer_bytes=limit, on_full="drop")
    most = limit + max(limit // 8, 64 << 10)
    saved = [number for number in range(3000) if rig.save(number)]
    assert 0 < len(saved) < 1000
    assert rig.capture._journal.written_bytes <= most
    assert sum("not captured" in line for line in rig.lines) == 1
    last = 2999
    if room_after > 1:
        for last in range(3000, 3000 + room_after):
            rig.save(last)
        assert rig.capture._journal.written_bytes <= most
    rig.store()
    rig.capture.save(rig.plans["value"], [VALUE])
    assert rig.save(last + 1)
    rig.store()
    whole = rig.steps_with(Close) - rig.steps_with(Drop)
    assert whole <= rig.steps_with(Part, Inline), "a step that lost its value looks whole"
    drops = [record for record in rig.records if isinstance(record, Drop)]
    assert any("is not listed" in drop.reason for drop in drops)
    dropped = {drop.step + i * drop.stride for drop in drops for i in range(drop.steps)}
    assert dropped | rig.steps_with(Part, Inline) == set(range(last + 2)), "nothing is passed over"


def test_what_lies_in_the_arena_and_in_the_journal_is_bounded_together(rig: Rig) -> None:
    limit = 4 << 20
    rig.start(buffer_bytes=limit, on_full="drop")
    number, large = 0, 0
    while rig.save(number):
        number += 1
    while rig.save(number + 1, "large"):
        large += 1
    assert rig.capture._journal.written_bytes + large * LARGE.nbytes < limit + limit // 8
    rig.store()
    assert rig.save(number + 2, "large")
    assert rig.save(number + 3)


def test_a_small_value_waits_for_room(rig: Rig) -> None:
    rig.start(buffer_bytes=128 << 10, block_timeout_s=60.0)
    waiting = threading.Event()

    def upload() -> None:
        while not any(isinstance(record, Flush) for record in rig.records):
            pieces = rig.reader.read()
            rig.records += [piece.record for piece in pieces]
        waiting.set()
        rig.ack_page.acked = len(rig.records)

    uploader = threading.Thread(target=upload)
    uploader.start()
    number = 0
    while not waiting.is_set():
        assert rig.save(number)
        number += 1
    uploader.join()
    assert rig.capture.usage().blocked_s > 0
    assert rig.capture.usage().dropped_tensors == 0


def test_what_cannot_be_journalled_leaves_no_hole_in_the_buffer(rig: Rig) -> None:
    rig.start(buffer_bytes=4 << 20)
    spec = TensorSpec("\ud800", "F64", (1000,), LARGE.nbytes, 0, -1, ())
    broken = PartPlan((), (spec,), LARGE.nbytes)
    rig.capture.begin(step(0))
    for _ in range(3):
        with pytest.raises(UnicodeEncodeError):
            rig.capture.save(broken, [LARGE])
    assert rig.save(1, "large")
    rig.store()
    rig.capture.begin(step(2))
    assert rig.capture.usage().buffer_bytes == 0


def test_names_that_cannot_be_written_are_escaped(rig: Rig) -> None:
    rig.start(buffer_bytes=4 << 20)
    plan = plan_of("\ud800lone", LARGE)
    assert plan.names == ("\\ud800lone",)
    rig.capture.begin(step(0))
    assert rig.capture.save(plan, [LARGE])
    rig.capture.record_error("about \ud800")
    rig.store()
    assert r"about \ud800" in {r.message for r in rig.records if isinstance(r, Trouble)}


# -- what is kept -----------------------------------------------------------------------------------


def drop(number: int, names: int = 1) -> Drop:
    return Drop(1, number, number, 0.0, tuple(f"t{i}" for i in range(names)), 8, "full")


def close(number: int) -> Close:
    return Close(1, number, number, 0.0)


@pytest.fixture
def size_of() -> Callable[[tuple[Record, ...]], int]:
    return lambda records: 100 * len(records)


def written(kept: DeferredRecords) -> list[Record]:
    records = []
    while (record := kept.first()) is not None:
        records.append(record)
        kept.remove_first()
    return records


def test_records_are_kept_in_order(size_of: Callable[[tuple[Record, ...]], int]) -> None:
    kept = DeferredRecords(1000, size_of)
    assert not kept
    records: list[Record] = [drop(1), close(1), Trouble("x", 1, 0.0), drop(2), End("", 0.0)]
    for record in (*records[:2], Flush(), *records[2:]):
        kept.add(record)
    assert len(kept) == 5
    assert written(kept) == records
    assert not kept
    assert kept.first() is None


@pytest.mark.parametrize("ended", [True, False])
def test_beyond_its_limit_every_step_is_dropped_and_none_looks_whole(
    size_of: Callable[[tuple[Record, ...]], int], ended: bool
) -> None:
    kept = DeferredRecords(450, size_of)
    other = Drop(2, 7, 71, 0.0, ("t",), 8, "full")
    for number in range(0, 200, 2):
        kept.add(drop(number, names=3))
        if number == 100:
            kept.add(other)  # of another mode, in between
        kept.add(close(number))
    kept.add(drop(200, names=3))
    if ended:
        kept.add(End("", 0.0))
    records = written(kept)
    assert len(records) <= 7
    assert isinstance(records[-1], End) == ended
    closed = {r.step for r in records if isinstance(r, Close)}
    dropped = {r.mode: set[int]() for r in records if isinstance(r, Drop)}
    for r in records:
        if isinstance(r, Drop):
            assert r.names or "not listed" in r.reason
            dropped[r.mode] |= {r.step + i * r.stride for i in range(r.steps)}
            assert r.mode == 2 or r.mode_stride == r.stride
    assert dropped == {1: set(range(0, 201, 2)), 2: {71}}
    assert closed <= dropped[1]


def test_a_long_declaration_counts_until_it_is_stored_and_no_longer(rig: Rig) -> None:
    """It takes most of what the journal may have; a tensor as large as the buffer comes next."""
    rig.start(buffer_bytes=1 << 20, on_full="drop")
    names = [f"{number:05d}-" + "n" * 60 for number in range(3000)]
    small = np.zeros(1)
    many = plan_part(
        [CaptureRequest(n, dtype_code(small.dtype), (1,), small.nbytes, RAW) for n in names]
    )
    whole = np.zeros(1_000_000 // 8)
    rig.capture.begin(step(0))
    assert rig.capture.save(many, [small] * len(names))
    rig.store()
    assert rig.capture.save(plan_of("whole", whole), [whole]), "nothing waits any more"
    assert not rig.capture.save(plan_of("again", whole), [whole])


def test_a_signal_handler_is_told_that_it_interrupts_a_wait_for_room(rig: Rig) -> None:
    rig.start(buffer_bytes=1 << 20, on_full="block")
    capture, whole = rig.capture, np.zeros(900_000 // 8)
    seen: list[bool] = []

    def handler(*_: object) -> None:
        if capture._state.waiting:
            seen.append(capture.is_reentrant_call)
            rig.store()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        capture.begin(step(0))
        assert not capture.is_reentrant_call
        assert capture.save(plan_of("first", whole), [whole])
        assert capture.save(plan_of("second", whole), [whole])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    assert all(seen)
    assert not capture.is_reentrant_call
