"""Capture against the reader its uploader uses: a real spool, no uploader."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from smdist import kernel
from smdist.format.dtypes import dtype_code, numpy_dtype
from smdist.format.journal_records import Close, Drop, End, Flush, Inline, Part, Piece, Trouble
from smdist.format.manifest import Run, Session
from smdist.identity import ModeKeys, StepRef
from smdist.kernel.tensor_stats import derive
from smdist.planning import TensorPlan
from smdist.workers.capture.capture import Capture, CaptureLimits
from smdist.workers.capture.part_plan import CaptureRequest, PartPlan, plan_part
from smdist.workers.capture.tensor_access import NumpyAccess
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalReader
from smdist.workers.spool.spool import Spool, SpoolInfo, UploadOptions

Array = npt.NDArray[np.generic]
RAW = TensorPlan(raw=True, reductions=frozenset(), collections=("weights",))


def step(number: int) -> StepRef:
    return StepRef(ModeKeys.TRAIN, number, number)


def wanted(name: str, array: Array, plan: TensorPlan = RAW) -> CaptureRequest:
    return CaptureRequest(name, dtype_code(array.dtype), array.shape, array.nbytes, plan)


def plan_of(**arrays: Array) -> tuple[PartPlan, list[Array]]:
    return plan_part([wanted(n, a) for n, a in arrays.items()]), list(arrays.values())


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    session = Session("s" * 32, 0, 1, 0, "all", 0.0, "host", 1, "")
    info = SpoolInfo(
        Run("run", 0.0, "numpy"),
        session,
        str(tmp_path / "out"),
        UploadOptions(),
        1,
        0,
    )
    return Spool.create(info, tmp_path / "memory", tmp_path / "disk")


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def make(spool: Spool, lines: list[str]) -> Iterator[Callable[..., Capture[Array]]]:
    made: list[Capture[Array]] = []

    def build(**limits: object) -> Capture[Array]:
        settings = {"buffer_bytes": 8 << 20, **limits}
        made.append(Capture(spool, NumpyAccess(), CaptureLimits(**settings), lines.append))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for capture in made:
        capture.close()


def read(spool: Spool) -> list[Piece]:
    reader = JournalReader(spool)
    try:
        return reader.read()
    finally:
        reader.close()


def bytes_of(spool: Spool, record: Part | Inline) -> bytes:
    if isinstance(record, Inline):
        return record.data
    with spool.open_for_reading(f"arena-{record.arena}") as handle:
        return handle.read()[record.offset :]


def tensors_of(spool: Spool) -> dict[tuple[int, str], Array]:
    """Raw tensors by step and name, as an uploader would find them."""
    found: dict[tuple[int, str], Array] = {}
    for piece in read(spool):
        record = piece.record
        if not isinstance(record, (Part, Inline)):
            continue
        assert piece.kind is not None
        data = bytes_of(spool, record)
        for spec in piece.kind.tensors:
            raw = data[spec.offset : spec.offset + spec.nbytes]
            array = np.frombuffer(raw, numpy_dtype(spec.dtype)).reshape(spec.shape)
            found[record.mode_step, spec.name] = array
    return found


def kinds(spool: Spool) -> list[str]:
    return [type(piece.record).__name__ for piece in read(spool)]


def test_a_saved_tensor_is_as_it_was_when_save_returned(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    weight = np.arange(100_000, dtype=np.float32)
    expected = weight.copy()
    plan, arrays = plan_of(weight=weight)
    capture.begin(step(0))
    assert capture.save(plan, arrays)
    weight[:] = -1
    np.testing.assert_array_equal(tensors_of(spool)[0, "weight"], expected)


def test_a_step_is_declared_once_and_closed(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    plan, arrays = plan_of(a=np.ones(1000), b=np.zeros((0, 3)), c=np.array(3.5, np.float32))
    for number in range(2):
        capture.begin(step(number))
        capture.save(plan, arrays)
    capture.close_step()
    assert kinds(spool) == ["Declare", "Part", "Close", "Part", "Close"]
    assert tensors_of(spool)[1, "c"] == 3.5
    assert tensors_of(spool)[1, "b"].shape == (0, 3)


def test_a_close_says_whether_anything_was_due(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    plan, arrays = plan_of(loss=np.array(0.25))
    for number, planned in enumerate([True, False]):
        capture.begin(step(number), planned=planned)
        capture.save(plan, arrays)
    capture.end()
    closes = [p.record.planned for p in read(spool) if isinstance(p.record, Close)]
    assert closes == [True, False]


def test_small_parts_travel_in_the_journal(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    plan, arrays = plan_of(loss=np.array(0.25))
    capture.begin(step(3))
    capture.save(plan, arrays)
    assert kinds(spool) == ["Declare", "Inline"]
    assert tensors_of(spool)[3, "loss"] == 0.25


def test_a_part_after_the_close_belongs_to_its_step(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    plan, arrays = plan_of(late=np.array(1.0))
    capture.begin(step(7))
    capture.close_step()
    assert capture.save(plan, arrays)
    assert kinds(spool) == ["Close", "Declare", "Inline"]
    assert (7, "late") in tensors_of(spool)


def test_non_contiguous_arrays_are_stored_in_c_order(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    array = np.arange(60_000, dtype=np.int64).reshape(200, 300).T[::2]
    plan, arrays = plan_of(array=array)
    capture.begin(step(0))
    capture.save(plan, arrays)
    np.testing.assert_array_equal(tensors_of(spool)[0, "array"], array)


@pytest.mark.parametrize("raw", [True, False])
def test_reductions_are_measured_beside_or_instead_of_raw_values(
    spool: Spool, make: Callable[..., Capture[Array]], raw: bool
) -> None:
    capture = make()
    plan = TensorPlan(raw=raw, reductions=frozenset({"mean", "l2", "median"}), collections=())
    array = np.linspace(-3, 5, 10_001, dtype=np.float32)
    strided = np.asfortranarray(np.outer(array[:50], array[:60]))
    part = plan_part([wanted("a", array, plan), wanted("b", strided, plan)])
    capture.begin(step(0))
    capture.save(part, [array, strided])
    (piece,) = (p for p in read(spool) if isinstance(p.record, (Part, Inline)))
    assert isinstance(piece.record, (Part, Inline))
    data = bytes_of(spool, piece.record)
    rows = np.frombuffer(data[: 2 * part.stride], np.float64).reshape(2, -1)
    for row, values in zip(rows, (array, strided), strict=True):
        exact = values.astype(np.float64)
        assert derive(row, part.columns, "mean") == pytest.approx(exact.mean())
        assert derive(row, part.columns, "l2") == pytest.approx(np.linalg.norm(exact.ravel()))
        assert derive(row, part.columns, "median") == pytest.approx(np.median(exact))
    if raw:
        np.testing.assert_array_equal(tensors_of(spool)[0, "b"], strided)


def test_acknowledged_ranges_are_used_again(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make(buffer_bytes=4 << 20)
    ack_page = AckPage(spool.path / "ack_page")
    plan, arrays = plan_of(big=np.zeros(1 << 20, np.uint8))
    for number in range(50):
        capture.begin(step(number))
        assert capture.save(plan, arrays)
        capture.close_step()
        ack_page.acked = read(spool)[-1].ordinal + 1
    assert capture.usage().buffer_bytes <= 2 << 20
    assert capture.usage().blocked_s == 0
    ack_page.close()


def test_a_full_buffer_drops_and_says_so(
    spool: Spool, make: Callable[..., Capture[Array]], lines: list[str]
) -> None:
    capture = make(buffer_bytes=4 << 20, on_full="drop")
    plan, arrays = plan_of(big=np.zeros(3 << 20, np.uint8))
    capture.begin(step(0))
    assert capture.save(plan, arrays)
    capture.begin(step(1))
    assert not capture.save(plan, arrays)
    (drop,) = (p.record for p in read(spool) if isinstance(p.record, Drop))
    assert (drop.mode_step, drop.names, drop.nbytes) == (1, ("big",), 3 << 20)
    assert capture.usage().dropped_tensors == 1
    assert len(lines) == 1
    assert "buffer" in lines[0]


def test_a_full_buffer_blocks_until_the_uploader_made_room(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    """Also when all of it is held by the open step: the uploader is asked to flush that."""
    capture = make(buffer_bytes=4 << 20)
    plan, arrays = plan_of(big=np.zeros(3 << 20, np.uint8))

    def acknowledge() -> None:
        ack_page = AckPage(spool.path / "ack_page")
        while not any(isinstance(p.record, Flush) for p in read(spool)):
            pass
        ack_page.acked = read(spool)[-1].ordinal + 1
        ack_page.close()

    capture.begin(step(0))
    assert capture.save(plan, arrays)
    uploader = threading.Thread(target=acknowledge)
    uploader.start()
    assert capture.save(plan, arrays)
    uploader.join()
    assert capture.usage().blocked_s > 0


def test_blocking_ends_after_the_timeout(
    make: Callable[..., Capture[Array]], lines: list[str]
) -> None:
    capture = make(buffer_bytes=4 << 20, block_timeout_s=0.05)
    plan, arrays = plan_of(big=np.zeros(3 << 20, np.uint8))
    capture.begin(step(0))
    assert capture.save(plan, arrays)
    assert not capture.save(plan, arrays)
    assert capture.usage().dropped_bytes == 3 << 20
    assert lines
    once = capture.usage().blocked_s
    assert not capture.save(plan, arrays)
    assert capture.usage().blocked_s == once


def test_nobody_is_waited_for_when_no_uploader_is_left(
    make: Callable[..., Capture[Array]],
) -> None:
    capture = make(buffer_bytes=4 << 20, block_timeout_s=3600.0)
    capture.set_uploader_alive(lambda: False)
    plan, arrays = plan_of(big=np.zeros(3 << 20, np.uint8))
    capture.begin(step(0))
    assert capture.save(plan, arrays)
    assert not capture.save(plan, arrays)
    assert capture.usage().dropped_bytes == 3 << 20


def test_a_part_larger_than_the_buffer_is_dropped_at_once(
    make: Callable[..., Capture[Array]], lines: list[str]
) -> None:
    capture = make(buffer_bytes=1 << 20)
    plan, arrays = plan_of(big=np.zeros(2 << 20, np.uint8))
    capture.begin(step(0))
    assert not capture.save(plan, arrays)
    assert "buffer_bytes" in lines[0]


def test_journal_rotation_keeps_every_file_readable_alone(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    arrays = {f"tensor/{i:04d}": np.full(20, i, np.float32) for i in range(1000)}
    plan = plan_part([wanted(n, a) for n, a in arrays.items()])
    ack_page = AckPage(spool.path / "ack_page")
    scalar, value = plan_of(x=np.zeros(50))
    for number in range(12_000):
        capture.begin(step(number))
        capture.save(scalar, value)
        if number % 4000 == 0:
            capture.save(plan, list(arrays.values()))
    capture.close_step()
    pieces = read(spool)
    assert [p.ordinal for p in pieces] == list(range(len(pieces)))
    assert sum(isinstance(p.record, Close) for p in pieces) == 12_000
    assert len(list(spool.path.glob("journal-*"))) > 1
    later = JournalReader(spool, start=pieces[-100].ordinal)
    assert later.read() == pieces[-100:]
    later.close()
    ack_page.close()


def test_memory_that_runs_out_of_room_goes_on_disk(small_disk: Path, tmp_path: Path) -> None:
    session = Session("s" * 32, 0, 1, 0, "all", 0.0, "host", 1, "")
    info = SpoolInfo(Run("run", 0.0, "numpy"), session, "out", UploadOptions(), 1, 0)
    spool = Spool.create(info, small_disk, tmp_path / "disk")
    lines: list[str] = []
    limits = CaptureLimits(buffer_bytes=64 << 20)
    capture: Capture[Array] = Capture(spool, NumpyAccess(), limits, lines.append)
    arrays = [np.full(3 << 20, number, np.uint8) for number in range(6)]
    for number, array in enumerate(arrays):
        plan, _ = plan_of(big=array)
        capture.begin(step(number))
        assert capture.save(plan, [array])
    found = tensors_of(spool)
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(found[number, "big"], array)
    assert (spool.overflow / "arena-1").exists()
    assert any("disk" in line for line in lines)
    capture.close()


def test_an_orderly_end_closes_the_step_and_a_crash_leaves_it_open(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    capture.begin(step(0))
    capture.end("RuntimeError: boom")
    assert [type(p.record) for p in read(spool)] == [End]
    plan, arrays = plan_of(x=np.zeros(3))
    assert not capture.save(plan, arrays)


def test_equal_troubles_are_journalled_once_and_counted(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    for _ in range(5):
        capture.record_error("cannot read a sparse tensor")
    (trouble,) = (p.record for p in read(spool))
    assert isinstance(trouble, Trouble)
    assert capture.usage().troubles == 5


def test_drain_waits_for_the_acknowledgement(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    capture.begin(step(0))
    capture.end()
    assert not capture.drain(0.05)
    ack_page = AckPage(spool.path / "ack_page")
    ack_page.acked = read(spool)[-1].ordinal + 1
    assert capture.drain(5)
    ack_page.close()


def test_waiting_parts_are_not_tracked_by_the_garbage_collector(
    make: Callable[..., Capture[Array]],
) -> None:
    capture = make()
    plan, arrays = plan_of(gradient=np.ones(1024, np.float32))
    capture.begin(step(0))
    capture.save(plan, arrays)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(500):
        assert capture.save(plan, arrays)
    gc.collect()
    assert len(gc.get_objects()) - before < 100


def gradients(count: int, nbytes: int = 1000) -> list[tuple[PartPlan, list[Array]]]:
    """Each a part of its own, as backward brings them."""
    arrays = [np.full(nbytes, number, np.uint8) for number in range(count)]
    return [plan_of(**{f"g{i}": array}) for i, array in enumerate(arrays)]


def test_single_tensors_are_stored_next_to_each_other(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    parts = gradients(200, nbytes=5000)
    for number in range(3):
        capture.begin(step(number))
        for plan, arrays in parts:
            assert capture.save(plan, arrays)
            np.add(arrays[0], 1, out=arrays[0])
    found = tensors_of(spool)
    for number in range(3):
        for i in range(200):
            expected = np.full(5000, (i + number) % 256, np.uint8)
            np.testing.assert_array_equal(found[number, f"g{i}"], expected)
    spots = {p.record.offset for p in read(spool) if isinstance(p.record, Part)}
    assert len(spots) == 600
    assert all(spot % 64 == 0 for spot in spots)


def test_what_was_cut_from_one_strip_is_free_once_all_of_it_is_stored(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make()
    ack_page = AckPage(spool.path / "ack_page")
    parts = gradients(100)
    capture.begin(step(0))
    for plan, arrays in parts:  # each is declared, in a range of its own
        capture.save(plan, arrays)
    for number in range(1, 30):  # the journal is not asked yet whether it may grow further
        capture.begin(step(number))
        for plan, arrays in parts:
            assert capture.save(plan, arrays)
        capture.close_step()
        last = read(spool)[-1].ordinal
        ack_page.acked = last  # all but the close
        capture.begin(step(1000 + number), planned=False)
        assert capture.usage().buffer_bytes == 100 * 1024
        ack_page.acked = last + 2
        capture.begin(step(5000 + number), planned=False)
        assert capture.usage().buffer_bytes == 0
    ack_page.close()


def test_a_strip_is_no_reason_to_drop_what_would_have_had_room(
    make: Callable[..., Capture[Array]],
) -> None:
    """What is left of it, and what of it is stored, goes to whoever waits for room."""
    limit = 1 << 20
    capture = make(buffer_bytes=limit, on_full="drop")
    parts = gradients(2, nbytes=1024)
    capture.begin(step(0))
    for plan, arrays in (*parts, *parts):  # declared, then cut from a strip
        assert capture.save(plan, arrays)
    plan, arrays = plan_of(rest=np.zeros(limit - 4 * 1024, np.uint8))
    assert capture.save(plan, arrays)
    assert not capture.save(*parts[0])


def test_gradients_of_a_step_larger_than_the_buffer_are_all_stored(
    spool: Spool, make: Callable[..., Capture[Array]]
) -> None:
    capture = make(buffer_bytes=1 << 20, block_timeout_s=60.0)
    parts = gradients(16, nbytes=100_000)
    done = threading.Event()

    def acknowledge() -> None:
        ack_page = AckPage(spool.path / "ack_page")
        while not done.wait(0.001):
            if pieces := read(spool):
                ack_page.acked = pieces[-1].ordinal + 1
        ack_page.close()

    uploader = threading.Thread(target=acknowledge)
    uploader.start()
    try:
        for number in range(3):
            capture.begin(step(number))
            for plan, arrays in parts:
                assert capture.save(plan, arrays)
    finally:
        done.set()
        uploader.join()
    assert capture.usage().dropped_tensors == 0


def test_what_a_signal_interrupts_is_recorded_and_not_written_over(
    spool: Spool, make: Callable[..., Capture[Array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python meets a Ctrl-C that came during the copy right after the call that made it."""
    capture = make()
    parts = gradients(4)
    record = kernel.record

    def interrupted(*arguments: Any) -> None:
        record(*arguments)
        raise KeyboardInterrupt

    capture.begin(step(0))
    for plan, arrays in parts:
        capture.save(plan, arrays)
    capture.begin(step(1))
    for number, (plan, arrays) in enumerate(parts):
        if number == 1:
            monkeypatch.setattr(kernel, "record", interrupted)
            with pytest.raises(KeyboardInterrupt):
                capture.save(plan, arrays)
            monkeypatch.undo()
        else:
            assert capture.save(plan, arrays)
    capture.end()
    pieces = read(spool)
    assert [piece.ordinal for piece in pieces] == list(range(len(pieces)))
    assert len(pieces) == 4 * 3 + 4
    (drop,) = [piece.record for piece in pieces if isinstance(piece.record, Drop)]
    assert (drop.step, drop.names) == (1, ("g1",)), "nobody knows that it is there"
    for number, (_, arrays) in enumerate(parts):
        np.testing.assert_array_equal(tensors_of(spool)[1, f"g{number}"], arrays[0])
