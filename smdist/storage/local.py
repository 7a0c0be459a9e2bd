"""A directory as a store.

A put writes a temporary file in `<root>/.tmp` and renames it. Readers, also on other machines that
share the file system, see all of an object or none. Temporary files of a killed writer are neither
listed nor readable, and are removed after a day. The umask decides who can read a file.

Large objects are written past the page cache (`direct_io`). Symbolic links below the root are never
followed (`rooted_files`).

A put that returned survives the death of any process. With `durable` it also waits for the disk, which
costs throughput and protects against the loss of the machine.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from smdist.errors import (
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
)
from smdist.processes import is_alive
from smdist.storage.direct_io import DirectWriter, drop_front
from smdist.storage.rooted_files import RootedFiles
from smdist.storage.store import Buffer, check_key, check_range, check_size

__all__ = ["LocalStore"]

T = TypeVar("T")

_TEMPORARY = ".tmp"
_STALE_S = 24 * 3600.0
_CHECK, _STALE_CHECK_S = "check-", 10.0  # a check takes milliseconds
_IOV_MAX = 1024
_PROBE = bytes(64 << 10)
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore:
    """Works with any event loop: file work runs in threads, so the caller's loop stays free."""

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = False) -> None:
        self._root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self._temporaries = os.path.join(self._root, _TEMPORARY)
        self._files = RootedFiles(self._root)
        self._durable = durable
        self._direct = DirectWriter()
        self._swept = False

    @property
    def url(self) -> str:
        return self._root

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    async def check(self) -> None:
        await _in_thread(self._check)

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        check_key(self._root, key)
        await _in_thread(lambda stop: self._put(key, data, if_absent, stop), lent=True)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return (await _in_thread(lambda _: self.read(key, [(start, stop)])))[0]

    def read(self, key: str, ranges: Sequence[tuple[int, int | None]]) -> builtins.list[bytes]:
        check_key(self._root, key)
        for start, stop in ranges:
            check_range(start, stop)
        try:
            with self._files.file(key) as descriptor:
                size = os.fstat(descriptor).st_size
                if any(stop is None for _, stop in ranges):
                    check_size(self._root, key, size)
                return [_read(descriptor, size, start, stop) for start, stop in ranges]
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise ObjectNotFound(self._root, key, "get") from None
            self._raise_store_error(error, key, "get")
        except MemoryError:
            detail = "this process has not enough memory for the requested range"
            raise StoreError(self._root, key, "get", detail) from None

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        return await _in_thread(lambda _: self._list(prefix, after))

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the directories directly under `prefix`."""
        return await _in_thread(lambda _: self._folders(prefix))

    async def delete(self, key: str) -> None:
        check_key(self._root, key)
        await _in_thread(lambda _: self._delete(key))

    async def close(self) -> None:
        """Remove the directory of temporary files if it is empty; other writers create it again."""
        with contextlib.suppress(OSError):
            os.rmdir(self._temporaries)

    # -- in a thread ---------------------------------------------------------------------------

    def _check(self, stop: threading.Event) -> None:
        if os.path.exists(self._root) and not os.path.isdir(self._root):
            detail = "it is a file; choose a directory, or a path that does not exist yet"
            raise StoreForbidden(self._root, "", "write", detail)
        try:
            descriptor, temporary = self._temporary(f"{_CHECK}{os.getpid()}-")
            try:
                self._write(descriptor, [_PROBE], stop)
            finally:
                os.close(descriptor)
                with contextlib.suppress(FileNotFoundError):  # see `_is_stale`
                    os.unlink(temporary)
                with contextlib.suppress(OSError):  # another writer uses it
                    os.rmdir(self._temporaries)
        except OSError as error:
            self._raise_store_error(error, "", "write")

    def _put(
        self, key: str, data: Sequence[Buffer], if_absent: bool, stop: threading.Event
    ) -> None:
        try:
            descriptor, temporary = self._temporary()
        except OSError as error:
            self._raise_store_error(error, key, "put")
        folder, _, name = key.rpartition("/")
        try:
            try:
                self._write(descriptor, data, stop)
                if self._durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            with self._files.folder(folder, create=True) as parent:
                if if_absent:
                    self._link(temporary, key, name, parent)
                else:
                    os.rename(temporary, name, dst_dir_fd=parent)
                if self._durable:
                    _sync_directory(parent)
        except OSError as error:
            self._raise_store_error(error, key, "put")
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _link(self, temporary: str, key: str, name: str, parent: int) -> None:
        try:
            _link(temporary, name, parent)
        except FileExistsError:
            if stat.S_ISREG(os.lstat(name, dir_fd=parent).st_mode):
                raise ObjectExists(self._root, key, "put") from None
            raise

    def _write(self, descriptor: int, data: Sequence[Buffer], stop: threading.Event) -> None:
        """Write all buffers in order, without joining them. A writev may write less than given."""

        def check() -> None:
            if stop.is_set():
                raise InterruptedError(errno.EINTR, "the caller was cancelled")

        views = [_flat(memoryview(buffer)) for buffer in data if memoryview(buffer).nbytes]
        self._direct.write(descriptor, views, check)
        while views:
            check()
            drop_front(views, os.writev(descriptor, views[:_IOV_MAX]))

    def _temporary(self, prefix: str = "") -> tuple[int, str]:
        if not self._swept:
            self._swept = True
            self._sweep()
        name = f"{prefix}{uuid.uuid4().hex}"
        path = os.path.join(self._temporaries, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(8):
            # The close() of another writer may remove the directory in between.
            with (
                contextlib.suppress(FileNotFoundError),
                self._files.folder(_TEMPORARY, create=True) as parent,
            ):
                return os.open(name, flags, 0o666, dir_fd=parent), path
        return os.open(path, flags, 0o666), path

    def _sweep(self) -> None:
        with contextlib.suppress(OSError), self._files.folder(_TEMPORARY) as parent:
            for entry in self._files.entries(_TEMPORARY):
                if _is_stale(entry.name, os.lstat(entry.name, dir_fd=parent)):
                    os.unlink(entry.name, dir_fd=parent)

    def _list(self, prefix: str, after: str) -> Sequence[str]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(self._root, folder)
        try:
            return sorted(self._walk(folder, prefix, after))
        except OSError as error:
            self._raise_store_error(error, prefix, "list")

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[str]:
        try:
            found = self._files.entries(folder)
        except (FileNotFoundError, NotADirectoryError):
            # It never existed, or was removed meanwhile. A root that is a file holds no key.
            return
        for entry in found:
            # Temporary files, and `.nfs...`, which NFS makes of open files that were replaced.
            if entry.name.startswith("."):
                continue
            key = f"{folder}/{entry.name}" if folder else entry.name
            if entry.folder or entry.linked:
                inside = f"{key}/"
                if _may_match(inside, prefix) and (inside > after or after.startswith(inside)):
                    if entry.linked:  # its keys would be missing silently
                        raise self._files.link_error(key)
                    yield from self._walk(key, prefix, after)
            elif key.startswith(prefix) and key > after:
                yield key

    def _folders(self, prefix: str) -> Sequence[str]:
        folder = prefix.rstrip("/")
        if folder:
            check_key(self._root, folder)
        try:
            found = self._files.entries(folder)
            return sorted(e.name for e in found if e.folder and not e.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._raise_store_error(error, prefix, "list")

    def _delete(self, key: str) -> None:
        folder, _, name = key.rpartition("/")
        try:
            with self._files.folder(folder) as parent:
                os.unlink(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                self._raise_store_error(error, key, "delete")

    def _raise_store_error(self, error: OSError, key: str, operation: str) -> NoReturn:
        kind, advice = StoreError, "; check that the file system can be reached"
        if error.errno in _FULL:
            kind, advice = StoreFull, "; free some space or choose another out_dir"
        elif error.errno in _FORBIDDEN:
            kind, advice = StoreForbidden, "; choose a directory that this user may write"
            if operation in ("get", "list"):
                advice = "; check that this user may read it"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
            kind, advice = StoreForbidden, "; a file is where a directory should be, or the reverse"
        raise kind(self._root, key, operation, f"{error.strerror}{advice}") from error


def _is_stale(name: str, found: os.stat_result) -> bool:
    """Return whether the temporary `name` was left behind by a killed process.

    Of a check we know the process. On another machine it may still run: it does without its file.
    """
    age_s = time.time() - found.st_mtime
    process = name.removeprefix(_CHECK).partition("-")[0] if name.startswith(_CHECK) else ""
    if process.isdecimal() and found.st_uid == os.geteuid():
        return age_s > _STALE_CHECK_S and not is_alive(int(process))
    return age_s > _STALE_S


def _may_match(inside: str, prefix: str) -> bool:
    return inside.startswith(prefix) or prefix.startswith(inside)


def _flat(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _read(descriptor: int, size: int, start: int, stop: int | None) -> bytes:
    end = size if stop is None else min(stop, size)
    data = os.pread(descriptor, max(0, end - start), start)
    if start + len(data) >= end:
        return data
    chunks = [data]  # one call returns at most 2 GiB
    at = start + len(data)
    while at < end and (data := os.pread(descriptor, end - at, at)):
        chunks.append(data)
        at += len(data)
    return b"".join(chunks)


def _link(temporary: str, name: str, parent: int) -> None:
    try:
        os.link(temporary, name, dst_dir_fd=parent)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Some FUSE file systems have no hard links. Two writers may both succeed then, which the
        # contract allows; each object is still complete.
        with contextlib.suppress(FileNotFoundError):
            os.lstat(name, dir_fd=parent)
            raise FileExistsError(errno.EEXIST, "exists", name) from None
        os.rename(temporary, name, dst_dir_fd=parent)


def _sync_directory(folder: int) -> None:
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def _in_thread(work: Callable[[threading.Event], T], *, lent: bool = False) -> T:
    """Run `work` in a thread. If cancelled, set its event, and wait for it if buffers are lent."""
    stop = threading.Event()
    try:
        future = asyncio.get_running_loop().run_in_executor(None, work, stop)
    except RuntimeError:
        # The interpreter exits and starts no more threads; a last put must still succeed.
        try:
            return work(stop)
        finally:
            stop.set()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        future.add_done_callback(_retrieve)
        while lent and not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        raise


def _retrieve(future: asyncio.Future[T]) -> None:
    # asyncio would log an exception that is never retrieved.
    if not future.cancelled():
        future.exception()
