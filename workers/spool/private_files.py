"""Open what is this user's alone: where temporary files go, other users can put anything.

    <root>/smdist-<uid>/      the private root: a folder of this user, 0700
        <folder>/             of this user, and writable to nobody else
            <file>            likewise, and known by one name

Everything below a private root is opened through here: no link is followed, a name means what lies in
the folder that was checked, and what was opened is checked after that, so that nobody can exchange it
in between. A named pipe in the place of a file blocks nobody. `NotPrivate` says what was found.
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
    "refusal",
    "remove_empty",
    "remove_file",
    "remove_folder",
]

_ANYBODY, _WRITERS = 0o077, 0o022  # bits of a mode that nobody but the owner may have
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY


def private_root(root: Path) -> Path:
    """`<root>/smdist-<uid>`, ours alone: a shared tmpfs is open to everybody on the machine."""
    return root / f"smdist-{os.geteuid()}"


def is_private_name(path: Path) -> bool:
    """Whether `path` is that of a folder directly in a private root."""
    return path.is_absolute() and path.parent == private_root(path.parent.parent)


def refusal(root: Path) -> str:
    """Why nothing can be kept in that private root; empty if it is ours, or not there."""
    try:
        os.close(_open(root, _FOLDER, stat.S_ISDIR, _ANYBODY))
    except NotPrivate as error:
        return error.cause
    except OSError:
        pass
    return ""


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Open `<private root>/<folder>`: its descriptor."""
    with _opened_root(folder.parent) as root:
        handle = _open(folder, _FOLDER, stat.S_ISDIR, _WRITERS, root)
    try:
        yield handle
    finally:
        os.close(handle)


def open_file(
    path: Path, flags: int = os.O_RDONLY, kind: Callable[[int], bool] = stat.S_ISREG
) -> int:
    """Open `<private root>/<folder>/<file>`: a descriptor, which the caller closes."""
    with opened(path.parent) as folder:
        return open_in(folder, path, flags, kind)


def open_in(folder: int, path: Path, flags: int, kind: Callable[[int], bool] = stat.S_ISREG) -> int:
    """Open a file in a folder that is open; `path` is its name in messages, too.

    Never with O_TRUNC: it would be empty before it is checked.
    """
    return _open(path, flags, kind, _WRITERS, folder)


def check_files(folder: Path, pipe: str = "") -> list[str]:
    """Names in a folder. NotPrivate if one is not a file of ours alone; `pipe` may be a named pipe."""
    names = []
    with opened(folder) as handle:
        for name in os.listdir(handle):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = os.stat(name, dir_fd=handle, follow_symlinks=False)
                kind = stat.S_ISFIFO if name == pipe else stat.S_ISREG
                _check(folder / name, status, kind, _WRITERS)
                names.append(name)
    return names


def list_folders(root: Path, refused: Callable[[str], None] = lambda _message: None) -> list[Path]:
    """Folders of ours in a private root; `refused` is told of each that is not, the root included."""
    found: list[Path] = []
    try:
        with _opened_root(root) as handle, os.scandir(handle) as entries:
            names = sorted(e.name for e in entries if e.is_symlink() or e.is_dir())
    except NotPrivate as error:
        refused(str(error))
        return found
    except OSError:  # it is not there: the folder goes with its last spool
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
    """Remove a folder of ours with its files, those in `last` at last, and an empty private root.

    What is not ours stays. Can be repeated.
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
    handle = _open(root, _FOLDER, stat.S_ISDIR, _ANYBODY)
    try:
        yield handle
    finally:
        os.close(handle)


def _open(
    path: Path, flags: int, kind: Callable[[int], bool], others: int, folder: int | None = None
) -> int:
    name = path if folder is None else path.name
    try:
        handle = os.open(name, flags | _SAFELY, 0o600, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError:
        # A link, another kind of thing, or somebody else's: say so, rather than what came of it.
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
        remedy = "have it removed, or give another place with spool_dir= or SMDIST_SPOOL_DIR"
        raise NotPrivate(f"{path} belongs to another user ({status.st_uid})", remedy)
    if not kind(mode):
        raise NotPrivate(f"{path} is not what it should be ({stat.filemode(mode)})", "remove it")
    if mode & others:
        remedy = f"if all of it is yours: chmod go-{'rwx' if others == _ANYBODY else 'w'} {path}"
        raise NotPrivate(f"{path} is open to others (mode {stat.S_IMODE(mode):o})", remedy)
    if stat.S_ISREG(mode) and status.st_nlink > 1:
        raise NotPrivate(f"{path} has a second name somewhere (a hard link)", "remove that")
