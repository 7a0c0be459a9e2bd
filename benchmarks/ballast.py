"""Keeps a machine's memory in the state that a long run finds it in: full of files once read.

A virtual machine may hand memory that is free back to its host. A page that is taken from there
costs ten times as much as one that was taken from the page cache (measured: writing 50 MB to a
file takes 100 ms of a processor instead of 10), and everybody who writes files pays it, at random.
Here a file that fills what is free is written before, and looked at again when parts of it had to go.
That has a price too: pages are taken from the cache while training goes on. See docs/benchmarks.md.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ballast", "keep_warm"]

_NAME = "SMDIST_BENCH_BALLAST"
_LEFT = 1 << 30  # free in any case
_SPARE_DISK = 8 << 30
_CHUNK = 8 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ, which the mmap module does not know before Python 3.15


def _free() -> int:
    found = re.search(r"MemFree:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) << 10 if found else 0


@contextmanager
def ballast(folder: str | None = None) -> Iterator[str]:
    """While it is there, memory is warm. Gives what was done, to be told."""
    folder = folder or tempfile.gettempdir()
    size = min(_free() - _LEFT, shutil.disk_usage(folder).free - _SPARE_DISK)
    size -= size % _CHUNK
    if size <= 0:
        yield "as it was: little is free, or the disk is full"
        return
    with tempfile.NamedTemporaryFile(prefix="smdist-ballast-", dir=folder) as file:
        for _ in range(size // _CHUNK):
            file.write(bytes(_CHUNK))
        file.flush()
        os.fsync(file.fileno())
        os.environ[_NAME] = file.name
        try:
            yield f"{size / 1e9:.0f} GB that were free are filled with a file that may go"
        finally:
            del os.environ[_NAME]


def keep_warm() -> None:
    """Before a measurement: read back what has gone, if memory is free again."""
    name = os.environ.get(_NAME)
    if name is None or _free() < 2 * _LEFT:
        return
    with open(name, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        view.madvise(_POPULATE_READ)
