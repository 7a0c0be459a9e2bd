"""The journal of a rank: records appended by the training process and read by its uploader.

It consists of files of fixed size, `journal-000000`, `journal-000001`, ... Each is reserved before use,
so that a full file system fails a rotation and never a record:

    b"smdjrnl1"  u64 ordinal of the first record
    frame*       u32 length, u32 CRC32C of the payload, payload (msgpack), to a multiple of 8
    zeros

A frame is valid when its checksum matches. A reader that comes too early, or after a SIGKILL in the
middle of a write, sees no record there. Records are written in order: if a later frame is valid, the one
that is not was damaged. A length of 0xFFFFFFFF means: continue in the next file. Numbers of `Declare`
are valid within one file, so every file can be read without those before it.

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
from smdist.format.journal_records import (
    Close,
    Declare,
    Drop,
    Inline,
    Part,
    Piece,
    Record,
    Trouble,
)
from smdist.workers.spool.frames import (
    CONTINUED,
    FRAME,
    holds_one_record,
    is_whole,
    next_whole,
    padded,
)
from smdist.workers.spool.spool import Spool, no_room

__all__ = ["JournalFileFull", "JournalReader", "JournalWriter"]

FILE_BYTES = 4 << 20
_MAGIC = b"smdjrnl1"
_HEADER = struct.Struct("<8sQ")
_PART_TAIL = len(msgspec.msgpack.encode((0.0, 0, 0, 0, 0))) - 1  # a part's time and the rest
_MAX_PART_FRAME = 72
_NAME = re.compile(r"journal-(\d{6,})")


def _file_name(index: int) -> str:
    return f"journal-{index:06d}"


class JournalFileFull(Exception):
    """The owner must call `make_room`, declare its kinds again, and repeat the append."""


class _File(NamedTuple):
    """The journal file that is being written: mapped at `address`, used up to `stop`."""

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
        return self.address + len(self.map) - FRAME.size  # leaves room for the continuation mark


class JournalWriter:
    """Used by the training process. Not thread-safe: the owner serialises all calls.

    The content of the files is the truth: a reader may have seen it. An exception may come between
    writing a frame and moving the cursor, or in the middle of a rotation. The owner then calls
    `repair` before anything else, which reads the files.
    """

    def __init__(self, spool: Spool, file_bytes: int = FILE_BYTES) -> None:
        self._spool = spool
        self._file_bytes = file_bytes
        self._encode: Callable[[Record], bytes] = msgspec.msgpack.Encoder().encode
        self._file: _File | None = None
        self._closed = False
        self._end = 0  # address up to which the file may be used
        # Address and ordinal of the next frame, in memory that the C kernel advances, too.
        self._cursor = array("Q", [0, 0])
        self._cursor_address = self._cursor.buffer_info()[0]
        self._verified: tuple[_File | None, int, int] = (
            None,
            0,
            0,
        )  # an earlier cursor, and its file
        self._part_head = b""
        self._rotate(0)

    @property
    def file_index(self) -> int:
        """Return the index of the current file."""
        return -1 if self._file is None else self._file.number

    @property
    def next_ordinal(self) -> int:
        return self._cursor[1]

    def append(self, record: Record) -> int:
        """Append `record` and return its ordinal. It then survives the death of this process.

        Raise JournalFileFull when the file has no room, or may not grow that far.
        """
        payload = self._encode(record)
        need, (at, ordinal) = padded(len(payload)), self._cursor
        if at + need > self._end:
            raise JournalFileFull
        assert self._file is not None
        head = FRAME.pack(len(payload), google_crc32c.value(payload))
        self._write(self._file.map, at - self._file.address, head + payload)
        self._cursor[0], self._cursor[1] = at + need, ordinal + 1
        return ordinal

    def set_step(self, mode: int, mode_step: int, step: int) -> None:
        """Set the step of parts that `append_part` records."""
        self._part_head = self._encode(Part(mode, mode_step, step, 0.0, 0, 0, 0, 0))[:-_PART_TAIL]
        self._verified = (self._file, self._cursor[0], self._cursor[1])

    def append_part(
        self, target: int, source: int, nbytes: int, kind: int, arena: int, offset: int
    ) -> None:
        """Copy a part into the arena and append its record, in one call into C."""
        if self._cursor[0] + _MAX_PART_FRAME > self._end:
            raise JournalFileFull
        place, opening = self._cursor_address, self._part_head
        kernel.record(target, source, nbytes, place, opening, time.time(), kind, arena, offset)

    def _write(self, file: mmap.mmap, at: int, data: bytes) -> None:
        file[at : at + len(data)] = data

    @property
    def written_bytes(self) -> int:
        """Return the bytes written so far, in all files."""
        assert self._file is not None
        return self._file.before + self._cursor[0] - self._file.address

    def size_of(self, records: tuple[Record, ...]) -> int:
        """Return an upper bound of the bytes that `records` take, with any number of their kind."""
        return sum(padded(len(self._encode(record))) + 8 for record in records)

    def fits(self, nbytes: int) -> bool:
        """Check whether the current file has room for `nbytes`."""
        return not self._closed and self._cursor[0] + nbytes <= self._stop

    def limit_growth(self, nbytes: int) -> None:
        """Allow `nbytes` more; raise JournalFileFull after that."""
        self._end = min(self._stop, self._cursor[0] + nbytes)

    @property
    def _stop(self) -> int:
        assert self._file is not None
        return self._file.stop

    def make_room(self, records: tuple[Record, ...]) -> None:
        """Continue in a new file that has room for `records`. All declarations are void then."""
        if self._closed:
            raise SpoolUnavailable(f"the journal in {self._spool.path} is closed")
        self._rotate(self.size_of(records))

    def _rotate(self, need: int) -> None:
        size = max(self._file_bytes, _HEADER.size + need + 2 * FRAME.size)
        new = _reserve(self._spool, _file_name(self.file_index + 1), size)
        self._write(new, 0, _HEADER.pack(_MAGIC, self.next_ordinal))
        self._switch_to(new)

    def _switch_to(self, new: mmap.mmap) -> None:
        """Make `new`, which has its header, the current file. `repair` completes this if cut off."""
        old, ordinal, before = self._file, self.next_ordinal, 0
        if old is not None:
            at = self._cursor[0] - old.address
            self._write(old.map, at, FRAME.pack(CONTINUED, 0))
            before = old.before + at
        file = _File(self.file_index + 1, ordinal, new, kernel.address_of(new), before)
        self._file = file
        self._cursor[0] = file.start
        self._end = file.stop
        if old is not None:
            _close_map(old.map)

    def repair(self) -> None:
        """Move the cursor behind the last valid frame and complete a rotation, after an exception."""
        file = self._file
        if file is None or self._closed:
            return
        known, at, ordinal = self._verified
        if known is not file:
            at, ordinal = file.start, file.first
        while size := _size_at(file, at):
            at, ordinal = at + size, ordinal + 1
            self._verified = (file, at, ordinal)  # this loop may be interrupted, too
        self._cursor[0], self._cursor[1] = at, ordinal
        self._end = at  # the owner sets the limit again
        name = _file_name(file.number + 1)
        path = next((p for place in self._spool.places if (p := place / name).exists()), None)
        if path is None:
            return
        new = _reopen(path)
        if new is None:  # without a header no reader has used it
            path.unlink()
        else:
            self._switch_to(new)

    def close(self) -> None:
        """Close the file. Safe to repeat after an interruption."""
        self._closed, self._end = True, 0
        if self._file is not None:
            _close_map(self._file.map)


def _close_map(file: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # the frame of an interrupted call holds a view
        file.close()


def _size_at(file: _File, at: int) -> int:
    """Return the size of the frame at address `at`, 0 without a valid one."""
    at -= file.address
    return padded(FRAME.unpack_from(file.map, at)[0]) if is_whole(file.map, at) else 0


def _reopen(path: Path) -> mmap.mmap | None:
    """Map a new journal file, None if its header is missing."""
    with path.open("r+b") as handle:
        header = handle.read(_HEADER.size)
        if len(header) < _HEADER.size or _HEADER.unpack(header)[0] != _MAGIC:
            return None
        return mmap.mmap(handle.fileno(), 0)


def _reserve(spool: Spool, name: str, size: int) -> mmap.mmap:
    """Create a file whose `size` bytes are reserved, in memory or else on disk, and map it.

    Writing to mapped memory survives this process like any write, without a system call.
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
        f"no room for the journal in {spool.path} or {spool.overflow}: free some disk space, or set "
        "spool_dir= or SMDIST_SPOOL_DIR to another folder"
    )


