from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smdist.workers.capture.freelist import FreeList

SIZE = 1000


def fresh() -> FreeList:
    free = FreeList()
    free.give(0, SIZE)
    return free


def test_lowest_range_comes_first() -> None:
    free = fresh()
    first, second = free.take(100), free.take(100)
    free.take(100)
    assert (first, second) == (0, 100)
    free.give(first, 100)
    assert free.take(50) == 0


def test_a_range_that_is_too_small_is_passed_over() -> None:
    free = fresh()
    offsets = [free.take(100) for _ in range(10)]
    free.give(offsets[0], 100)
    free.give(offsets[5], 100)
    free.give(offsets[6], 100)
    assert free.take(150) == 500
    assert free.take(150) == -1


def test_tail_is_the_free_range_at_the_end() -> None:
    free = fresh()
    assert free.tail(SIZE) == SIZE
    free.take(SIZE - 10)
    assert free.tail(SIZE) == 10
    free.take(10)
    assert free.tail(SIZE) == 0


@given(st.lists(st.one_of(st.integers(1, 300), st.integers(-8, -1)), max_size=80))
def test_ranges_never_overlap_and_nothing_leaks(moves: list[int]) -> None:
    """A positive move takes so many bytes, a negative one gives back a range held."""
    free = fresh()
    held: list[tuple[int, int]] = []
    for move in moves:
        if move > 0:
            offset = free.take(move)
            if offset >= 0:
                assert offset + move <= SIZE
                assert all(offset + move <= o or o + n <= offset for o, n in held)
                held.append((offset, move))
        elif held:
            free.give(*held.pop(move % len(held)))
        assert free.free_bytes == SIZE - sum(n for _, n in held)
    for offset, nbytes in held:
        free.give(offset, nbytes)
    assert free.take(SIZE) == 0


def test_some_of_the_first_range_that_has_enough() -> None:
    free = FreeList()
    free.give(0, 64)
    free.give(128, 256)
    free.give(1024, 4096)
    assert free.take_some(128, 1024) == (128, 256)
    assert free.take_some(128, 1024) == (1024, 1024)
    assert free.take_some(64, 1024) == (0, 64)
    assert free.take_some(4096, 8192) == (-1, 0)
    assert free.free_bytes == 3072
