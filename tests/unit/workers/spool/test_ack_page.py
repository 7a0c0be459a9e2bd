from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from smdist.workers.spool.ack_page import AckPage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ack_page"


def test_a_reader_sees_what_the_writer_writes(path: Path) -> None:
    writer, reader = AckPage(path), AckPage(path)
    assert (reader.acked, reader.bytes_stored, reader.steps_stored, reader.last_error) == (
        0,
        0,
        0,
        "",
    )
    writer.acked = 1 << 40
    writer.add_stored(1000, 2)
    writer.add_stored(500, 1)
    writer.uploader_pid = 4711
    assert (reader.acked, reader.bytes_stored, reader.steps_stored) == (1 << 40, 1500, 3)
    assert reader.uploader_pid == 4711
    writer.close()
    assert reader.acked == 1 << 40
    reader.close()


def test_an_open_page_outlives_its_file(path: Path) -> None:
    writer, reader = AckPage(path), AckPage(path)
    path.unlink()
    writer.acked = 9
    assert reader.acked == 9
    writer.close()
    reader.close()


def test_a_later_uploader_finds_what_the_first_one_wrote(path: Path) -> None:
    first = AckPage(path)
    first.acked = 5
    first.close()
    second = AckPage(path)
    assert second.acked == 5
    second.close()
    second.close()


@pytest.mark.parametrize("text", ["disk full", "", "ünïcode: 磁盘已满", "x" * 3072])
def test_the_last_error_is_shown_and_cleared(path: Path, text: str) -> None:
    ack_page = AckPage(path)
    ack_page.last_error = "something long that must not shine through"
    ack_page.last_error = text
    assert ack_page.last_error == text
    ack_page.last_error = ""
    assert ack_page.last_error == ""
    ack_page.close()


def test_a_long_error_is_cut_and_changes_no_number(path: Path) -> None:
    ack_page = AckPage(path)
    ack_page.acked = 7
    ack_page.last_error = "ü" * 5000
    assert ack_page.last_error.startswith("ü" * 1500)
    assert ack_page.acked == 7
    ack_page.close()


def count(path: Path, upto: int) -> None:
    ack_page = AckPage(path)
    for value in range(upto + 1):
        ack_page.acked = value << 32 | value
    ack_page.close()


def test_a_number_is_never_seen_half_written(path: Path) -> None:
    """Both halves of the word say the same, whenever it is read."""
    reader, last = AckPage(path), 200_000
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
