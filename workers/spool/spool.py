"""The folder a rank and its uploader share: what was captured and is not in the store yet.

    <root>/smdist-<uid>/<place>-<worker>-<pid>-<session>/      0700
        spool.json       SpoolInfo: all an uploader needs to go on, whoever starts it
        arena-0          captured bytes                    (workers/capture/arena.py)
        journal-000000   what was captured, in order       (workers/spool/journal.py)
        ack_page           what is safely in the store       (workers/spool/ack_page.py)
        doorbell         a FIFO: "look at the journal"
        lock             held by its maker, then by the one uploader

The training process creates it, the uploader removes it once everything is in the store. When
memory (`/dev/shm`) runs out of room, arenas and journal files go to `info.overflow`, on disk.

`spool.json` comes last and goes first of what makes a spool, by one rename and one unlink. A folder
without it that nobody has locked is a leftover: of a process that was killed while it made the spool,
or of an uploader that was killed while it removed it. `sweep` removes those. Whatever is read here is
checked to be this user's own (workers/spool/private_files.py).
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
    refusal,
    remove_empty,
    remove_file,
    remove_folder,
)

__all__ = [
    "UNKNOWN_ATTEMPT",
    "Doorbell",
    "Entry",
    "Spool",
    "SpoolInfo",
    "UploadOptions",
    "spool_name",
    "sweep",
    "sweep_one",
]

UNKNOWN_ATTEMPT = -1
_MOST_TRIES = 1000  # against others that remove what is empty: each takes microseconds
_OVERFLOW = "-overflow"
_INFO, _NEW, _LOCK, _BELL = "spool.json", "spool.new", "lock", "doorbell"
_PART = re.compile(
    r"spool\.new|lock|doorbell|ack_page|uploader\.log|(arena|journal)-\d+|\.nfs[0-9a-f]+"
)


class UploadOptions(msgspec.Struct, frozen=True):
    linger_s: float = 2.0
    segment_bytes: int = 32 << 20
    heartbeat_s: float = 5.0
    drain_deadline_s: float = 900.0  # how long to keep trying after the training process is gone
    nice: int = 5
    attach_bytes: int = 0  # segments up to this size may travel in their manifest


class Entry(msgspec.Struct, frozen=True):
    """What the rank's entering of the run depends on, beside its session (workers/join/enrolment.py)."""

    began: float  # when the training process started
    resume: bool
    framework: str
    attempt: int | None  # asked for


class SpoolInfo(msgspec.Struct, frozen=True):
    """While `entry` is there and `entered` is not, the run is known by nothing but a name for its
    place, and the session has no attempt."""

    run: Run
    session: Session
    out_dir: str
    upload: UploadOptions
    trainer_pid: int
    trainer_start: int  # start time of the process in clock ticks, 0 when unknown
    # Folder for what does not fit beside this file; `Spool.made` names it, and it is made when needed.
    overflow: str = ""
    entry: Entry | None = None
    entered: bool = False  # the store has been given run and session
    place: str = ""  # `out_dir` with what the environment had to say of it; no secrets
    profile: str = ""  # AWS_PROFILE of the training process


def spool_name(info: SpoolInfo) -> str:
    session = info.session
    worker = worker_name(session.rank)
    return f"{info.run.run_id}-{worker}-{info.trainer_pid}-{session.session[:8]}"


def sweep(root: Path) -> None:
    """Remove leftovers from a private root."""
    for folder in list_folders(root):
        sweep_one(folder)


