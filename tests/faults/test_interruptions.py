"""Handlers of signals that raise, at any moment of a capture: no wrong value, no silence, no hang.

The capture alone, cut off at each of its moments; whole hooks are in test_interrupted_hooks.py.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from smdist import kernel
from smdist.format.dtypes import dtype_code, numpy_dtype
from smdist.format.journal_records import Close, Drop, Inline, Part
from smdist.format.manifest import Run, Session
from smdist.identity import ModeKeys, StepRef
from smdist.planning import TensorPlan
from smdist.workers.capture import capture as capture_module
from smdist.workers.capture.capture import Capture, CaptureLimits
from smdist.workers.capture.part_plan import CaptureRequest, PartPlan, plan_part
from smdist.workers.capture.tensor_access import NumpyAccess
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalReader, JournalWriter
from smdist.workers.spool.spool import Spool, SpoolInfo, UploadOptions
from smdist.workers.upload.batch import Arenas
from tests.support.cuts import Cut, Cuts
from tests.support.sampling import rotating_share

Array = npt.NDArray[np.int64]
RAW = TensorPlan(raw=True, reductions=frozenset(), collections=("weights",))
SIZES = {"scalar": 1, "small": 40, "g0": 300, "g1": 1000, "g2": 5000, "g3": 900, "many": 20_000}


def content(step: int, name: str) -> Array:
    """What the tensor of that name holds at that step, and nowhere else."""
    first = step * 1_000_003 + list(SIZES).index(name) * 101
    return np.arange(first, first + SIZES[name], dtype=np.int64)


def plan_of(*names: str) -> PartPlan:
    return plan_part(
        [
            CaptureRequest(name, dtype_code(np.dtype("i8")), (SIZES[name],), SIZES[name] * 8, RAW)
            for name in names
        ]
    )


# Gradients come one by one, weights together.
PLANS = [
    plan_of("small", "many"),
    *(plan_of(n) for n in ("g0", "g1", "g2", "g3")),
    plan_of("scalar"),
]


class Rig:
    """A capture, and an uploader that stores when it is told to and checks every value it stores."""

    def __init__(self, root: Path, **limits: object) -> None:
        session = Session("s" * 32, 0, 1, 0, "all", 0.0, "host", 1, "")
        info = SpoolInfo(Run("run", 0.0, "numpy"), session, "/", UploadOptions(), 1, 0)
        self.spool = Spool.create(info, root, root / "disk")
        self.said: list[str] = []
        settings = CaptureLimits(**{"buffer_bytes": 2 << 20, **limits})  # type: ignore[arg-type]
        access: Any = NumpyAccess()
        self.capture: Capture[Array] = Capture(self.spool, access, settings, self.said.append)
        self.ack_page = AckPage(self.spool.path / "ack_page")
        self.reader, self.arenas = JournalReader(self.spool), Arenas(self.spool)
        self.ordinal = self.checked = 0
        self.found: dict[int, set[str]] = defaultdict(set)
        self.planned: dict[int, set[str]] = {}
        self.saved: dict[int, set[str]] = defaultdict(set)
        self.torn: dict[int, tuple[str, ...]] = {}
        self.cut: set[int] = set()
        self.outside: set[int] = (
            set()
        )  # of these, the save had not begun or was over: a hook tells it
        self.waited: set[int] = set()  # of these, a wait for room was over: its part has a record
        self.number = -1
        self.plans = PLANS
        self.closed: set[int] = set()
        self.dropped: dict[int, set[str]] = defaultdict(set)

    def step(self, number: int) -> None:
        ref = StepRef(ModeKeys.TRAIN, number, number)
        self.planned[number] = {name for plan in self.plans for name in plan.names}
        assert self.capture.begin(ref)
        for plan in self.plans:
            tensors = [content(number, name) for name in plan.names]
            self.torn[number] = plan.names
            if self.capture.save(plan, tensors):
                self.saved[number].update(plan.names)
            del self.torn[number]
        self.capture.close_step()

    def store(self, most: int = 10**9) -> None:
        for piece in self.reader.read(most):
            record = piece.record
            assert piece.ordinal == self.ordinal
            self.ordinal += 1
            if isinstance(record, (Part, Inline)):
                assert piece.kind is not None
                if isinstance(record, Part):
                    data = self.arenas.read(record.arena, record.offset, piece.kind.nbytes)
                else:
                    data = memoryview(record.data)
                for spec in piece.kind.tensors:
                    raw = data[spec.offset : spec.offset + spec.nbytes]
                    stored = np.frombuffer(raw, numpy_dtype(spec.dtype))
                    np.testing.assert_array_equal(stored, content(record.step, spec.name))
                    self.found[record.step].add(spec.name)
                    self.checked += 1
            elif isinstance(record, Close):
                self.closed.add(record.step)
            elif isinstance(record, Drop):
                self.dropped[record.step].add(record.reason)
        self.ack_page.acked = self.ordinal
        self.reader.remove_before(self.ordinal)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            self.step(self.number)

    def cut_off(self, at: int) -> bool:
        """A step, cut off at that moment if it has so many."""
        self.number += 1
        with Cuts(at) as cuts:
            try:
                self.step(self.number)
            except Cut:
                self.cut.add(self.number)
                if cuts.function == "save":
                    self.outside.add(self.number)
                over = not self.capture._state.waiting
                if over and cuts.function in ("wait_for_room", "end_wait"):
                    self.waited.add(self.number)
        assert cuts.struck == (self.number in self.cut), "nothing of ours swallows it"
        return cuts.struck

    def check(self) -> None:
        """Everything is stored: was it right, and is all of the memory free again?"""
        for _ in range(3):
            self.store()
            self.steps(1)
        self.capture.end()
        self.store()
        assert self.capture.drain(0.0)
        self.capture._buffer.seal_region(self.ordinal - 1)
        self.capture._buffer.reclaim(self.ordinal)
        assert self.capture.usage().buffer_bytes == 0, "some of it is lost for good"
        assert not self.capture._buffer._in_use
        for number in range(self.number + 1):
            assert self.saved[number] <= self.found[number], number
            if number not in self.cut:
                assert self.found[number] == self.planned[number], number
                assert number in self.closed
                assert not self.dropped.get(number), self.dropped[number]
            elif number in self.torn and number not in self.outside:
                if number in self.waited:  # nothing is left to repair
                    assert set(self.torn[number]) <= self.found[number], number
                else:
                    assert self.dropped[number], "a save that raised must be recorded"

    def close(self) -> None:
        self.capture.close()
        self.reader.close()
        self.arenas.close()
        self.ack_page.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def build(**limits: object) -> Rig:
        made.append(Rig(tmp_path / f"spools-{len(made)}", **limits))
        return made[-1]

    yield build
    for rig in made:
        rig.close()


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal file holds a step or two."""
    monkeypatch.setattr(capture_module, "JournalWriter", partial(JournalWriter, file_bytes=1000))


