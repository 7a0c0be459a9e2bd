from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdist import kernel
from smdist.errors import SpoolUnavailable
from smdist.format.journal_records import (
    Close,
    Declare,
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
from smdist.workers.spool.journal import JournalFileFull, JournalReader, JournalWriter
from smdist.workers.spool.spool import Spool, SpoolInfo, UploadOptions

KIND = Declare(0, (), (TensorSpec("x", "U8", (3,), 3, 0, -1, ()),), 3)


def make_spool(root: Path, overflow: Path | None = None) -> Spool:
    session = Session("s" * 16, 0, 1, 0, "all", 0.0, "host", os.getpid(), "")
    info = SpoolInfo(Run("r", 0.0, "none"), session, "out", UploadOptions(), 1, 0)
    return Spool.create(info, root, overflow)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return make_spool(tmp_path)


def inline(step: int, kind: int = 0) -> Inline:
    return Inline(1, step, step, 0.0, kind, b"abc")


def close(step: int) -> Close:
    return Close(1, step, step, 0.0)


def append(writer: JournalWriter, record: Record) -> int:
    """As `Capture` does, for records without declaration."""
    try:
        return writer.append(record)
    except JournalFileFull:
        writer.make_room((record,))
        return writer.append(record)


def tail_of(path: Path) -> int:
    return len(path.read_bytes().rstrip(b"\0"))


def test_what_is_written_is_read_once_and_in_order(spool: Spool) -> None:
    writer, reader = JournalWriter(spool), JournalReader(spool)
    assert reader.read() == []
    assert [writer.append(record) for record in (KIND, inline(0), close(0))] == [0, 1, 2]
    pieces = reader.read()
    assert [(p.ordinal, p.record, p.kind) for p in pieces] == [
        (0, KIND, None),
        (1, inline(0), KIND),
        (2, close(0), None),
    ]
    assert reader.read() == []
    writer.append(Flush())
    assert [piece.ordinal for piece in reader.read()] == [3]
    writer.close()
    reader.close()


def test_reading_starts_in_the_middle_and_still_knows_declarations(spool: Spool) -> None:
    writer = JournalWriter(spool)
    for record in (KIND, inline(0), inline(1)):
        writer.append(record)
    reader = JournalReader(spool, start=2)
    assert [(p.ordinal, p.kind) for p in reader.read()] == [(2, KIND)]
    writer.close()
    reader.close()


def test_reading_a_few_at_a_time(spool: Spool) -> None:
    writer, reader = JournalWriter(spool, file_bytes=256), JournalReader(spool)
    for step in range(50):
        append(writer, close(step))
    seen = []
    while pieces := reader.read(7):
        assert len(pieces) <= 7
        seen += [piece.ordinal for piece in pieces]
    assert seen == list(range(50))
    writer.close()
    reader.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_start_after_any_rotation(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    spool = make_spool(tmp_path_factory.mktemp("spool"))
    writer = JournalWriter(spool, file_bytes=data.draw(st.integers(64, 400)))
    count = data.draw(st.integers(1, 60))
    records = [Trouble("x" * data.draw(st.integers(0, 300)), step, 0.0) for step in range(count)]
    for record in records:
        append(writer, record)
    start = data.draw(st.integers(0, count))
    reader = JournalReader(spool, start)
    assert [(p.ordinal, p.record) for p in reader.read()] == list(enumerate(records))[start:]
    reader.remove_before(count)
    assert [path.name for path in spool.path.glob("journal-*")] == [
        f"journal-{writer.file_index:06d}"
    ]
    writer.close()
    reader.close()
    spool.remove()


def test_a_full_file_says_so_and_declarations_are_void_in_the_next(spool: Spool) -> None:
    writer, reader = JournalWriter(spool, file_bytes=160), JournalReader(spool)
    writer.append(KIND)
    for _ in range(2):
        writer.append(inline(0))
    with pytest.raises(JournalFileFull):
        writer.append(Trouble("z" * 100, 0, 0.0))
    before = writer.next_ordinal
    writer.make_room((KIND, inline(7)))
    assert writer.file_index == 1
    assert [writer.append(KIND), writer.append(inline(7))] == [before, before + 1]
    assert reader.read()[-1].kind == KIND
    writer.close()
    reader.close()


def test_make_room_holds_records_bigger_than_a_file(spool: Spool) -> None:
    writer, reader = JournalWriter(spool, file_bytes=128), JournalReader(spool)
    big = Trouble("y" * 10_000, 0, 0.0)
    append(writer, big)
    append(writer, close(1))
    assert [piece.record for piece in reader.read()] == [big, close(1)]
    writer.close()
    reader.close()


@pytest.mark.parametrize("damage", [1, 5, 9, 12])
def test_a_torn_record_is_not_there_until_it_is_whole(spool: Spool, damage: int) -> None:
    writer, reader = JournalWriter(spool), JournalReader(spool)
    writer.append(close(0))
    path = spool.path / "journal-000000"
    before = tail_of(path)
    writer.append(close(1))
    whole = path.read_bytes()
    torn = bytearray(whole)
    begin = before + (-before % 8)
    torn[begin + damage : tail_of(path)] = bytes(tail_of(path) - begin - damage)
    with path.open("rb+") as handle:
        handle.write(torn)
    assert [piece.ordinal for piece in reader.read()] == [0]
    with path.open("rb+") as handle:
        handle.write(whole)
    assert [piece.ordinal for piece in reader.read()] == [1]
    writer.close()
    reader.close()


def flip(path: Path, at: int) -> None:
    with path.open("rb+") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("damaged", [(1,), (1, 2)])
def test_damaged_records_are_a_drop_in_their_step(spool: Spool, damaged: tuple[int, ...]) -> None:
    writer, reader = JournalWriter(spool), JournalReader(spool)
    writer.append(KIND)
    begins = []
    for _ in range(3):
        begins.append(writer.written_bytes)
        writer.append(inline(4))
    writer.append(close(4))
    for number in damaged:
        flip(spool.path / "journal-000000", begins[number - 1] + 8 + 2)
    pieces = reader.read()
    assert [piece.ordinal for piece in pieces] == [0, 1, 2, 3, 4]
    for number, piece in enumerate(pieces[1:4], 1):
        if number in damaged:
            assert isinstance(piece.record, Drop)
            assert (piece.record.mode_step, piece.record.step) == (4, 4)
            assert piece.record.reason == f"journal record {number} is damaged"
        else:
            assert piece.record == inline(4)
    assert pieces[4].record == close(4)
    writer.close()
    reader.close()


def test_a_damaged_length_costs_one_record_though_more_files_follow(spool: Spool) -> None:
    writer, reader = JournalWriter(spool, file_bytes=256), JournalReader(spool)
    writer.append(close(0))
    at = writer.written_bytes
    last = writer.append(close(1))
    while writer.file_index == 0:
        last = append(writer, close(1 + last))
    append(writer, close(1 + last))
    flip(spool.path / "journal-000000", at + 3)
    pieces = reader.read()
    assert [piece.ordinal for piece in pieces] == list(range(last + 2))
    assert isinstance(pieces[1].record, Drop)
    assert pieces[1].record.reason == "journal record 1 is damaged"
    assert pieces[1].record.mode_step == 2
    assert [p.record for p in pieces if p.ordinal != 1] == [
        close(step) for step in range(last + 2) if step != 1
    ]
    writer.close()
    reader.close()


@pytest.mark.parametrize("byte", [0, 3, 8 + 2])
def test_behind_a_damaged_last_record_the_next_file_is_read(spool: Spool, byte: int) -> None:
    writer, reader = JournalWriter(spool, file_bytes=256), JournalReader(spool)
    writer.append(close(0))
    at = writer.written_bytes
    writer.append(close(1))
    writer.make_room((close(2),))
    writer.append(close(2))
    flip(spool.path / "journal-000000", at + byte)
    pieces = reader.read()
    assert [piece.ordinal for piece in pieces] == [0, 1, 2]
    assert isinstance(pieces[1].record, Drop)
    assert pieces[1].record.reason == "journal record 1 is damaged"
    assert (pieces[1].record.mode_step, pieces[2].record) == (2, close(2))
    writer.close()
    reader.close()


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("rb+") as handle:
        handle.seek(at)
        handle.write(data)


LENGTHS = [0, 1, 7, 8, 9, 20, 24, 48, 64, 200, 3000, (4 << 20) - 1, 1 << 31, 0xFFFFFFFF]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_damaged_length_in_the_last_file_is_a_drop_and_the_rest_is_read(
    spool: Spool, length: int
) -> None:
    """Also one that happens to lead to the beginning of a later record."""
    writer, reader = JournalWriter(spool), JournalReader(spool)
    writer.append(KIND)
    for _ in range(2):
        writer.append(inline(4))
    at = writer.written_bytes
    for record in (inline(5), inline(5), close(5), close(6)):
        writer.append(record)
    overwrite(spool.path / "journal-000000", at, length.to_bytes(4, "little"))
    pieces = reader.read()
    assert [piece.ordinal for piece in pieces] == list(range(7))
    assert isinstance(pieces[3].record, Drop)
    assert pieces[3].record.reason == "journal record 3 is damaged"
    assert pieces[3].record.step == 5
    rest = [piece.record for piece in (*pieces[1:3], *pieces[4:])]
    assert rest == [inline(4), inline(4), inline(5), close(5), close(6)]
    writer.append(close(7))
    assert [(p.ordinal, p.record) for p in reader.read()] == [(7, close(7))]
    writer.close()
    reader.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_damaged_length_of_the_last_record_is_told_once_another_follows(
    spool: Spool, length: int
) -> None:
    """The step of a record before it counts while none is behind it: the job may wait for room."""
    writer, reader = JournalWriter(spool), JournalReader(spool)
    writer.append(KIND)
    writer.append(inline(4))
    at = writer.written_bytes
    writer.append(inline(4))
    overwrite(spool.path / "journal-000000", at, length.to_bytes(4, "little"))
    assert [piece.ordinal for piece in reader.read()] == [0, 1]
    assert reader.read() == reader.read(ended=True) == []
    writer.append(Flush())
    pieces = reader.read()
    assert [piece.ordinal for piece in pieces] == [2, 3]
    assert isinstance(pieces[0].record, Drop)
    assert (pieces[0].record.step, pieces[1].record) == (4, Flush())
    writer.close()
    reader.close()


def test_several_damaged_records_in_a_row_are_counted_by_the_next_file(spool: Spool) -> None:
    writer, reader = JournalWriter(spool), JournalReader(spool)
    writer.append(close(0))
    begin = writer.written_bytes
    writer.append(close(1))
    writer.append(close(2))
    end = writer.written_bytes
    writer.append(close(3))
    overwrite(spool.path / "journal-000000", begin, b"\xee" * (end - begin))
    first = reader.read()
    assert [piece.ordinal for piece in first] == [0, 1, 2]  # at least one was lost
    assert isinstance(first[1].record, Drop)
    assert first[1].record.reason == "journal records from 1 on are damaged"
    assert first[2].record == close(3)
    writer.make_room((close(4),))
    writer.append(close(4))
    later = reader.read()
    assert [piece.ordinal for piece in later] == [3, 4]
    assert later[1].record == close(4)
    assert isinstance(later[0].record, Drop)
    writer.close()
    reader.close()


def test_records_behind_a_hole_are_read_once_the_writer_has_ended(spool: Spool) -> None:
    """A power cut loses pages of a file on disk; before the end, zeros mean: nothing written yet."""
    writer, reader = JournalWriter(spool), JournalReader(spool)
    writer.append(close(0))
    begin = writer.written_bytes
    writer.append(close(1))
    end = writer.written_bytes
    writer.append(close(2))
    overwrite(spool.path / "journal-000000", begin, bytes(end - begin))
    assert [piece.ordinal for piece in reader.read()] == [0]
    pieces = reader.read(ended=True)
    assert [piece.ordinal for piece in pieces] == [1, 2]
    assert isinstance(pieces[0].record, Drop)
    assert pieces[1].record == close(2)
    assert reader.read(ended=True) == []
    writer.close()
    reader.close()


def test_a_length_beyond_the_file_is_no_record(spool: Spool) -> None:
    writer, reader = JournalWriter(spool, file_bytes=256), JournalReader(spool)
    with (spool.path / "journal-000000").open("rb+") as handle:
        handle.seek(16)
        handle.write(b"\xfe\xff\xff\x7f\x01\x02\x03\x04")
    assert reader.read() == []
    writer.close()
    reader.close()


def test_unreadable_records_keep_their_ordinal(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = JournalWriter(spool), JournalReader(spool)
    writer.append(inline(0, kind=5))
    encode = writer._encode
    monkeypatch.setattr(
        writer, "_encode", lambda _record: msgspec.msgpack.encode({"a": "stranger"})
    )
    writer.append(Flush())
    monkeypatch.setattr(writer, "_encode", encode)
    writer.append(close(0))
    pieces = reader.read()
    assert [piece.ordinal for piece in pieces] == [0, 1, 2]
    told = [piece.record.message for piece in pieces if isinstance(piece.record, Trouble)]
    assert "record 1 is unreadable" in told[0]
    assert isinstance(pieces[0].record, Drop)
    assert "record 0 names an undeclared kind" in pieces[0].record.reason
    assert pieces[2].record == close(0)
    writer.close()
    reader.close()


def test_files_are_dropped_only_when_all_their_records_are_stored(spool: Spool) -> None:
    writer, reader = JournalWriter(spool, file_bytes=200), JournalReader(spool)
    firsts = {0: 0}
    for step in range(40):
        ordinal = append(writer, close(step))
        firsts.setdefault(writer.file_index, ordinal)
    reader.read()
    reader.remove_before(firsts[2] - 1)
    assert min(path.name for path in spool.path.glob("journal-*")) == "journal-000001"
    reader.remove_before(firsts[2])
    assert min(path.name for path in spool.path.glob("journal-*")) == "journal-000002"
    later = JournalReader(spool, firsts[2])
    assert later.read()[0].ordinal == firsts[2]
    for open_one in (writer, reader, later):
        open_one.close()


def test_what_is_left_is_read_when_earlier_files_are_lost(spool: Spool) -> None:
    writer = JournalWriter(spool, file_bytes=200)
    for step in range(20):
        append(writer, close(step))
    (spool.path / "journal-000000").unlink()
    reader = JournalReader(spool)
    ordinals = [piece.ordinal for piece in reader.read()]
    assert ordinals == list(range(ordinals[0], 20))
    writer.close()
    reader.close()


def test_a_next_file_that_is_not_there_is_waited_for(spool: Spool) -> None:
    writer, reader = JournalWriter(spool, file_bytes=200), JournalReader(spool)
    writer.append(close(0))
    writer.make_room((close(1),))
    writer.append(close(1))
    path = spool.path / "journal-000001"
    path.rename(spool.path / "aside")
    assert [piece.ordinal for piece in reader.read()] == [0]
    (spool.path / "aside").rename(path)
    assert [piece.ordinal for piece in reader.read()] == [1]
    writer.close()
    reader.close()


def test_a_file_without_header_is_none_yet(spool: Spool) -> None:
    (spool.path / "journal-000000").write_bytes(bytes(4096))
    assert JournalReader(spool).read() == []
    (spool.path / "journal-000000").write_bytes(b"smd")
    assert JournalReader(spool).read() == []


@pytest.mark.parametrize("start", [0, 2])
def test_a_file_whose_header_was_cut_hides_nothing(spool: Spool, start: int) -> None:
    writer = JournalWriter(spool)
    for step in range(4):
        append(writer, close(step))
    (spool.path / "journal-000001").write_bytes(b"smdjrnl1" + bytes(1000))
    pieces = JournalReader(spool, start).read()
    assert [piece.ordinal for piece in pieces] == list(range(start, 4))


def test_without_room_in_memory_the_file_goes_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = make_spool(tmp_path / "memory", tmp_path / "disk")
    real = os.posix_fallocate
    refusals = [OSError(28, "No space left on device")]

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        if refusals:
            raise refusals.pop()
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    writer, reader = JournalWriter(spool), JournalReader(spool)
    assert (spool.overflow / "journal-000000").exists()
    assert not (spool.path / "journal-000000").exists()
    writer.append(End("", 0.0))
    assert [piece.record for piece in reader.read()] == [End("", 0.0)]
    writer.close()
    reader.close()


def test_without_room_anywhere_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = make_spool(tmp_path, tmp_path / "disk")

    def fallocate(*_arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(SpoolUnavailable, match="SMDIST_SPOOL_DIR"):
        JournalWriter(spool)
    assert list(spool.path.glob("journal-*")) == []


def test_a_part_read_back_has_its_declaration(spool: Spool) -> None:
    writer, reader = JournalWriter(spool), JournalReader(spool)
    writer.append(KIND)
    part = Part(1, 2, 3, 4.0, 0, 1, 64, (1 << 32) - 1)
    writer.append(part)
    piece = reader.read()[1]
    assert (piece.record, piece.kind) == (part, KIND)
    assert isinstance(piece.record, Part)
    assert piece.record.ref.step == 3
    writer.close()
    reader.close()


def put(writer: JournalWriter, memory: bytearray, kind: int, offset: int) -> None:
    """Three bytes from the front of the memory to `offset` in it."""
    base = kernel.address_of(memory)
    writer.append_part(base + offset, base, 3, kind, 1, offset)


def test_a_part_that_was_put_reads_like_one_that_was_appended(spool: Spool) -> None:
    writer, reader, memory = JournalWriter(spool), JournalReader(spool), bytearray(b"abc" * 40)
    where = (1, 1 << 40, (1 << 63) - 1)  # as long as numbers get
    writer.append(KIND)
    writer.set_step(*where)
    memory[3:] = bytes(117)
    put(writer, memory, 0, 48)
    writer.append(close(0))
    assert memory[48:52] == b"abc\0"
    pieces = reader.read()
    assert [piece.ordinal for piece in pieces] == [0, 1, 2]
    part = pieces[1].record
    assert isinstance(part, Part)
    guard = kernel.guard([kernel.address_of(memory)], [3], kernel.address_of(memory))
    assert part == Part(*where, part.time, 0, 1, 48, guard)
    assert pieces[1].kind == KIND
    writer.close()
    reader.close()


def test_parts_that_are_put_leave_room_for_the_way_on(spool: Spool) -> None:
    writer, reader = JournalWriter(spool, file_bytes=1000), JournalReader(spool)
    memory = bytearray(64)
    writer.append(KIND)
    for step in range(100):
        writer.set_step(1, step, step)
        try:
            put(writer, memory, 0, 8)
        except JournalFileFull:
            writer.make_room((KIND,))
            writer.append(KIND)
            put(writer, memory, 0, 8)
    found = [piece.record for piece in reader.read()]
    assert [record.step for record in found if isinstance(record, Part)] == list(range(100))
    assert writer.file_index > 3
    writer.close()
    reader.close()


def test_nothing_is_written_to_a_closed_journal(spool: Spool) -> None:
    writer = JournalWriter(spool)
    writer.close()
    with pytest.raises(JournalFileFull):
        put(writer, bytearray(64), 0, 8)
    with pytest.raises(SpoolUnavailable, match="closed"):
        append(writer, close(0))
    assert len(list(spool.path.glob("journal-*"))) == 1
