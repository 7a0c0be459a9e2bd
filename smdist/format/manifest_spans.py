"""Which manifests of a rank share one object while it runs, and in which objects to look for them.

Every 16th manifest is followed by a span: those of the last 16, of the last 256, or of the last 4096,
whichever is the most that ends there. So each length tiles a session from its beginning, what a
reader lacks is covered by few of them, and nobody needs a listing to know their names. Any of them
may be missing; its parts say the same, and at last the manifests. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from smdist.format.intervals import to_intervals

__all__ = ["SPAN_LENGTHS", "ManifestSpan", "covering_spans", "spans_ending_at"]

_FAN_OUT = 16
SPAN_LENGTHS = (_FAN_OUT**3, _FAN_OUT**2, _FAN_OUT)


class ManifestSpan(NamedTuple):
    """The manifests `[first, upto)` of a session; of one alone, the manifest itself."""

    first: int
    upto: int

    @property
    def length(self) -> int:
        return self.upto - self.first

    def children(self) -> list[ManifestSpan]:
        """Where to look if it is missing."""
        step = self.length // _FAN_OUT
        return [ManifestSpan(first, first + step) for first in range(self.first, self.upto, step)]


def spans_ending_at(count: int) -> list[ManifestSpan]:
    """Of these, the first that can be written is, once there are `count` manifests."""
    return [
        ManifestSpan(count - length, count)
        for length in SPAN_LENGTHS
        if count and count % length == 0
    ]


def covering_spans(seqs: Iterable[int]) -> list[ManifestSpan]:
    """Exactly these manifests, in order, with as few spans as there may be."""
    return [span for first, upto in to_intervals(seqs) for span in _tiles(first, upto)]


def _tiles(first: int, upto: int) -> Iterable[ManifestSpan]:
    while first < upto:
        fitting = (n for n in SPAN_LENGTHS if first % n == 0 and first + n <= upto)
        length = next(fitting, 1)
        yield ManifestSpan(first, first + length)
        first += length
