"""What a run may hold to be read at all: sizes of its objects, and ranges of its numbers.

A run may have been written by anybody. Numbers in it become loops, arrays and offsets, so each has a
type here that says what it may be; an object with any other is refused when it is decoded, by name.
The limits are far beyond what smdist writes. `docs/limits.md` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Final

from smdist.checking import Between, Matches

__all__ = [
    "MAX_ABSENT_RANKS",
    "MAX_CELLS",
    "MAX_COLUMNS",
    "MAX_NUMBER",
    "MAX_OBJECT_BYTES",
    "MAX_RANKS",
    "MAX_STATISTICS_BYTES",
    "MAX_STEPS",
    "MAX_TENSOR_BYTES",
    "MAX_TIME",
    "MAX_UNCOMMITTED_SEGMENTS",
    "Bytes",
    "Digest",
    "IncludeWorkers",
    "MergedKey",
    "Mode",
    "Number",
    "OptionalNumber",
    "Rank",
    "Seconds",
    "SegmentKey",
    "Stride",
    "Time",
    "Worker",
    "WorldSize",
    "check_progression",
    "check_total",
    "max_object_bytes",
]

MAX_RANKS: Final = 1 << 17
MAX_ABSENT_RANKS: Final = 1 << 20  # ranks of all attempts that are said to be, and left no trace
MAX_STEPS: Final = 1 << 21  # in a merged snapshot; a longer run is read from its manifests
MAX_CELLS: Final = 1 << 23  # steps times ranks in one chunk of a snapshot
MAX_NUMBER: Final = (1 << 62) - 1  # of a step, a record, a byte: the sum of two fits into 64 bits
MAX_TIME: Final = 253402300799  # the end of the year 9999
MAX_UNCOMMITTED_SEGMENTS: Final = 4  # of a rank: segments that are stored before their manifests
MAX_TENSOR_BYTES: Final = 32 << 30
MAX_STATISTICS_BYTES: Final = 256 << 20  # of one block
MAX_COLUMNS: Final = 1024  # of statistics

_MIB = 1 << 20
# Of objects that are read whole, by the first part of their key. Segments are read by ranges.
MAX_OBJECT_BYTES: Final[dict[str, int]] = {
    "run.json": 1 * _MIB,
    "heartbeats": 1 * _MIB,
    "sessions": 16 * _MIB,
    "thinned": 16 * _MIB,
    "collections": 64 * _MIB,
    "spans": 64 * _MIB,
    "summaries": 64 * _MIB,
    "layouts": 256 * _MIB,
    "manifests": 256 * _MIB,
    "merged": 256 * _MIB,
}
_MOST_OF_OTHERS = 1024 * _MIB

_PART = r"[^./\x00][^/\x00]*"  # as `smdist.storage.store.check_key` wants it

Number = Annotated[int, Between(0, MAX_NUMBER)]
OptionalNumber = Annotated[int, Between(-1, MAX_NUMBER)]
"""-1 stands for "there is none"."""
Bytes = Number
Stride = Annotated[int, Between(-MAX_NUMBER, MAX_NUMBER)]
Rank = Annotated[int, Between(0, MAX_RANKS - 1)]
WorldSize = Annotated[int, Between(0, MAX_RANKS)]
Mode = Annotated[int, Between(1, 4)]
Time = Annotated[float, Between(0, MAX_TIME)]
"""Seconds since 1970."""
Seconds = Annotated[float, Between(0, 1e9)]
IncludeWorkers = Annotated[str, Matches(re.compile("one|all"), "choice of workers", 3)]
Worker = Annotated[str, Matches(re.compile("worker_[0-9]{1,6}"), "name of a worker", 13)]
Digest = Annotated[str, Matches(re.compile("[0-9A-Za-z_-]*"), "digest", 64)]
MergedKey = Annotated[str, Matches(re.compile(rf"merged/[a-z]+/{_PART}"), "key of a snapshot", 300)]
SegmentKey = Annotated[str, Matches(re.compile(rf"\.|({_PART}(/{_PART})*)?"), "key", 1024)]
"""A key below the run's root; ".": the manifest itself; or nothing."""


def max_object_bytes(key: str) -> int:
    """Bytes that the object `key` may have to be read whole, also in a run below a store's root."""
    parts = key.split("/")
    return next(
        (MAX_OBJECT_BYTES[part] for part in parts if part in MAX_OBJECT_BYTES), _MOST_OF_OTHERS
    )


def check_progression(first: int, stride: int, count: int) -> None:
    """ValueError when one of `count` numbers that grow by `stride` is none that is read."""
    last = first + (count - 1) * stride
    if count < 1 or not 0 <= last <= MAX_NUMBER:
        raise ValueError(
            f"{count} numbers from {first} on by {stride}: up to {MAX_NUMBER} are read"
        )


def check_total(what: str, numbers: Iterable[int], most: int) -> None:
    """ValueError when they are more than `most` together."""
    total = sum(numbers)
    if total > most:
        raise ValueError(f"{total} {what}, more than the {most} that are read")