def sweep_one(folder: Path) -> bool:
    """Remove `folder` if it is a leftover; whether it was one.

    One that is being made, or removed, is locked, or empty. Whoever has just made an empty one finds
    it gone, and makes another.
    """
    if not is_private_name(folder) or folder.name.endswith(_OVERFLOW):
        return False
    with contextlib.suppress(OSError), opened(folder) as handle:
        names = os.listdir(handle)
        if not all(_PART.fullmatch(name) for name in names):
            return False
        if not names:
            remove_empty(folder)
            return True
        # None is put where one has just been removed: that was the last thing in it.
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
        """SpoolUnavailable if `info` names an overflow that is not that of a spool at `path`."""
        self.path = path
        self.info = info
        self.overflow = Path(info.overflow)
        if info.overflow and not (
            is_private_name(self.overflow) and self.overflow.name == f"{path.name}{_OVERFLOW}"
        ):
            raise SpoolUnavailable(
                f"{path} is not a spool: it names {info.overflow} as its own, which it cannot be: "
                "nothing is sent or removed; remove it if you did not make it"
            )

    @classmethod
    def at(cls, info: SpoolInfo, root: Path, overflow: Path | None = None) -> Spool:
        """Return the spool that `made` makes, whether it is there or not."""
        path = private_root(Path(os.path.abspath(root))) / spool_name(info)
        if overflow is not None:
            beside = private_root(Path(os.path.abspath(overflow))) / f"{path.name}{_OVERFLOW}"
            info = msgspec.structs.replace(info, overflow=str(beside))
        return cls(path, info)

    @classmethod
    @contextlib.contextmanager
    def made(cls, info: SpoolInfo, root: Path, overflow: Path | None = None) -> Iterator[Spool]:
        """A folder in `root` that becomes a spool when the block ends, and is removed if that fails.

        What does not fit there goes to a folder in `overflow`, which is another root.
        Called once by the training process, before its uploader starts. Nobody takes the folder for a
        spool before that: once there is one, whoever sends it enters the run for this rank. Who is
        killed in the block leaves it to `sweep`.
        """
        spool = cls.at(info, root, overflow)
        sweep(spool.path.parent)
        lock = _make_locked(spool.path)
        try:
            with _told(spool.path):
                _write_new(spool.path, spool.info)
                os.mkfifo(spool.path / _BELL, 0o600)
            yield spool
            with _told(spool.path):
                _publish(spool.path)
        except BaseException:
            spool.remove()
            raise
        finally:
            _unlock(lock)

    @classmethod
    def create(cls, info: SpoolInfo, root: Path, overflow: Path | None = None) -> Spool:
        """Made at once, by who needs nothing in it first."""
        with cls.made(info, root, overflow) as spool:
            return spool

    @classmethod
    def open(cls, path: Path) -> Spool:
        """The spool at `path`. NotPrivate if it, or anything in it, is not this user's alone."""
        path = Path(os.path.abspath(path))
        if not is_private_name(path):
            own = private_root(Path()).name
            raise SpoolUnavailable(f"{path} is not a spool: those lie in folders called {own}")
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
        """The rank has entered the run. By who holds the lock."""
        facts = {"run": run, "session": session, "entered": True}
        self.info = msgspec.structs.replace(self.info, **facts)
        # Without room for it, whoever comes next enters again, and finds this session there.
        with contextlib.suppress(OSError):
            _write_new(self.path, msgspec.structs.replace(_read_info(self.path, _INFO), **facts))
            _publish(self.path)

    def earlier_spools(self) -> list[Spool]:
        """Of the same rank and place and from before this one, with nobody in the run for them yet."""
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
        """Folders that hold arenas and journal files: this one, and the overflow if there is one."""
        has_overflow = bool(self.info.overflow) and os.path.lexists(self.overflow)
        return (self.path, self.overflow) if has_overflow else (self.path,)

    def make_overflow(self) -> Path:
        if not self.info.overflow:
            raise SpoolUnavailable(f"no room in {self.path}, and no other place is set")
        _make_private(self.overflow, exist_ok=True)
        with opened(self.overflow):
            return self.overflow

    def names(self) -> list[str]:
        """Of the files in all places."""
        return [name for place in self.places for name in check_files(place, pipe=_BELL)]

    def open_for_reading(self, name: str) -> BinaryIO:
        """Open a file of the spool, wherever it is."""
        for place in self.places:
            with contextlib.suppress(FileNotFoundError):
                return os.fdopen(open_file(place / name), "rb")
        raise SpoolUnavailable(f"the spool {self.path} has no {name}")

    def discard(self, name: str) -> None:
        """Remove a file of the spool, wherever it is."""
        for place in self.places:
            remove_file(place / name)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held by the one process that uploads from this spool; freed by the kernel if it dies."""
        try:
            with opened(self.path) as folder:
                lock, is_spool = _lock(folder, self.path), _has(folder, _INFO)
        except FileNotFoundError as error:
            raise SpoolUnavailable(f"the spool {self.path} is gone") from error
        try:
            if not is_spool:  # removed before we had the lock
                raise SpoolUnavailable(f"the spool {self.path} is gone")
            if lock < 0:
                raise SpoolBusy(f"another uploader works on {self.path}")
            yield
        finally:
            _unlock(lock)

    def remove(self) -> None:
        """Can be repeated if it is interrupted: what makes the folder a spool goes last, with its lock
        held until it is none."""
        if self.info.overflow:
            remove_folder(self.overflow)
        remove_folder(self.path, (_INFO, _LOCK))


def _make_private(folder: Path, *, exist_ok: bool = False) -> None:
    """Make `<root>/smdist-<uid>/<name>`, for us alone."""
    try:
        # Apart from the rest: that this cannot be made is nobody's doing.
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MOST_TRIES):
            with contextlib.suppress(FileNotFoundError):
                with contextlib.suppress(FileExistsError):
                    folder.parent.mkdir(mode=0o700)
                if cause := refusal(folder.parent):
                    raise SpoolUnavailable(
                        f"{folder.parent} is not a private folder of this user: {cause}; remove it, or "
                        "give another place with spool_dir= or SMDIST_SPOOL_DIR"
                    )
                folder.mkdir(mode=0o700, exist_ok=exist_ok)
                return
            # Another rank removed the private root, as it does whenever it finds it empty.
        raise FileNotFoundError(errno.ENOENT, "it is removed again and again")
    except OSError as error:
        if error.errno is None:  # a signal handler's, such as TimeoutError
            raise
        raise SpoolUnavailable(
            f"cannot make the spool folder {folder}: {error.strerror}; give a writable directory "
            "with spool_dir= or SMDIST_SPOOL_DIR"
        ) from error


def _make_locked(path: Path) -> int:
    """Make the folder `path` and hold its lock: the descriptor."""
    for again in range(_MOST_TRIES):
        _make_private(path, exist_ok=again > 0)
        with contextlib.suppress(FileNotFoundError), opened(path) as folder:
            lock = _lock(folder, path)
            if lock >= 0:
                return lock
        time.sleep(0.001)  # a sweeper was quicker than our lock
    raise SpoolUnavailable(f"cannot make the spool folder {path}: it is removed again and again")


def _lock(folder: int, path: Path, flags: int = os.O_CREAT) -> int:
    """Lock the folder at `path`, which is open: the descriptor, -1 if another process has it."""
    handle = open_in(folder, path / _LOCK, os.O_RDWR | flags)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # One that was removed in the meantime locks nothing any more.
        found = os.stat(_LOCK, dir_fd=folder, follow_symlinks=False)
        if os.path.samestat(os.fstat(handle), found):
            return handle
    except OSError:
        pass
    os.close(handle)
    return -1


def _unlock(handle: int) -> None:
    if handle >= 0:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
        os.close(handle)


def _has(folder: int, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return bool(os.stat(name, dir_fd=folder, follow_symlinks=False))
    return False


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a signal handler's
            raise
        raise SpoolUnavailable(f"cannot make the spool {path}: {error.strerror}") from error


def _write_new(path: Path, info: SpoolInfo) -> None:
    remove_file(path / _NEW)
    handle = open_file(path / _NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(info))


def _publish(path: Path) -> None:
    """At once: a folder is a spool from then on, for whoever looks for spools."""
    (path / _NEW).rename(path / _INFO)


def _read_info(path: Path, name: str) -> SpoolInfo:
    with os.fdopen(open_file(path / name), "rb") as file:
        data = file.read()
    try:
        found = msgspec.json.decode(data)
        # A number that is none, as infinity, is written as null: the default stands for it.
        if isinstance(found, dict) and isinstance(upload := found.get("upload"), dict):
            found["upload"] = {key: value for key, value in upload.items() if value is not None}
        return msgspec.convert(found, SpoolInfo)
    except msgspec.MsgspecError as error:
        raise SpoolUnavailable(f"{path} is not a spool of this version: {error}") from error


class Doorbell:
    """Either end of the FIFO. Both open it for reading and writing: no end can block or break."""

    def __init__(self, spool: Spool) -> None:
        self._fd = open_file(spool.path / _BELL, os.O_RDWR, stat.S_ISFIFO)  # does not block

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._fd, b"!")

    def fileno(self) -> int:
        return self._fd

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, 4096):
                pass

    def close(self) -> None:
        descriptor, self._fd = self._fd, -1  # first: another file may have that number afterwards
        if descriptor >= 0:
            os.close(descriptor)


def no_room(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
