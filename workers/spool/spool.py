"""The folder that a rank shares with its uploader: what is captured and not stored yet.

    <root>/smdist-<uid>/<place>-<worker>-<pid>-<session>/      0700
        spool.json       SpoolInfo: everything an uploader needs, whichever process starts it
        arena-0          captured bytes                    (workers/capture/arena.py)
        journal-000000   records of captures, in order     (workers/spool/journal.py)
        ack_page           what is safely in the store       (workers/spool/ack_page.py)
        doorbell         a FIFO: "the journal has grown"
        lock             held by its creator, then by the one uploader

The training process creates it; the uploader removes it once everything is stored. When memory
(`/dev/shm`) is full, arenas and journal files go to `info.overflow`, on disk.

`spool.json` is the commit point: it is created last, by a rename, and removed before the lock. An
unlocked folder without it is a leftover of a process that was killed while it created or removed the
spool. `remove_leftovers` removes those. Every file is checked to belong to this user alone
(workers/spool/private_files.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from smdist.errors import NotPrivate, SpoolBusy, SpoolUnavailable
from smdist.format.manifest import Run, Session
from smdist.identity import worker_name
from smdist.workers.spool.private_files import (
    check_files,
    is_private_name,
    list_folders,
    open_file,
    open_in,
    opened,
    private_root,
    remove_empty,
    remove_file,
    remove_folder,
    why_not_private,
)

__all__ = [
    "UNKNOWN_ATTEMPT",
    "Doorbell",
    "Entry",
    "Spool",
    "SpoolInfo",
    "UploadOptions",
    "remove_leftover",
    "remove_leftovers",
    "spool_name",
]

UNKNOWN_ATTEMPT = -1
_MAX_TRIES = 1000  # against processes that remove empty folders; each takes microseconds
_OVERFLOW = "-overflow"
_INFO, _NEW, _LOCK, _BELL = "spool.json", "spool.new", "lock", "doorbell"
_SPOOL_FILE = re.compile(
    r"spool\.new|lock|doorbell|ack_page|uploader\.log|(arena|journal)-\d+|\.nfs[0-9a-f]+"
)


class UploadOptions(msgspec.Struct, frozen=True):
    linger_s: float = 2.0
    segment_bytes: int = 32 << 20
    heartbeat_s: float = 5.0
    drain_deadline_s: float = 900.0  # how long to retry after the training process has exited
    nice: int = 5
    attach_bytes: int = 0  # segments up to this size may be stored inside of their manifest


class Entry(msgspec.Struct, frozen=True):
    """What joining the run depends on besides the session (workers/join)."""

    began: float  # when the training process started
    resume: bool
    framework: str
    attempt: int | None  # given by the user


class SpoolInfo(msgspec.Struct, frozen=True):
    """The content of spool.json.

    Before `entered` is set, `run` is only a name derived from the store, and the session has no
    attempt number.
    """

    run: Run
    session: Session
    out_dir: str
    upload: UploadOptions
    trainer_pid: int
    trainer_start: int  # start time of the process in clock ticks, 0 when unknown
    # Folder for what does not fit beside this file; created when needed.
    overflow: str = ""
    entry: Entry | None = None
    entered: bool = False  # run and session are in the store
    place: str = ""  # `out_dir` with endpoint and region of the environment; no secrets
    profile: str = ""  # AWS_PROFILE of the training process


def spool_name(info: SpoolInfo) -> str:
    session = info.session
    worker = worker_name(session.rank)
    return f"{info.run.run_id}-{worker}-{info.trainer_pid}-{session.session[:8]}"


def remove_leftovers(root: Path) -> None:
    """Remove all leftovers from a private root."""
    for folder in list_folders(root):
        remove_leftover(folder)


def remove_leftover(folder: Path) -> bool:
    """Remove `folder` if it is a leftover. Return whether it was one.

    A folder that is being created or removed is locked or empty. A process that has just created an
    empty one creates it again.
    """
    if not is_private_name(folder) or folder.name.endswith(_OVERFLOW):
        return False
    with contextlib.suppress(OSError), opened(folder) as handle:
        names = os.listdir(handle)
        if not all(_SPOOL_FILE.fullmatch(name) for name in names):
            return False
        if not names:
            remove_empty(folder)
            return True
        # Do not create a lock where one was just removed: it was the last file of the folder.
        lock = _lock(handle, folder, 0 if _LOCK in names else os.O_CREAT)
        try:
            if lock < 0 or _has(handle, _INFO):
                return False
            with contextlib.suppress(OSError, SpoolUnavailable):
                remove_folder(Spool(folder, _read_info(folder, _NEW)).overflow)
            remove_folder(folder, (_LOCK,))
        finally:
            _unlock(lock)
        return True
    return False


class Spool:
    def __init__(self, path: Path, info: SpoolInfo) -> None:
        """Raise SpoolUnavailable if `info` names an overflow folder of another spool."""
        self.path = path
        self.info = info
        self.overflow = Path(info.overflow)
        if info.overflow and not (
            is_private_name(self.overflow) and self.overflow.name == f"{path.name}{_OVERFLOW}"
        ):
            raise SpoolUnavailable(
                f"{path} is not a spool: it names {info.overflow} as its own, which is impossible. "
                "Nothing is sent or removed; remove it if you did not create it."
            )

    @classmethod
    def at(cls, info: SpoolInfo, root: Path, overflow: Path | None = None) -> Spool:
        """Return the spool that `creating` would create. Does no I/O."""
        path = private_root(Path(os.path.abspath(root))) / spool_name(info)
        if overflow is not None:
            beside = private_root(Path(os.path.abspath(overflow))) / f"{path.name}{_OVERFLOW}"
            info = msgspec.structs.replace(info, overflow=str(beside))
        return cls(path, info)

    @classmethod
    @contextlib.contextmanager
    def creating(cls, info: SpoolInfo, root: Path, overflow: Path | None = None) -> Iterator[Spool]:
        """Create a folder in `root` that becomes a spool when the block ends without an error.

        What does not fit goes to a folder in `overflow`, another root. The training process calls
        this once, before it starts the uploader. Until the block ends no process takes the folder for
        a spool: sending one joins the run for this rank. On an error the folder is removed; a process
        killed in the block leaves it to `remove_leftovers`.
        """
        spool = cls.at(info, root, overflow)
        remove_leftovers(spool.path.parent)
        lock = _make_locked(spool.path)
        try:
            with _creation_errors(spool.path):
                _write_new(spool.path, spool.info)
                os.mkfifo(spool.path / _BELL, 0o600)
            yield spool
            with _creation_errors(spool.path):
                _publish(spool.path)
        except BaseException:
            spool.remove()
            raise
        finally:
            _unlock(lock)

    @classmethod
    def create(cls, info: SpoolInfo, root: Path, overflow: Path | None = None) -> Spool:
        """Create a spool at once, with nothing else to put into it first."""
        with cls.creating(info, root, overflow) as spool:
            return spool

    @classmethod
    def open(cls, path: Path) -> Spool:
        """Return the spool at `path`. Raise NotPrivate unless all of it belongs to this user alone."""
        path = Path(os.path.abspath(path))
        if not is_private_name(path):
            own = private_root(Path()).name
            raise SpoolUnavailable(f"{path} is not a spool: spools are in folders called {own}")
        try:
            spool = cls(path, _read_info(path, _INFO))
            for place in spool.places:
                check_files(place, pipe=_BELL)
        except NotPrivate:
            raise
        except OSError as error:
            raise SpoolUnavailable(f"{path} is not a spool: {error.strerror}") from error
        return spool

    def enter(self, run: Run, session: Session) -> None:
        """Record that the rank has joined the run. The caller holds the lock."""
        facts = {"run": run, "session": session, "entered": True}
        self.info = msgspec.structs.replace(self.info, **facts)
        # Without room for it the next uploader joins again and finds this session in the store.
        with contextlib.suppress(OSError):
            _write_new(self.path, msgspec.structs.replace(_read_info(self.path, _INFO), **facts))
            _publish(self.path)

    def earlier_spools(self) -> list[Spool]:
        """Return earlier spools of the same rank and store that have not joined the run yet."""
        found = []
        begins = f"{self.info.run.run_id}-{worker_name(self.info.session.rank)}-"
        for path in list_folders(self.path.parent):
            if path.name.startswith(begins):
                with contextlib.suppress(SpoolUnavailable):
                    found.append(Spool.open(path))
        mine = self.info.session.started
        return [
            spool
            for spool in found
            if spool.info.entry is not None
            and not spool.info.entered
            and spool.info.session.started < mine
        ]

    @property
    def places(self) -> tuple[Path, ...]:
        """Return the folders of arenas and journal files: the spool, and its overflow if it exists."""
        has_overflow = bool(self.info.overflow) and os.path.lexists(self.overflow)
        return (self.path, self.overflow) if has_overflow else (self.path,)

    def make_overflow(self) -> Path:
        if not self.info.overflow:
            raise SpoolUnavailable(f"no room in {self.path}, and no overflow folder is set")
        _make_private(self.overflow, exist_ok=True)
        with opened(self.overflow):
            return self.overflow

    def names(self) -> list[str]:
        """Return the names of all files of the spool."""
        return [name for place in self.places for name in check_files(place, pipe=_BELL)]

    def open_for_reading(self, name: str) -> BinaryIO:
        """Open a file of the spool or its overflow."""
        for place in self.places:
            with contextlib.suppress(FileNotFoundError):
                return os.fdopen(open_file(place / name), "rb")
        raise SpoolUnavailable(f"the spool {self.path} has no {name}")

    def discard(self, name: str) -> None:
        """Remove a file of the spool or its overflow."""
        for place in self.places:
            remove_file(place / name)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the spool for the one process that uploads it. The kernel unlocks it if that dies."""
        try:
            with opened(self.path) as folder:
                lock, is_spool = _lock(folder, self.path), _has(folder, _INFO)
        except FileNotFoundError as error:
            raise SpoolUnavailable(f"the spool {self.path} is gone") from error
        try:
            if not is_spool:  # removed before the lock was taken
                raise SpoolUnavailable(f"the spool {self.path} is gone")
            if lock < 0:
                raise SpoolBusy(f"another uploader works on {self.path}")
            yield
        finally:
            _unlock(lock)

    def remove(self) -> None:
        """Remove the spool. Safe to repeat after an interruption.

        spool.json and then the lock are removed last.
        """
        if self.info.overflow:
            remove_folder(self.overflow)
        remove_folder(self.path, (_INFO, _LOCK))


