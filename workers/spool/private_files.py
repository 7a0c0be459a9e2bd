"""Open files that only this user can write. Other users can put anything into a temporary folder.

    <root>/smdist-<uid>/      the private root: owned by this user, mode 0700
        <folder>/             owned by this user, writable for no other
            <file>            likewise, with a single name (no hard link)

Everything below a private root is opened through this module. No link is followed. A name is resolved
in the folder that was checked, and every opened file is checked after opening, so it cannot be
exchanged in between. Opening a named pipe does not block. `NotPrivate` says what was found.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from smdist.errors import NotPrivate

__all__ = [
    "check_files",
    "is_private_name",
    "list_folders",
    "open_file",
    "open_in",
    "opened",
    "private_root",
    "remove_empty",
    "remove_file",
    "remove_folder",
    "why_not_private",
]

_ALL_OTHERS, _OTHER_WRITERS = 0o077, 0o022  # mode bits that only the owner may have
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY


def private_root(root: Path) -> Path:
    """Return `<root>/smdist-<uid>`: a shared tmpfs is open to all users of the machine."""
    return root / f"smdist-{os.geteuid()}"


def is_private_name(path: Path) -> bool:
    """Check whether `path` is directly in a private root."""
    return path.is_absolute() and path.parent == private_root(path.parent.parent)


def why_not_private(root: Path) -> str:
    """Return why a private root cannot be used, empty if it can, or does not exist."""
    try:
        os.close(_open(root, _FOLDER_FLAGS, stat.S_ISDIR, _ALL_OTHERS))
    except NotPrivate as error:
        return error.cause
    except OSError:
        pass
    return ""


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Open `<private root>/<folder>` and yield its descriptor."""
    with _opened_root(folder.parent) as root:
        handle = _open(folder, _FOLDER_FLAGS, stat.S_ISDIR, _OTHER_WRITERS, root)
    try:
        yield handle
    finally:
        os.close(handle)


def open_file(
    path: Path, flags: int = os.O_RDONLY, kind: Callable[[int], bool] = stat.S_ISREG
) -> int:
    """Open `<private root>/<folder>/<file>`; the caller closes the descriptor."""
    with opened(path.parent) as folder:
        return open_in(folder, path, flags, kind)


def open_in(folder: int, path: Path, flags: int, kind: Callable[[int], bool] = stat.S_ISREG) -> int:
    """Open the file `path` in its folder, whose descriptor is `folder`.

    Never pass O_TRUNC: the file would be emptied before it is checked.
    """
    return _open(path, flags, kind, _OTHER_WRITERS, folder)


def check_files(folder: Path, pipe: str = "") -> list[str]:
    """Return the names in a folder. Raise NotPrivate unless all are private files.

    `pipe` is the name of the one named pipe that is allowed.
    """
    names = []
    with opened(folder) as handle:
        for name in os.listdir(handle):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = os.stat(name, dir_fd=handle, follow_symlinks=False)
                kind = stat.S_ISFIFO if name == pipe else stat.S_ISREG
                _check(folder / name, status, kind, _OTHER_WRITERS)
                names.append(name)
    return names


def list_folders(root: Path, refused: Callable[[str], None] = lambda _message: None) -> list[Path]:
    """Return the private folders in a private root; call `refused` for everything that is not."""
    found: list[Path] = []
    try:
        with _opened_root(root) as handle, os.scandir(handle) as entries:
            names = sorted(e.name for e in entries if e.is_symlink() or e.is_dir())
    except NotPrivate as error:
        refused(str(error))
        return found
    except OSError:  # the root is removed together with its last spool
        return found
    for path in (root / name for name in names):
        try:
            with opened(path):
                found.append(path)
        except NotPrivate as error:  # noqa: PERF203
            refused(str(error))
        except OSError:  # it was removed meanwhile
            pass
    return found


def remove_file(path: Path) -> None:
    with opened(path.parent) as folder, contextlib.suppress(FileNotFoundError):
        os.unlink(path.name, dir_fd=folder)


def remove_folder(folder: Path, last: Sequence[str] = ()) -> None:
    """Remove a private folder with its files, those in `last` at the end, and an empty root.

    Everything that is not private stays. Safe to repeat.
    """
    if not is_private_name(folder):
        return
    with contextlib.suppress(OSError), opened(folder) as handle:
        names = os.listdir(handle)
        for name in sorted(names, key=lambda name: last.index(name) if name in last else -1):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=handle)
    remove_empty(folder)


def remove_empty(folder: Path) -> None:
    """Remove a folder and the private root around it, if they are empty."""
    for path in (folder, folder.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


@contextlib.contextmanager
def _opened_root(root: Path) -> Iterator[int]:
    handle = _open(root, _FOLDER_FLAGS, stat.S_ISDIR, _ALL_OTHERS)
    try:
        yield handle
    finally:
        os.close(handle)


def _open(
    path: Path, flags: int, kind: Callable[[int], bool], others: int, folder: int | None = None
) -> int:
    name = path if folder is None else path.name
    try:
        handle = os.open(name, flags | _SAFE_FLAGS, 0o600, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError:
        # Report a link, a wrong type or a wrong owner, rather than the error it led to.
        _check(path, os.stat(name, dir_fd=folder, follow_symlinks=False), kind, others)
        raise
    try:
        _check(path, os.fstat(handle), kind, others)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check(path: Path, status: os.stat_result, kind: Callable[[int], bool], others: int) -> None:
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        raise NotPrivate(f"{path} is a link", "remove it")
    if status.st_uid != os.geteuid():
        remedy = "have it removed, or set spool_dir= or SMDIST_SPOOL_DIR to another folder"
        raise NotPrivate(f"{path} belongs to another user ({status.st_uid})", remedy)
    if not kind(mode):
        raise NotPrivate(f"{path} has the wrong type ({stat.filemode(mode)})", "remove it")
    if mode & others:
        remedy = f"if all of it is yours: chmod go-{'rwx' if others == _ALL_OTHERS else 'w'} {path}"
        raise NotPrivate(f"{path} is open to others (mode {stat.S_IMODE(mode):o})", remedy)
    if stat.S_ISREG(mode) and status.st_nlink > 1:
        raise NotPrivate(f"{path} has a second name (a hard link)", "remove that")
