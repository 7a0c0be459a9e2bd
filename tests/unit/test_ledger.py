from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from smdist.workers.spool.ack_page import Ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def test_one_writes_the_other_reads(path: Path) -> None:
    writer, reader = Ledger(path), Ledger(path)
    assert (reader.acked, reader.bytes_stored, reader.steps_stored, reader.trouble) == (0, 0, 0, "")
    writer.acked = 1 << 40
    writer.add_stored(1000, 2)
    writer.add_stored(500, 1)
    writer.uploader_pid = 4711
    assert (reader.acked, reader.bytes_stored, reader.steps_stored) == (1 << 40, 1500, 3)
    assert reader.uploader_pid == 4711
    writer.close()
    assert reader.acked == 1 << 40
    reader.close()


def test_it_outlives_its_file_for_who_has_it_open(path: Path) -> None:
    writer, reader = Ledger(path), Ledger(path)
    path.unlink()
    writer.acked = 9
    assert reader.acked == 9
    writer.close()
    reader.close()


def test_a_later_uploader_finds_what_the_first_one_wrote(path: Path) -> None:
    first = Ledger(path)
    first.acked = 5
    first.close()
    second = Ledger(path)
    assert second.acked == 5
    second.close()
    second.close()


@pytest.mark.parametrize("text", ["disk full", "", "ünïcode: 磁盘已满", "x" * 3072])
def test_trouble_is_told_and_taken_back(path: Path, text: str) -> None:
    ledger = Ledger(path)
    ledger.trouble = "something long that must not shine through"
    ledger.trouble = text
    assert ledger.trouble == text
    ledger.trouble = ""
    assert ledger.trouble == ""
    ledger.close()


def test_trouble_that_is_too_long_is_cut_and_harms_no_number(path: Path) -> None:
    ledger = Ledger(path)
    ledger.acked = 7
    ledger.trouble = "ü" * 5000
    assert ledger.trouble.startswith("ü" * 1500)
    assert ledger.acked == 7
    ledger.close()


def count(path: Path, upto: int) -> None:
    ledger = Ledger(path)
    for value in range(upto + 1):
        ledger.acked = value << 32 | value
    ledger.close()


def test_a_number_is_never_seen_half_written(path: Path) -> None:
    """Both halves of the word say the same, whenever it is read."""
    reader, last = Ledger(path), 200_000
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=count, args=(path, last))
    process.start()
    seen = 0
    while seen != last:
        value = reader.acked
        assert value >> 32 == value & 0xFFFFFFFF
        assert value & 0xFFFFFFFF >= seen
        seen = value & 0xFFFFFFFF
        assert seen == last or process.is_alive() or reader.acked & 0xFFFFFFFF == last
    process.join()
    process.close()
    reader.close()