def _make_private(folder: Path, *, exist_ok: bool = False) -> None:
    """Create `<root>/smdist-<uid>/<name>`, accessible for this user alone."""
    try:
        # Created separately: no other user can prevent this.
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MAX_TRIES):
            with contextlib.suppress(FileNotFoundError):
                with contextlib.suppress(FileExistsError):
                    folder.parent.mkdir(mode=0o700)
                if cause := why_not_private(folder.parent):
                    raise SpoolUnavailable(
                        f"{folder.parent} is not a private folder of this user: {cause}. Remove it, or "
                        "set spool_dir= or SMDIST_SPOOL_DIR to another folder."
                    )
                folder.mkdir(mode=0o700, exist_ok=exist_ok)
                return
            # Another rank has removed the private root because it was empty.
        raise FileNotFoundError(errno.ENOENT, "other processes keep removing it")
    except OSError as error:
        if error.errno is None:  # raised by a signal handler, such as TimeoutError
            raise
        raise SpoolUnavailable(
            f"cannot create the spool folder {folder}: {error.strerror}. Set spool_dir= or "
            "SMDIST_SPOOL_DIR to a writable folder."
        ) from error


def _make_locked(path: Path) -> int:
    """Create the folder `path`, lock it, and return the descriptor of the lock."""
    for again in range(_MAX_TRIES):
        _make_private(path, exist_ok=again > 0)
        with contextlib.suppress(FileNotFoundError), opened(path) as folder:
            lock = _lock(folder, path)
            if lock >= 0:
                return lock
        time.sleep(0.001)  # another process took the empty folder for a leftover
    raise SpoolUnavailable(
        f"cannot create the spool folder {path}: other processes keep removing it"
    )


