"""Open files and folders below a root without following symbolic links.

Anybody may have written a run. A link in it could lead a reader to any of its user's files, or make a
writer replace one. Each folder is therefore opened relative to its parent. The root itself may be a
link. Pipes, sockets and devices are rejected without waiting for them.

All functions raise OSError or CorruptObject.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from smdist.errors import CorruptObject

__all__ = ["FolderEntry", "RootedFiles"]

_IN_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_TO_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a named pipe waits for a writer.
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_LINK = "it is a symbolic link, which may lead out of the run; replace it by its target"
_NO_FILE = "it is a pipe, a socket or a device; smdist did not write it"


class FolderEntry(NamedTuple):
    """An entry of a folder; `linked` is a symbolic link to a folder, which `folder` is not."""

    name: str
    folder: bool
    linked: bool


class RootedFiles:
    def __init__(self, root: str) -> None:
        self._root = root

    @contextlib.contextmanager
    def folder(self, folder: str, *, create: bool = False) -> Iterator[int]:
        """Open a folder and yield its descriptor for use as `dir_fd`; "" is the root."""
        descriptor = self._open_root(create)
        try:
            for name in folder.split("/") if folder else ():
                inside = self._enter(name, descriptor, folder, create)
                os.close(descriptor)
                descriptor = inside
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_root(self, create: bool) -> int:
        try:
            return os.open(self._root, _IN_FOLDER)
        except FileNotFoundError:
            if not create:
                raise
            os.makedirs(self._root, exist_ok=True)
            return os.open(self._root, _IN_FOLDER)

    def _enter(self, name: str, parent: int, folder: str, create: bool) -> int:
        try:
            return os.open(name, _IN_FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            if not create:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
            return self._enter(name, parent, folder, False)
        except NotADirectoryError:
            if stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
                raise self.link_error(folder) from None
            raise

    def link_error(self, key: str) -> CorruptObject:
        return CorruptObject(self._root, key, "open", _LINK)

    @contextlib.contextmanager
    def file(self, key: str) -> Iterator[int]:
        """Open a file and yield its descriptor for reading."""
        folder, _, name = key.rpartition("/")
        with self.folder(folder) as parent:
            try:
                descriptor = os.open(name, _TO_READ, dir_fd=parent)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise self.link_error(key) from None
                if error.errno == errno.ENXIO:
                    raise CorruptObject(self._root, key, "open", _NO_FILE) from None
                raise
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # reading a folder raises
                raise CorruptObject(self._root, key, "open", _NO_FILE)
            yield descriptor
        finally:
            os.close(descriptor)

    def entries(self, folder: str) -> list[FolderEntry]:
        """Return the entries of a folder."""
        with self.folder(folder) as parent:
            descriptor = os.open(".", _TO_LIST, dir_fd=parent)
        try:
            with os.scandir(descriptor) as found:
                return [_folder_entry(entry) for entry in found]
        finally:
            os.close(descriptor)


def _folder_entry(entry: os.DirEntry[str]) -> FolderEntry:
    linked = entry.is_symlink()
    return FolderEntry(entry.name, entry.is_dir(follow_symlinks=False), linked and entry.is_dir())
