"""A page of shared memory: which journal records the uploader has stored.

The uploader writes it; the training process reads it without a system call. Each number is one aligned
8-byte word, so a reader sees either the old or the new value.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from smdist.workers.spool.private_files import open_file

__all__ = ["AckPage"]

_PAGE = 4096
_TEXT = 1024  # offset of the error text
_ACKED, _BYTES, _STEPS, _UPLOADER, _ERROR_LENGTH = range(5)


class AckPage:
    def __init__(self, path: Path) -> None:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size < _PAGE:
                os.posix_fallocate(descriptor, 0, _PAGE)
            self._map = mmap.mmap(descriptor, _PAGE)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("Q")

    @property
    def acked(self) -> int:
        """Return the ordinal below which every journal record is stored."""
        return self._words[_ACKED]

    @acked.setter
    def acked(self, ordinal: int) -> None:
        self._words[_ACKED] = ordinal

    @property
    def bytes_stored(self) -> int:
        """Return the captured bytes that are stored, without the overhead of segments."""
        return self._words[_BYTES]

    @property
    def steps_stored(self) -> int:
        return self._words[_STEPS]

    def add_stored(self, nbytes: int, steps: int) -> None:
        self._words[_BYTES] += nbytes
        self._words[_STEPS] += steps

    @property
    def uploader_pid(self) -> int:
        """Return the process id of the running uploader, 0 if there is none."""
        return self._words[_UPLOADER]

    @uploader_pid.setter
    def uploader_pid(self, pid: int) -> None:
        self._words[_UPLOADER] = pid

    @property
    def last_error(self) -> str:
        """Return what keeps the uploader from making progress now, empty if nothing does."""
        length = min(self._words[_ERROR_LENGTH], _PAGE - _TEXT)
        return bytes(self._map[_TEXT : _TEXT + length]).decode("utf-8", "replace")

    @last_error.setter
    def last_error(self, text: str) -> None:
        data = text.encode()[: _PAGE - _TEXT]
        self._words[_ERROR_LENGTH] = 0
        self._map[_TEXT : _TEXT + len(data)] = data
        self._words[_ERROR_LENGTH] = len(data)

    def close(self) -> None:
        self._words.release()
        self._map.close()
