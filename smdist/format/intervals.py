"""Sets of small whole numbers as sorted, disjoint ranges `[start, stop)`.

Ranks of a step and numbers of manifests are nearly always runs, so a set of thousands is one pair.
Numbers come from runs that somebody else may have written: a pair says little of how many it holds,
so sets are joined and subtracted as ranges, and `Members` lists one when it is asked to.
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
"""As they are decoded, to be checked by `check_spans`."""
RankIntervals = tuple[tuple[Rank, WorldSize], ...]
"""Likewise, of ranks."""


def check_intervals(spans: Intervals) -> None:
    """ValueError when they are not sorted, disjoint ranges of at least one number."""
    last = -1
    for start, stop in spans:
        if start <= last or stop <= start:
            raise ValueError(f"[{start}, {stop}) is no range behind {last}")
        last = stop


def to_intervals(numbers: Iterable[int]) -> Intervals:
    return merge_intervals((number, number + 1) for number in numbers)


def count_members(spans: Intervals) -> int:
    return sum(stop - start for start, stop in spans)


class Members(Sequence[int]):
    """The numbers of a set, in order. Equal to any sequence of the same numbers."""

    __slots__ = ("intervals",)

    def __init__(self, spans: Intervals = ()) -> None:
        self.intervals = spans

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(start, stop) for start, stop in self.intervals)

    def __len__(self) -> int:
        return count_members(self.intervals)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        place = bisect_right(self.intervals, (number, float("inf"))) - 1
        return place >= 0 and number < self.intervals[place][1]

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...

    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Members):
            return self.intervals == other.intervals
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.intervals)

    def __repr__(self) -> str:
        return f"Members({self.intervals})"


def subtract(spans: Intervals, others: Intervals) -> Intervals:
    """What is in `spans` and not in `others`."""
    found: list[tuple[int, int]] = []
    place = 0
    for start, stop in spans:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at, next_one = start, place
        while next_one < len(others) and others[next_one][0] < stop:
            if at < others[next_one][0]:
                found.append((at, others[next_one][0]))
            at = max(at, others[next_one][1])
            next_one += 1
        if at < stop:
            found.append((at, stop))
    return tuple(found)


def merge_intervals(spans: Iterable[tuple[int, int]]) -> Intervals:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def find_gaps(spans: Intervals) -> Intervals:
    """What lies between 0 and the last of them, and is in none."""
    starts = [0, *(stop for _, stop in spans)]
    gaps = zip(starts, (start for start, _ in spans), strict=False)
    return tuple((begin, end) for begin, end in gaps if begin < end)


def add_member(spans: Intervals, number: int) -> Intervals:
    return add_interval(spans, number, number + 1)


def add_interval(spans: Intervals, begin: int, end: int) -> Intervals:
    if begin >= end:
        return spans
    if not spans:
        return ((begin, end),)
    start, stop = spans[-1]
    if begin == stop:
        return (*spans[:-1], (start, end))
    if start <= begin and end <= stop:
        return spans
    return merge_intervals((*spans, (begin, end)))