class JournalReader:
    """Used by the uploader: returns every record from ordinal `start` on once."""

    def __init__(self, spool: Spool, start: int = 0) -> None:
        self._spool = spool
        self._decode: Callable[[bytes], Record] = msgspec.msgpack.Decoder(Record).decode
        self._start = start
        self._firsts: dict[int, int] = {}  # file index -> ordinal of its first record
        self._map: mmap.mmap | None = None
        self._index, self._at, self._ordinal = -1, 0, 0
        self._kinds: dict[int, Declare] = {}
        self._open_step: list[Record] = []  # its last record, unless the step was closed
        self._tail = (-1, 0)  # file and place behind which there was nothing

    def read(self, most: int = sys.maxsize, *, ended: bool = False) -> list[Piece]:
        """Return up to `most` records that are complete and were not returned before.

        An unreadable record is replaced by a Trouble record that says so, with the same ordinal. A damaged
        one is replaced by a Drop once a later record is complete. `ended`: the writer is gone, so that
        zeros with a record behind them are damage, too.
        """
        pieces: list[Piece] = []
        if self._map is None and not self._open_first():
            return pieces
        while len(pieces) < most:
            assert self._map is not None
            length, checksum = FRAME.unpack_from(self._map, self._at)
            if (length, checksum) == (CONTINUED, 0):
                if not self._continue(pieces):
                    return pieces
                continue
            if length == checksum == 0 and (not ended or self._tail == (self._index, self._at)):
                return pieces
            end = self._at + FRAME.size + length
            payload = self._map[end - length : end] if end <= len(self._map) else b""
            if payload and google_crc32c.value(payload) == checksum:
                piece, size = self._piece(payload), padded(length)
            else:
                passed = self._next_begins_later()  # asked first: then this file has all its frames
                if (found := self._damaged()) is not None:
                    piece, size = found
                elif is_whole(self._map, self._at) or (passed and self._continue(pieces)):
                    continue
                else:
                    self._tail = (self._index, self._at)
                    return pieces
            if self._ordinal >= self._start:
                pieces.append(piece)
            self._ordinal += 1
            self._at += size
        return pieces

    def _damaged(self) -> tuple[Piece, int] | None:
        """Return what stands for the damaged frame here, and its size; None if none is behind it.

        Where several in a row are damaged, their number is unknown: they count as one, and the next
        file tells the rest. Too low an ordinal only delays that room is given back.
        """
        assert self._map is not None
        at, ordinal = self._at, self._ordinal
        behind = next_whole(self._map, at + FRAME.size)
        if behind is None or is_whole(self._map, at):  # it may have been completed meanwhile
            return None
        reason, size = f"journal record {ordinal} is damaged", behind - at
        if not holds_one_record(self._map, at, behind):
            length, _ = FRAME.unpack_from(self._map, at)
            if length and self._record_behind(at + padded(length)) is not None:
                size = padded(length)
            else:
                reason = f"journal records from {ordinal} on are damaged"
        following = self._record_behind(at + size) or self._open_step
        return Piece(ordinal, self._lost(reason, following), None), size

    def _record_behind(self, at: int) -> list[Record] | None:
        """Return the first record of a step from `at` on; [] if none is, None if there is no whole frame."""
        assert self._map is not None
        found: list[Record] | None = None
        while at + FRAME.size <= len(self._map):
            length, _ = FRAME.unpack_from(self._map, at)
            start = at + FRAME.size
            if length == 0 or start + length > len(self._map):
                return found
            if is_whole(self._map, at):
                found = []
                with contextlib.suppress(msgspec.DecodeError):
                    record = self._decode(self._map[start : start + length])
                    if isinstance(record, (Part, Inline, Close, Drop)):
                        return [record]
            at += padded(length)
        return found

    def _next_begins_later(self) -> bool:
        """Check whether the next file shows that there was a record here."""
        first = self._first_of(self._index + 1)
        return first is not None and first > self._ordinal

    def _continue(self, pieces: list[Piece]) -> bool:
        """Go on in the next file; what is missing before its first record is told."""
        ordinal, open_step = self._ordinal, self._open_step
        if not self._open(self._index + 1):
            return False
        first = self._ordinal
        if first > ordinal:
            lost = f"journal record {ordinal} is damaged"
            if first > ordinal + 1:
                lost = f"journal records {ordinal} to {first - 1} are damaged"
            record = self._lost(lost, self._record_behind(_HEADER.size) or open_step)
            # Ordinals go on without gaps: the others are replaced by a record that says nothing.
            rest = [
                Piece(other, Declare(0, (), (), 0), None) for other in range(ordinal + 1, first)
            ]
            pieces += [p for p in (Piece(ordinal, record, None), *rest) if p.ordinal >= self._start]
        return True

    def _lost(self, reason: str, following: list[Record]) -> Record:
        """Return what stands for lost records: a drop in the step that goes on behind them."""
        if following and isinstance(record := following[0], (Part, Inline, Close, Drop)):
            step = (record.mode, record.mode_step, record.step, record.time)
            return Drop(*step, (), 0, reason)
        return Trouble(f"{reason}; skipped", -1, time.time())

    def _piece(self, payload: bytes) -> Piece:
        try:
            record = self._decode(payload)
            if isinstance(record, Declare):
                self._kinds[record.kind] = record
        except msgspec.DecodeError as error:
            text = f"journal record {self._ordinal} is unreadable: {error}; it was skipped"
            return Piece(self._ordinal, Trouble(text, -1, time.time()), None)
        if isinstance(record, (Part, Inline, Close, Drop)):
            self._open_step = [] if isinstance(record, Close) else [record]
        if not isinstance(record, (Part, Inline)):
            return Piece(self._ordinal, record, None)
        if (kind := self._kinds.get(record.kind)) is None:  # its declaration was damaged
            record = self._lost(
                f"journal record {self._ordinal} names an undeclared kind", [record]
            )
        return Piece(self._ordinal, record, kind)

    def _open_first(self) -> bool:
        """Open the last file that begins at or before `start`."""
        indices = sorted(
            int(found[1]) for entry in self._spool.names() if (found := _NAME.fullmatch(entry))
        )
        for index in indices:
            first = self._first_of(index)
            if first is not None:
                self._firsts[index] = first
        if not self._firsts:
            return False
        # Without such a file some were lost; read what is left.
        early = [index for index, first in self._firsts.items() if first <= self._start]
        # The last file may have ordinal 0 if its header was being written.
        early.sort(key=lambda index: (self._firsts[index], -index))
        return self._open(early[-1] if early else min(self._firsts))

    def _first_of(self, index: int) -> int | None:
        try:
            with self._spool.open_for_reading(_file_name(index)) as handle:
                header = handle.read(_HEADER.size)
        except NotPrivate:
            raise
        except (SpoolUnavailable, FileNotFoundError):  # its reservation has just failed
            return None
        if len(header) < _HEADER.size:
            return None
        magic, first = _HEADER.unpack(header)
        return int(first) if magic == _MAGIC else None

    def _open(self, index: int) -> bool:
        first = self._first_of(index)
        if first is None:  # after a power cut the next file may be incomplete
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
        """Remove the files whose records are all below `ordinal`."""
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
