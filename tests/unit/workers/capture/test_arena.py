from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest

from smdist.workers.capture.arena import GROWTH, Arena


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path / "arena-0", 4 * GROWTH)


def test_what_is_written_at_the_address_is_in_the_file(arena: Arena, tmp_path: Path) -> None:
    offset = arena.allocate(5)
    ctypes.memmove(arena.address + offset, b"hello", 5)
    assert (tmp_path / "arena-0").read_bytes()[offset : offset + 5] == b"hello"
    assert bytes(arena.view[offset : offset + 5]) == b"hello"


def test_memory_is_reserved_only_as_needed(arena: Arena) -> None:
    assert arena.reserved == 0
    arena.allocate(100)
    assert arena.reserved == GROWTH


def test_a_freed_range_is_used_again_before_the_file_grows(arena: Arena) -> None:
    first = arena.allocate(GROWTH)
    arena.free(first, GROWTH)
    assert arena.allocate(GROWTH) == first
    assert arena.reserved == GROWTH


def test_the_limit_holds(arena: Arena) -> None:
    assert arena.allocate(4 * GROWTH + 1) == -1
    offsets = [arena.allocate(GROWTH) for _ in range(4)]
    assert sorted(offsets) == [i * GROWTH for i in range(4)]
    assert arena.allocate(64) == -1
    assert arena.used == 4 * GROWTH


def test_the_whole_limit_can_be_taken_at_once_after_a_smaller_piece(arena: Arena) -> None:
    small = arena.allocate(64)
    arena.free(small, 64)
    assert arena.allocate(4 * GROWTH) == 0


def test_warm_room_is_spare_and_within_the_limit(arena: Arena) -> None:
    arena.prefault(GROWTH)
    assert arena.spare == GROWTH
    arena.prefault(100 * GROWTH)
    assert arena.reserved <= arena.capacity


def test_a_full_file_system_is_an_error_and_not_a_signal(small_disk: Path) -> None:
    arena = Arena(small_disk / "arena-0", 64 << 20)
    with pytest.raises(OSError, match="No space") as caught:
        arena.allocate(32 << 20)
    assert caught.value.errno == errno.ENOSPC
    offset = arena.allocate(1 << 20)
    ctypes.memset(arena.address + offset, 7, 1 << 20)
    arena.close()
