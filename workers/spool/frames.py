"""Find the frames of a journal file, also behind damage. Pure: looks at mapped memory only.

Frames begin at multiples of 8, so the next whole one can be found without the lengths before it.
"""

from __future__ import annotations

import mmap
import re
import struct

import google_crc32c

__all__ = ["CONTINUED", "FRAME", "holds_one_record", "is_whole", "next_whole", "padded"]

FRAME = struct.Struct("<II")  # length and CRC32C of the payload
CONTINUED = 0xFFFFFFFF  # in place of a length, with checksum 0: continue in the next file
_ALIGNMENT = 8
_WRITTEN = re.compile(rb"[^\0]")


def padded(length: int) -> int:
    """Return the bytes that a frame with a payload of `length` takes."""
    return FRAME.size + length + (-length % _ALIGNMENT)


def is_whole(data: mmap.mmap, at: int) -> bool:
    """Check whether there is a frame at `at` whose checksum matches."""
    if at + FRAME.size > len(data):
        return False
    length, checksum = FRAME.unpack_from(data, at)
    end = at + FRAME.size + length
    if length == 0 or end > len(data):
        return False
    return bool(google_crc32c.value(data[end - length : end]) == checksum)


def next_whole(data: mmap.mmap, at: int) -> int | None:
    """Return where the first whole frame from `at` on begins, None without one."""
    while found := _WRITTEN.search(data, at):
        at = found.start() // _ALIGNMENT * _ALIGNMENT
        if is_whole(data, at):
            return at
        at += _ALIGNMENT
    return None


def holds_one_record(data: mmap.mmap, at: int, end: int) -> bool:
    """Check whether `[at, end)` is one frame of which the length alone is damaged."""
    _, checksum = FRAME.unpack_from(data, at)
    payload = data[at + FRAME.size : end]
    lengths = range(max(len(payload) - _ALIGNMENT + 1, 1), len(payload) + 1)
    return any(google_crc32c.value(payload[:length]) == checksum for length in lengths)
