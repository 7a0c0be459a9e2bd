"""The journal of a rank: records appended by the training process, read by its uploader.

Files of fixed size, `journal-000000`, `journal-000001`, ..., reserved before use so that a full
file system is met at rotation and never by a record:

    b"smdjrnl1"  u64 ordinal of the first record
    frame*       u32 length, u32 CRC32C of the payload, payload (msgpack), to a multiple of 8
    zeros

A frame counts when its checksum fits: a reader that comes too early, or after a SIGKILL in the middle of
a write, sees no record there. A length of 0xFFFFFFFF says that the next file goes on. Numbers of `Declare`
hold within one file, so every file can be read without those before it.

The frame of a `Part` is written in two places: here, and by `kernel.record` (C, or numpy) on the fast
path of gradients. `test_compiled_and_python_frames_are_equal` in tests/unit/smdist/kernel holds them
equal: a change of the format needs both.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import msgspec

from smdist import kernel
from smdist.errors import NotPrivate, SpoolUnavailable
from smdist.format.journal_records import Declare, Inline, Part, Piece, Record, Trouble
from smdist.workers.spool.spool import Spool, no_room

__all__ = ["JournalFileFull", "JournalReader", "JournalWriter"]

FILE_BYTES = 4 << 20
_MAGIC = b"smdjrnl1"
_HEADER = struct.Struct("<8sQ")
_FRAME = struct.Struct("<II")
_CONTINUED = 0xFFFFFFFF
_REST = len(msgspec.msgpack.encode((0.0, 0, 0, 0, 0))) - 1  # of a part: its time and what follows
_MOST_PART = 72  # bytes of its frame
_NAME = re.compile(r"journal-(\d{6,})")


def _file_name(index: int) -> str:
    return f"journal-{index:06d}"


def _padded(length: int) -> int:
    return _FRAME.size + length + (-length % 8)


class JournalFileFull(Exception):
    """The owner calls `make_room`, declares again what it needs, and appends once more."""


class _File(NamedTuple):
    """A journal file that is written: mapped at `address`, to be used up to `stop`."""

    number: int
    first: int  # ordinal of its first record
    map: mmap.mmap
    address: int
    before: int  # bytes of the files before it

    @property
    def start(self) -> int:
        return self.address + _HEADER.size

    @property
    def stop(self) -> int:
        return self.address + len(self.map) - _FRAME.size  # there is always room for the way on


class JournalWriter:
    """The training process's end. Not thread-safe: its owner serialises `append`.

    What the files hold is the truth, as a reader may have seen it. An exception that comes between a
    frame and the cursor behind it, or in the middle of a rotation, is made good by `settle`, which
    goes by the files: their owner calls it before anything else.
    """

    def __init__(self, spool: Spool, file_bytes: int = FILE_BYTES) -> None:
        self._spool = spool
        self._file_bytes = file_bytes
        self._encode: Callable[[Record], bytes] = msgspec.msgpack.Encoder().encode
        self._file: _File | None = None
        self._closed = False
        self._end = 0  # how far the file may be used
        # Address of the next frame, and its ordinal: where the kernel can move them on, too.
        self._cursor = array("Q", [0, 0])
        self._cursor_address = self._cursor.buffer_info()[0]
        self._sure: tuple[_File | None, int, int] = (None, 0, 0)  # where it once stood, in its file
        self._opening = b""
        self._rotate(0)

    @property
    def file_index(self) -> int:
        """Index of the current file."""
        return -1 if self._file is None else self._file.number

    @property
    def next_ordinal(self) -> int:
        return self._cursor[1]

    def append(self, record: Record) -> int:
        """Its ordinal. The record is safe from this process's death when this returns.

        Raises JournalFileFull when it has no room, or may not grow that far.
        """
        payload = self._encode(record)
        need, (at, ordinal) = _padded(len(payload)), self._cursor
        if at + need > self._end:
            raise JournalFileFull
        assert self._file is not None
        head = _FRAME.pack(len(payload), google_crc32c.value(payload))
        self._write(self._file.map, at - self._file.address, head + payload)
        self._cursor[0], self._cursor[1] = at + need, ordinal + 1
        return ordinal

    def set_step(self, mode: int, mode_step: int, step: int) -> None:
        """The step of the parts that `put` will record."""
        self._opening = self._encode(Part(mode, mode_step, step, 0.0, 0, 0, 0, 0))[:-_REST]
        self._sure = (self._file, self._cursor[0], self._cursor[1])

    def append_part(
        self, target: int, source: int, nbytes: int, kind: int, arena: int, offset: int
    ) -> None:
        """Copy a part into the arena, and append the record of it; as little as that can take."""
        if self._cursor[0] + _MOST_PART > self._end:
            raise JournalFileFull
        place, opening = self._cursor_address, self._opening
        kernel.record(target, source, nbytes, place, opening, time.time(), kind, arena, offset)

    def _write(self, file: mmap.mmap, at: int, data: bytes) -> None:
        file[at : at + len(data)] = data

    @property
    def written_bytes(self) -> int:
        """Bytes so far, in all files."""
        assert self._file is not None
        return self._file.before + self._cursor[0] - self._file.address

    def size_of(self, records: tuple[Record, ...]) -> int:
        """Bytes that they take, at most; numbers of kinds may be of any size."""
        return sum(_padded(len(self._encode(record))) + 8 for record in records)

    def fits(self, nbytes: int) -> bool:
        """Whether this file has room for so many bytes."""
        return not self._closed and self._cursor[0] + nbytes <= self._stop

    def limit_growth(self, nbytes: int) -> None:
        """Let it grow by so many bytes, and then raise JournalFileFull."""
        self._end = min(self._stop, self._cursor[0] + nbytes)

    @property
    def _stop(self) -> int:
        assert self._file is not None
        return self._file.stop

    def make_room(self, records: tuple[Record, ...]) -> None:
        """Go on in a new file that surely has room for `records`; all declarations are void then."""
        if self._closed:
            raise SpoolUnavailable(f"the journal in {self._spool.path} is closed")
        self._rotate(self.size_of(records))

    def _rotate(self, need: int) -> None:
        size = max(self._file_bytes, _HEADER.size + need + 2 * _FRAME.size)
        new = _reserve(self._spool, _file_name(self.file_index + 1), size)
        self._write(new, 0, _HEADER.pack(_MAGIC, self.next_ordinal))
        self._go_on_in(new)

    def _go_on_in(self, new: mmap.mmap) -> None:
        """From here on `settle` ends what is cut off: the file and its header are there."""
        old, ordinal, before = self._file, self.next_ordinal, 0
        if old is not None:
            at = self._cursor[0] - old.address
            self._write(old.map, at, _FRAME.pack(_CONTINUED, 0))
            before = old.before + at
        file = _File(self.file_index + 1, ordinal, new, kernel.address_of(new), before)
        self._file = file
        self._cursor[0] = file.start
        self._end = file.stop
        if old is not None:
            _let_go(old.map)

    def repair(self) -> None:
        """After an exception: step over what is written, and end the rotation that is under way."""
        file = self._file
        if file is None or self._closed:
            return
        known, at, ordinal = self._sure
        if known is not file:
            at, ordinal = file.start, file.first
        while size := _size_at(file, at):
            at, ordinal = at + size, ordinal + 1
            self._sure = (file, at, ordinal)  # this may be interrupted, too
        self._cursor[0], self._cursor[1] = at, ordinal
        self._end = at  # what it may grow by is asked again
        name = _file_name(file.number + 1)
        path = next((p for place in self._spool.places if (p := place / name).exists()), None)
        if path is None:
            return
        new = _reopen(path)
        if new is None:  # nobody can have seen it
            path.unlink()
        else:
            self._go_on_in(new)

    def close(self) -> None:
        """Can be repeated if it is interrupted."""
        self._closed, self._end = True, 0
        if self._file is not None:
            _let_go(self._file.map)


def _let_go(file: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # the frame of an interrupted call holds a view
        file.close()


def _size_at(file: _File, at: int) -> int:
    """Bytes of the frame there, 0 if there is no whole one."""
    at -= file.address
    length, checksum = _FRAME.unpack_from(file.map, at)
    end = at + _FRAME.size + length
    if length == 0 or end > len(file.map):
        return 0
    return _padded(length) if google_crc32c.value(file.map[end - length : end]) == checksum else 0


def _reopen(path: Path) -> mmap.mmap | None:
    """A file that was made and not yet written to; None if it has no header."""
    with path.open("r+b") as handle:
        header = handle.read(_HEADER.size)
        if len(header) < _HEADER.size or _HEADER.unpack(header)[0] != _MAGIC:
            return None
        return mmap.mmap(handle.fileno(), 0)


def _reserve(spool: Spool, name: str, size: int) -> mmap.mmap:
    """A new file of `size` bytes that the file system has promised, in memory or on disk.

    Mapped: what is written to it then survives this process as any write would, and is no call of the
    operating system.
    """
    for in_memory in (True, False):
        path, descriptor = (spool.path if in_memory else spool.make_overflow()) / name, -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        except OSError as error:
            if descriptor >= 0:
                path.unlink()
            if not no_room(error):
                raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    raise SpoolUnavailable(
        f"no room for the journal in {spool.path} nor in {spool.overflow}: free some disk space, or "
        "give another place with spool_dir= or SMDIST_SPOOL_DIR"
    )


class JournalReader:
    """The uploader's end: everything from ordinal `start` on, once."""

    def __init__(self, spool: Spool, start: int = 0) -> None:
        self._spool = spool
        self._decode: Callable[[bytes], Record] = msgspec.msgpack.Decoder(Record).decode
        self._start = start
        self._firsts: dict[int, int] = {}  # file index -> ordinal of its first record
        self._map: mmap.mmap | None = None
        self._index, self._at, self._ordinal = -1, 0, 0
        self._kinds: dict[int, Declare] = {}

    def read(self, most: int = sys.maxsize) -> list[Piece]:
        """What was wholly written since the last call, up to `most` records.

        A record that cannot be understood is given as a Trouble that says so: it keeps its place.
        """
        pieces: list[Piece] = []
        if self._map is None and not self._open_first():
            return pieces
        while len(pieces) < most:
            assert self._map is not None
            length, checksum = _FRAME.unpack_from(self._map, self._at)
            if length == _CONTINUED:
                if not self._open(self._index + 1):
                    return pieces
                continue
            end = self._at + _FRAME.size + length
            if length == 0 or end > len(self._map):
                return pieces
            with memoryview(self._map) as view:
                payload = bytes(view[self._at + _FRAME.size : end])
            if google_crc32c.value(payload) != checksum:
                return pieces
            piece = self._piece(payload)
            if self._ordinal >= self._start:
                pieces.append(piece)
            self._ordinal += 1
            self._at += _padded(length)
        return pieces

    def _piece(self, payload: bytes) -> Piece:
        try:
            record = self._decode(payload)
            if isinstance(record, Declare):
                self._kinds[record.kind] = record
            kind = self._kinds[record.kind] if isinstance(record, (Part, Inline)) else None
        except (msgspec.DecodeError, KeyError) as error:
            return Piece(self._ordinal, self._unreadable(error), None)
        return Piece(self._ordinal, record, kind)

    def _unreadable(self, error: Exception) -> Trouble:
        what = "names an undeclared kind" if isinstance(error, KeyError) else f"is none: {error}"
        return Trouble(f"journal record {self._ordinal} {what}; left out", -1, time.time())

    def _open_first(self) -> bool:
        """The file that begins closest before `start`, or at it."""
        indices = sorted(
            int(found[1]) for entry in self._spool.names() if (found := _NAME.fullmatch(entry))
        )
        for index in indices:
            first = self._first_of(index)
            if first is not None:
                self._firsts[index] = first
        if not self._firsts:
            return False
        # None begins early enough only if files were lost; what is left is still worth reading.
        early = [index for index, first in self._firsts.items() if first <= self._start]
        # The last file may lack its ordinal, if its header was being written: it says 0 then.
        early.sort(key=lambda index: (self._firsts[index], -index))
        return self._open(early[-1] if early else min(self._firsts))

    def _first_of(self, index: int) -> int | None:
        try:
            with self._spool.open_for_reading(_file_name(index)) as handle:
                header = handle.read(_HEADER.size)
        except NotPrivate:
            raise
        except (SpoolUnavailable, FileNotFoundError):  # its reservation failed just now
            return None
        if len(header) < _HEADER.size:
            return None
        magic, first = _HEADER.unpack(header)
        return int(first) if magic == _MAGIC else None

    def _open(self, index: int) -> bool:
        first = self._first_of(index)
        if first is None:  # after a power cut, a file may be less than the one before it promised
            return False
        if self._map is not None:
            self._map.close()
        with self._spool.open_for_reading(_file_name(index)) as handle:
            self._map = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        self._firsts[index] = first
        self._index, self._at, self._ordinal = index, _HEADER.size, first
        self._kinds = {}
        return True

    def remove_before(self, ordinal: int) -> None:
        """Remove files whose records are all below `ordinal`."""
        for index in sorted(self._firsts):
            following = self._firsts.get(index + 1)
            if following is None or following > ordinal or index >= self._index:
                return
            self._spool.discard(_file_name(index))
            del self._firsts[index]

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
