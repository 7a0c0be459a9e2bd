"""The folder a rank and its uploader share: what was captured and is not in the store yet.

    <root>/smdist-<uid>/<place>-<worker>-<pid>-<session>/      0700
        spool.json       SpoolInfo: all an uploader needs to go on, whoever starts it
        arena-0          captured bytes                    (workers/arena.py)
        journal-000000   what was captured, in order       (workers/journal.py)
        ledger           what is safely in the store       (workers/ledger.py)
        doorbell         a FIFO: "look at the journal"
        lock             held by the one uploader

The training process creates it, the uploader removes it once everything is in the store. When
memory (`/dev/shm`) runs out of room, arenas and journal files go to `info.overflow`, on disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from smdist.errors import SpoolUnavailable
from smdist.identity import worker_name
from smdist.manifest import Run, Session

__all__ = [
    "REHEARSAL",
    "UNKNOWN_ATTEMPT",
    "Doorbell",
    "Entry",
    "Spool",
    "SpoolBusy",
    "SpoolInfo",
    "UploadOptions",
    "private_root",
    "spool_name",
    "sweep_rehearsals",
]

REHEARSAL = "rehearsal"  # in the place of a run's id, which is hexadecimal
UNKNOWN_ATTEMPT = -1
_MOST_TRIES = 1000  # against others that remove what is empty: each takes microseconds


class UploadOptions(msgspec.Struct, frozen=True):
    linger_s: float = 2.0
    segment_bytes: int = 32 << 20
    heartbeat_s: float = 5.0
    drain_deadline_s: float = 900.0  # how long to keep trying after the training process is gone
    nice: int = 5
    attach_bytes: int = 0  # segments up to this size may travel in their manifest


class Entry(msgspec.Struct, frozen=True):
    """What the rank's entering of the run depends on, beside its session (workers/enrol.py)."""

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
    # Folder for what does not fit beside this file, in a private root; made when needed.
    overflow: str
    entry: Entry | None = None
    entered: bool = False  # the store has been given run and session
    place: str = ""  # `out_dir` with what the environment had to say of it; no secrets
    profile: str = ""  # AWS_PROFILE of the training process


class SpoolBusy(SpoolUnavailable):
    """Another uploader works on this spool."""


def spool_name(info: SpoolInfo) -> str:
    session = info.session
    worker = worker_name(session.rank)
    return f"{info.run.run_id}-{worker}-{info.trainer_pid}-{session.session[:8]}"


def private_root(root: Path) -> Path:
    """`<root>/smdist-<uid>`, ours alone: a shared tmpfs is open to everybody on the machine."""
    return root / f"smdist-{os.geteuid()}"


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise SpoolUnavailable(
            f"{folder} is not a private folder of this user; remove it, or give another place with "
            "spool_dir= or SMDIST_SPOOL_DIR"
        )


def _make_private(folder: Path, *, exist_ok: bool = False) -> None:
    """Make `<root>/smdist-<uid>/<name>`, for us alone."""
    try:
        # Apart from the rest: that this cannot be made is nobody's doing.
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MOST_TRIES):
            with contextlib.suppress(FileNotFoundError):
                with contextlib.suppress(FileExistsError):
                    folder.parent.mkdir(mode=0o700)
                _check_private(folder.parent)
                folder.mkdir(mode=0o700, exist_ok=exist_ok)
                return
            # Another rank removed the private root, as it does whenever it finds it empty.
        raise FileNotFoundError(errno.ENOENT, "it is removed again and again")
    except OSError as error:
        raise SpoolUnavailable(
            f"cannot make the spool folder {folder}: {error.strerror}; give a writable directory "
            "with spool_dir= or SMDIST_SPOOL_DIR"
        ) from error


def _make_locked(path: Path) -> int:
    """Make the folder `path` and hold its lock: the descriptor."""
    for _ in range(_MOST_TRIES):
        _make_private(path)
        with contextlib.suppress(OSError):  # a sweeper was quicker than our lock
            handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _locks(handle) and (path / "lock").exists():
                return handle
            os.close(handle)
        shutil.rmtree(path, ignore_errors=True)
    raise SpoolUnavailable(f"cannot make the spool folder {path}: it is removed again and again")


