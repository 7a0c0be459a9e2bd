"""Sets of integers as sorted, disjoint intervals `[start, stop)`.

Ranks of a step and numbers of manifests are nearly always consecutive, so a set of thousands is one
pair. Stored intervals may come from a foreign run, and a pair may stand for billions of numbers.
Therefore sets are merged and subtracted as intervals, and only `Members` lists the numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import overload

from smdist.limits import Number, Rank, WorldSize

__all__ = [
    "Intervals",
    "Members",
    "RankIntervals",
    "StoredIntervals",
    "add_interval",
    "add_member",
    "check_intervals",
    "count_members",
    "find_gaps",
    "merge_intervals",
    "subtract",
    "to_intervals",
]

Intervals = tuple[tuple[int, int], ...]
StoredIntervals = tuple[tuple[Number, Number], ...]
"""As decoded from a stored object, before `check_intervals`."""
RankIntervals = tuple[tuple[Rank, WorldSize], ...]
"""The same for ranks."""


def check_intervals(intervals: Intervals) -> None:
    """Raise ValueError unless the intervals are sorted, disjoint and not empty."""
    last = -1
    for start, stop in intervals:
        if start <= last or stop <= start:
            raise ValueError(f"[{start}, {stop}) is not an interval after {last}")
        last = stop


def to_intervals(numbers: Iterable[int]) -> Intervals:
    return merge_intervals((number, number + 1) for number in numbers)


def count_members(intervals: Intervals) -> int:
    return sum(stop - start for start, stop in intervals)


class Members(Sequence[int]):
    """The numbers of a set in ascending order. Equal to any sequence of the same numbers."""

    __slots__ = ("intervals",)

    def __init__(self, intervals: Intervals = ()) -> None:
        self.intervals = intervals

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(start, stop) for start, stop in self.intervals)

    def __len__(self) -> int:
        return count_members(self.intervals)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        index = bisect_right(self.intervals, (number, float("inf"))) - 1
        return index >= 0 and number < self.intervals[index][1]

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Members):
            return self.intervals == other.intervals
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.intervals)

    def __repr__(self) -> str:
        return f"Members({self.intervals})"


def subtract(intervals: Intervals, others: Intervals) -> Intervals:
    """Return the numbers of `intervals` that are not in `others`."""
    found: list[tuple[int, int]] = []
    first = 0
    for start, stop in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at, index = start, first
        while index < len(others) and others[index][0] < stop:
            if at < others[index][0]:
                found.append((at, others[index][0]))
            at = max(at, others[index][1])
            index += 1
        if at < stop:
            found.append((at, stop))
    return tuple(found)


def merge_intervals(intervals: Iterable[tuple[int, int]]) -> Intervals:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def find_gaps(intervals: Intervals) -> Intervals:
    """Return the numbers from 0 to the last interval that are in none of them."""
    starts = [0, *(stop for _, stop in intervals)]
    gaps = zip(starts, (start for start, _ in intervals), strict=False)
    return tuple((begin, end) for begin, end in gaps if begin < end)


def add_member(intervals: Intervals, number: int) -> Intervals:
    return add_interval(intervals, number, number + 1)


def add_interval(intervals: Intervals, begin: int, end: int) -> Intervals:
    if begin >= end:
        return intervals
    if not intervals:
        return ((begin, end),)
    start, stop = intervals[-1]
    if begin == stop:
        return (*intervals[:-1], (start, end))
    if start <= begin and end <= stop:
        return intervals
    return merge_intervals((*intervals, (begin, end)))
