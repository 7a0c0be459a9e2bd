"""Which manifests of a session travel together in one object, a *span*. Pure.

While a rank runs, its uploader writes a span after every 16th manifest: the longest of 16, 256 or 4096
manifests that ends there. So spans of each length tile a session from its beginning, few of them cover
what a reader lacks, and their names are known without a listing. Spans are optional: where one is
missing, a reader falls back to its children and at last to the manifests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from smdist.format.intervals import to_intervals

__all__ = ["SPAN_LENGTHS", "ManifestSpan", "covering_spans", "spans_ending_at"]

_FAN_OUT = 16
SPAN_LENGTHS = (_FAN_OUT**3, _FAN_OUT**2, _FAN_OUT)


class ManifestSpan(NamedTuple):
    """The manifests `[first, upto)` of a session. A span of one is the manifest itself."""

    first: int
    upto: int

    @property
    def length(self) -> int:
        return self.upto - self.first

    def children(self) -> list[ManifestSpan]:
        """Return the shorter spans, or the manifests, to read when this span is missing."""
        step = self.length // _FAN_OUT
        return [ManifestSpan(first, first + step) for first in range(self.first, self.upto, step)]


def spans_ending_at(count: int) -> list[ManifestSpan]:
    """Return the spans that end with manifest `count - 1`, longest first; write the first possible."""
    return [
        ManifestSpan(count - length, count)
        for length in SPAN_LENGTHS
        if count and count % length == 0
    ]


def covering_spans(seqs: Iterable[int]) -> list[ManifestSpan]:
    """Return the fewest spans that hold exactly these manifests, in order."""
    return [span for first, upto in to_intervals(seqs) for span in _tiles(first, upto)]


def _tiles(first: int, upto: int) -> Iterable[ManifestSpan]:
    while first < upto:
        fitting = (n for n in SPAN_LENGTHS if first % n == 0 and first + n <= upto)
        length = next(fitting, 1)
        yield ManifestSpan(first, first + length)
        first += length
