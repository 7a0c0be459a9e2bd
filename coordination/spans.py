"""Sets of small whole numbers as sorted, disjoint ranges `[start, stop)`.

Ranks of a step and numbers of manifests are nearly always runs, so a set of thousands is one pair.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

__all__ = ["Spans", "joined", "members", "spans_of", "with_member"]

Spans = tuple[tuple[int, int], ...]


def spans_of(numbers: Iterable[int]) -> Spans:
    return joined((number, number + 1) for number in numbers)


@lru_cache(maxsize=4096)  # equal sets share one tuple: a run of steps has the same ranks
def members(spans: Spans) -> tuple[int, ...]:
    return tuple(number for start, stop in spans for number in range(start, stop))


def joined(spans: Iterable[tuple[int, int]]) -> Spans:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def with_member(spans: Spans, number: int) -> Spans:
    if not spans:
        return ((number, number + 1),)
    start, stop = spans[-1]
    if number == stop:
        return (*spans[:-1], (start, number + 1))
    if start <= number < stop:
        return spans
    return joined((*spans, (number, number + 1)))