def _lock(folder: int, path: Path, flags: int = os.O_CREAT) -> int:
    """Lock the open folder. Return the descriptor, -1 if another process holds the lock."""
    handle = open_in(folder, path / _LOCK, os.O_RDWR | flags)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A lock file that was removed meanwhile locks nothing.
        found = os.stat(_LOCK, dir_fd=folder, follow_symlinks=False)
        if os.path.samestat(os.fstat(handle), found):
            return handle
    except OSError:
        pass
    os.close(handle)
    return -1


def _unlock(handle: int) -> None:
    if handle >= 0:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child may have it open, too
        os.close(handle)


def _has(folder: int, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return bool(os.stat(name, dir_fd=folder, follow_symlinks=False))
    return False


@contextlib.contextmanager
def _creation_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by a signal handler
            raise
        raise SpoolUnavailable(f"cannot create the spool {path}: {error.strerror}") from error


def _write_new(path: Path, info: SpoolInfo) -> None:
    remove_file(path / _NEW)
    handle = open_file(path / _NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(info))


def _publish(path: Path) -> None:
    """Turn the folder into a spool, atomically."""
    (path / _NEW).rename(path / _INFO)


def _read_info(path: Path, name: str) -> SpoolInfo:
    with os.fdopen(open_file(path / name), "rb") as file:
        data = file.read()
    try:
        found = msgspec.json.decode(data)
        # JSON writes infinity as null: use the default instead.
        if isinstance(found, dict) and isinstance(upload := found.get("upload"), dict):
            found["upload"] = {key: value for key, value in upload.items() if value is not None}
        return msgspec.convert(found, SpoolInfo)
    except msgspec.MsgspecError as error:
        raise SpoolUnavailable(f"{path} is not a spool of this version: {error}") from error


class Doorbell:
    """One end of the FIFO. Both ends open it for reading and writing, so neither blocks."""

    def __init__(self, spool: Spool) -> None:
        self._fd = open_file(spool.path / _BELL, os.O_RDWR, stat.S_ISFIFO)  # does not block

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has rung already
            os.write(self._fd, b"!")

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, 4096):
                pass

    def close(self) -> None:
        descriptor, self._fd = self._fd, -1  # first: another file may get that number
        if descriptor >= 0:
            os.close(descriptor)


def no_room(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