def _locks(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep_rehearsals(folder: Path) -> None:
    """Remove what processes that were killed at their very start left in that private root."""
    left: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # the last spool that goes takes the folder along
        left.extend(folder.glob(f"{REHEARSAL}-*"))
    for path in left:
        with contextlib.suppress(OSError):  # somebody else removes it
            handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _locks(handle):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


class Spool:
    def __init__(self, path: Path, info: SpoolInfo) -> None:
        self.path = path
        self.info = info

    @classmethod
    def create(cls, info: SpoolInfo, root: Path) -> Spool:
        """Called once by the training process, before its uploader starts."""
        path = private_root(root) / spool_name(info)
        _make_private(path)
        try:
            os.mkfifo(path / "doorbell", 0o600)
            # Last, and at once: a folder is a spool from then on, for whoever looks for spools.
            _write_info(path, info)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise SpoolUnavailable(f"cannot make the spool {path}: {error.strerror}") from error
        return cls(path, info)

    @classmethod
    @contextlib.contextmanager
    def rehearsed(cls, info: SpoolInfo, root: Path) -> Iterator[Spool]:
        """A folder like that of a spool, for as long as the block lasts; nobody takes it for one.

        Whoever is killed in the block leaves it to `sweep_rehearsals`, and frees its lock by that.
        """
        sweep_rehearsals(private_root(root))
        path = private_root(root) / spool_name(info)
        handle = _make_locked(path)
        spool = cls(path, info)
        try:
            os.mkfifo(path / "doorbell", 0o600)
            yield spool
        finally:
            spool.remove()
            os.close(handle)

    @classmethod
    def open(cls, path: Path) -> Spool:
        try:
            data = (path / "spool.json").read_bytes()
        except OSError as error:
            raise SpoolUnavailable(f"{path} is not a spool: {error.strerror}") from error
        try:
            return cls(path, msgspec.json.decode(data, type=SpoolInfo))
        except msgspec.DecodeError as error:
            raise SpoolUnavailable(f"{path} is not a spool of this version: {error}") from error

    def enter(self, run: Run, session: Session) -> None:
        """The rank has entered the run. By who holds the lock."""
        facts = {"run": run, "session": session, "entered": True}
        self.info = msgspec.structs.replace(self.info, **facts)
        # Without room for it, whoever comes next enters again, and finds this session there.
        with contextlib.suppress(OSError):
            _write_info(self.path, msgspec.structs.replace(Spool.open(self.path).info, **facts))

    def elders(self) -> list[Spool]:
        """Of the same rank and place and from before this one, with nobody in the run for them yet."""
        found = []
        name = f"{self.info.run.run_id}-{worker_name(self.info.session.rank)}-*"
        for path in self.path.parent.glob(f"{name}/spool.json"):
            with contextlib.suppress(SpoolUnavailable):
                found.append(Spool.open(path.parent))
        mine = self.info.session.started
        return [
            spool
            for spool in found
            if spool.info.entry is not None
            and not spool.info.entered
            and spool.info.session.started < mine
        ]

    @property
    def overflow(self) -> Path:
        return Path(self.info.overflow)

    @property
    def places(self) -> tuple[Path, ...]:
        """Folders that hold arenas and journal files: this one, and the overflow if there is one."""
        return (self.path, self.overflow) if self._has_overflow() else (self.path,)

    def _has_overflow(self) -> bool:
        """An empty `info.overflow` is none, not the current directory; it may be this very folder."""
        return bool(self.info.overflow) and self.overflow != self.path and self.overflow.is_dir()

    def make_overflow(self) -> Path:
        if not self.info.overflow:
            raise SpoolUnavailable(f"no room in {self.path}, and no other place is set")
        _make_private(self.overflow, exist_ok=True)
        return self.overflow

    def find(self, name: str) -> Path:
        for place in self.places:
            if (place / name).exists():
                return place / name
        raise SpoolUnavailable(f"the spool {self.path} has no {name}")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held by the one process that uploads from this spool; freed by the kernel if it dies."""
        try:
            handle = (self.path / "lock").open("w")
        except FileNotFoundError as error:
            raise SpoolUnavailable(f"the spool {self.path} is gone") from error
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise SpoolBusy(f"another uploader works on {self.path}") from error
            if not (self.path / "spool.json").exists():  # removed between open and flock
                raise SpoolUnavailable(f"the spool {self.path} is gone")
            yield

    def remove(self) -> None:
        """Can be repeated if it is interrupted: what makes the folder a spool goes last."""
        folders = [self.path.parent]
        if self._has_overflow():
            shutil.rmtree(self.overflow, ignore_errors=True)
            folders.append(self.overflow.parent)
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if entry.name not in ("spool.json", "lock"):
                with contextlib.suppress(OSError):
                    entry.unlink()
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _write_info(path: Path, info: SpoolInfo) -> None:
    (path / "spool.new").write_bytes(msgspec.json.encode(info))
    (path / "spool.new").rename(path / "spool.json")


class Doorbell:
    """Either end of the FIFO. Both open it for reading and writing: no end can block or break."""

    def __init__(self, spool: Spool) -> None:
        self._fd = os.open(spool.path / "doorbell", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

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
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def no_room(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