def moments(action: Callable[[], object]) -> int:
    with Cuts() as cuts:
        action()
    return cuts.seen


def test_a_step_interrupted_at_each_moment(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.steps(2)
    count = moments(lambda: rig.steps(1))
    assert count > 100
    for at in range(count + 1):
        rig.cut_off(at)
        if at % 3 == 0:  # late: what is overwritten before it is stored shows
            rig.store()
    assert len(rig.cut) >= count
    rig.check()


@pytest.mark.usefixtures("small_files")
def test_interruptions_while_the_journal_rotates(make: Callable[..., Rig]) -> None:
    rig, at = make(), 0
    rig.plans = [PLANS[0], PLANS[2]]
    while rig.cut_off(at) or rig.cut_off(at + 1):
        at += 1
        if at % 5 == 0:
            rig.store()
    assert len(rig.cut) > 300
    assert rig.capture._journal.file_index > 10
    rig.plans = PLANS
    rig.check()


@pytest.mark.parametrize("seed", rotating_share(range(3), 3))
@pytest.mark.usefixtures("small_files")
def test_interruptions_of_the_repair(make: Callable[..., Rig], seed: int) -> None:
    """What makes good an interruption is interrupted itself, most of the time."""
    rig, chance = make(), random.Random(seed)
    for _ in range(800):
        rig.cut_off(chance.randrange(chance.choice((20, 60, 200, 2000))))
        if chance.random() < 0.2:
            rig.store(chance.choice((3, 30, 10**9)))
    assert len(rig.cut) > 500
    rig.check()


@pytest.mark.parametrize("seed", rotating_share(range(2), 2))
def test_interruptions_of_a_wait_for_room(make: Callable[..., Rig], seed: int) -> None:
    rig, chance = make(buffer_bytes=400_000, block_timeout_s=60.0), random.Random(seed)
    over = threading.Event()

    def upload() -> None:
        while not over.wait(0.001):
            rig.store(chance.choice((1, 5, 50)))

    uploader = threading.Thread(target=upload)
    uploader.start()
    try:
        for _ in range(400):
            rig.cut_off(chance.randrange(chance.choice((60, 600, 3000))))
    finally:
        over.set()
        uploader.join()
    assert rig.capture.usage().blocked_s > 0
    assert len(rig.cut) > 200
    rig.check()


def test_interruptions_with_a_full_buffer_record_every_drop(make: Callable[..., Rig]) -> None:
    rig = make(buffer_bytes=400_000, on_full="drop")
    rig.steps(2)
    for at in range(0, 1200, 7):
        rig.cut_off(at)
        if at % 4 == 0:
            rig.store()
    rig.store()
    rig.steps(1)
    for number in range(rig.number):
        lost = set(SIZES) - rig.found[number]
        assert not lost or rig.dropped[number] or number in rig.cut
    assert rig.found[rig.number - 1] | rig.found[rig.number]


def test_the_end_interrupted_at_each_moment(make: Callable[..., Rig]) -> None:
    at, struck = 0, True
    while struck:
        rig = make()
        rig.steps(2)
        with Cuts(at) as cuts, suppress(Cut):
            rig.capture.end()
        rig.capture.end()
        rig.store()
        assert rig.closed == {0, 1}
        struck = cuts.struck
        if not struck:
            with Cuts(at - cuts.seen) as later, suppress(Cut):
                rig.capture.drain(60.0)
                rig.capture.close()
            struck = later.struck
        rig.close()
        at += 1
    assert at > 50


def test_a_save_inside_of_a_save_is_rejected_and_recorded(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it interrupts goes on, and is not taken for cut off."""
    rig = make()
    rig.steps(1)
    copy, plan = kernel.copy, PLANS[0]
    tensors = [content(1, name) for name in plan.names]
    inner: list[object] = []

    def interrupted(*arguments: object) -> int:
        if not inner:
            inner.append(rig.capture.is_reentrant_call)
            inner.append(rig.capture.save(plan, tensors))
            inner.append(rig.capture.begin(StepRef(ModeKeys.TRAIN, 9, 9)))
        return copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "copy", interrupted)
    rig.steps(1)
    assert inner == [True, False, False]
    assert not rig.capture.is_reentrant_call
    rig.capture.end()
    rig.store()
    assert rig.found[1] == set(SIZES)
    assert rig.dropped == {1: {"a signal handler saved it in the middle of another save"}}
