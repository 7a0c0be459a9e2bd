"""Limits for what is read from a run: sizes of objects, and ranges of numbers.

A run may come from an untrusted writer, and its numbers become loops, arrays and offsets. So every
number has a type here with its permitted range, and decoding rejects objects outside of it. The limits
are far beyond what smdist writes. `docs/limits.md` lists them.
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
MAX_ABSENT_RANKS: Final = 1 << 20  # expected ranks of all attempts that stored nothing
MAX_STEPS: Final = 1 << 20  # in a merged snapshot; longer runs are read from their manifests
MAX_CELLS: Final = 1 << 23  # steps times ranks in one chunk of a snapshot
MAX_NUMBER: Final = (1 << 62) - 1  # steps, records, bytes: the sum of two fits into 64 bits
MAX_TIME: Final = 253402300799  # the end of the year 9999
MAX_UNCOMMITTED_SEGMENTS: Final = 4  # of a rank: segments that are stored before their manifests
MAX_TENSOR_BYTES: Final = 32 << 30
MAX_STATISTICS_BYTES: Final = 256 << 20  # of one block
MAX_COLUMNS: Final = 1024  # of statistics

_MIB = 1 << 20
# Sizes of objects that are read as a whole, by the first part of their key. Segments are not.
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
_MAX_OTHER_BYTES = 1024 * _MIB

_PART = r"[^./\x00][^/\x00]*"  # as `smdist.storage.store.check_key` requires

Number = Annotated[int, Between(0, MAX_NUMBER)]
OptionalNumber = Annotated[int, Between(-1, MAX_NUMBER)]
"""-1 means none."""
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
"""A key below the run's root; "." for the manifest itself; or empty."""


def max_object_bytes(key: str) -> int:
    """Return the largest size at which the object `key` is read as a whole.

    The key may begin with a path of the run below the store's root.
    """
    parts = key.split("/")
    return next(
        (MAX_OBJECT_BYTES[part] for part in parts if part in MAX_OBJECT_BYTES), _MAX_OTHER_BYTES
    )


def check_progression(first: int, stride: int, count: int) -> None:
    """Raise ValueError unless `count` numbers that grow by `stride` are all within the limits."""
    last = first + (count - 1) * stride
    if count < 1 or not 0 <= last <= MAX_NUMBER:
        raise ValueError(f"{count} numbers from {first} in steps of {stride} exceed {MAX_NUMBER}")


def check_total(what: str, numbers: Iterable[int], maximum: int) -> None:
    """Raise ValueError if the sum of the numbers is greater than `maximum`."""
    total = sum(numbers)
    if total > maximum:
        raise ValueError(f"{total} {what} exceed the limit of {maximum}")
