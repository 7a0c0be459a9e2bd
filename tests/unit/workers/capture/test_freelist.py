from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smdist.workers.capture.arena import FreeList

SIZE = 1000


def fresh() -> FreeList:
    free = FreeList()
    free.free(0, SIZE)
    return free


def test_lowest_range_comes_first() -> None:
    free = fresh()
    first, second = free.allocate(100), free.allocate(100)
    free.allocate(100)
    assert (first, second) == (0, 100)
    free.free(first, 100)
    assert free.allocate(50) == 0


def test_a_range_that_is_too_small_is_passed_over() -> None:
    free = fresh()
    offsets = [free.allocate(100) for _ in range(10)]
    free.free(offsets[0], 100)
    free.free(offsets[5], 100)
    free.free(offsets[6], 100)
    assert free.allocate(150) == 500
    assert free.allocate(150) == -1


def test_tail_is_the_free_range_at_the_end() -> None:
    free = fresh()
    assert free.tail(SIZE) == SIZE
    free.allocate(SIZE - 10)
    assert free.tail(SIZE) == 10
    free.allocate(10)
    assert free.tail(SIZE) == 0


@given(st.lists(st.one_of(st.integers(1, 300), st.integers(-8, -1)), max_size=80))
def test_ranges_never_overlap_and_nothing_leaks(moves: list[int]) -> None:
    """A positive move takes so many bytes, a negative one gives back a range held."""
    free = fresh()
    held: list[tuple[int, int]] = []
    for move in moves:
        if move > 0:
            offset = free.allocate(move)
            if offset >= 0:
                assert offset + move <= SIZE
                assert all(offset + move <= o or o + n <= offset for o, n in held)
                held.append((offset, move))
        elif held:
            free.free(*held.pop(move % len(held)))
        assert free.free_bytes == SIZE - sum(n for _, n in held)
    for offset, nbytes in held:
        free.free(offset, nbytes)
    assert free.allocate(SIZE) == 0


def test_some_of_the_first_range_that_has_enough() -> None:
    free = FreeList()
    free.free(0, 64)
    free.free(128, 256)
    free.free(1024, 4096)
    assert free.allocate_some(128, 1024) == (128, 256)
    assert free.allocate_some(128, 1024) == (1024, 1024)
    assert free.allocate_some(64, 1024) == (0, 64)
    assert free.allocate_some(4096, 8192) == (-1, 0)
    assert free.free_bytes == 3072
