"""How large the capture buffer is by default, and where it lives.

    buffer = free memory / 8 / ranks on this machine, between 64 MiB and 4 GiB, in whole MiB

Free memory is what the kernel would give (`MemAvailable`), or less where a control group of this
process allows less: shared memory counts against a container's limit, so the buffer must fit into
it. Page cache that can be dropped counts as free. A rank that does not know how many share its
machine assumes as many as the world has, up to the number of processors.

The buffer lives in `/dev/shm` if all ranks here together fill at most half of what is free there:
data loaders use it too, and die when it is full. Else it lives on disk, with one message. A place where
the folder for it is not this user's own is passed over.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smdist.errors import ConfigurationError
from smdist.workers.spool.private_files import private_root, why_not_private
from smdist.workers.spool.spool import no_room

__all__ = [
    "MemoryFacts",
    "Placement",
    "check_spool",
    "choose_spool",
    "default_buffer_bytes",
    "free_bytes",
    "read_memory",
]

MIB = 1 << 20
SMALLEST_BUFFER_BYTES = 64 * MIB
LARGEST_BUFFER_BYTES = 4096 * MIB
_SHARE = 8
_UNKNOWN_FREE_BYTES = 4096 * MIB  # where no kernel tells
_NO_LIMIT = 1 << 60  # version 1 of control groups writes a huge number for "none"
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    available_bytes: int | None  # of the machine
    allowed_bytes: int | None  # what the control groups leave; None without a limit

    @property
    def free_bytes(self) -> int:
        known = [n for n in (self.available_bytes, self.allowed_bytes) if n is not None]
        return max(0, min(known, default=_UNKNOWN_FREE_BYTES))


def default_buffer_bytes(
    facts: MemoryFacts, local_world_size: int | None, world_size: int = 1, processors: int = 1
) -> int:
    """The formula at the head of this module."""
    ranks = max(1, local_world_size or min(world_size, processors))
    share = facts.free_bytes // _SHARE // ranks // MIB * MIB
    return min(max(share, SMALLEST_BUFFER_BYTES), LARGEST_BUFFER_BYTES)


def read_memory(root: Path = Path("/")) -> MemoryFacts:
    """What /proc and the control groups say. `root` is where they are mounted."""
    available = _field(root / "proc/meminfo", "MemAvailable:")
    left = [n for n in _left_in_groups(root) if n is not None]
    return MemoryFacts(
        None if available is None else available * 1024, max(0, min(left)) if left else None
    )


def _left_in_groups(root: Path) -> Iterator[int | None]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                for group in _upward(root / mount, path):
                    yield _left(group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for group in _upward(root / "sys/fs/cgroup/memory", path):
                yield _left(
                    group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                )


def _upward(mount: Path, path: str) -> Iterator[Path]:
    """A group and those above it, as a limit of any of them holds.

    In a container the path may be the host's, which does not exist here: the mount itself is then
    the container's group.
    """
    group = mount / path.lstrip("/")
    while group != mount:
        yield group
        group = group.parent
    yield mount


def _left(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= _NO_LIMIT:
        return None
    return limit - usage + (_field(group / "memory.stat", cache_name) or 0)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


# -- where -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """`root` holds the spool; what finds no room there goes to `overflow`, on disk."""

    root: Path
    overflow: Path
    kind: Literal["memory", "disk", "given"]
    message: str | None


def free_bytes(path: Path) -> int | None:
    """Free space where `path` is or would be made; None where this process may not write."""
    existing = next((p for p in (path, *path.parents) if p.exists()), None)
    if existing is None or not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return None
    return shutil.disk_usage(existing).free


def _given(spool_dir: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """What names the place, and the place; empty if nobody gave one."""
    if spool_dir:
        return "spool_dir", spool_dir
    return "SMDIST_SPOOL_DIR", environ.get("SMDIST_SPOOL_DIR", "")


def check_spool(spool_dir: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigurationError if no folder can be made in the place that was given, if one was.

    A full file system passes: there may be room by the time it is needed, and if not it is told.
    """
    name, given = _given(spool_dir, environ)
    if not given:
        return
    try:
        root = Path(given).expanduser().absolute()
        own = private_root(root)
        if cause := why_not_private(own):
            raise ValueError(cause)
        for place in (own, root, *root.parents):
            if _takes_a_folder(place, fleeting=place is own):
                break
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and no_room(error):
            return
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"{name}={given!r} is no place to buffer in: {why}; give a directory that this process "
            "can make and write to, or leave it out"
        ) from error


def _takes_a_folder(place: Path, *, fleeting: bool) -> bool:
    """False if it is not there. A fleeting one may be back already: the last spool takes the folder
    of all spools along, and the next one makes it anew."""
    try:
        Path(tempfile.mkdtemp(prefix=".smdist-", dir=place)).rmdir()
    except FileNotFoundError:
        if place.is_symlink() or (place.exists() and not fleeting):  # to nowhere; as in /proc
            raise
        return False
    except NotADirectoryError:
        if os.path.lexists(place):
            raise
        return False
    return True


def choose_spool(
    buffer_bytes: int,
    environ: Mapping[str, str] = os.environ,
    free_bytes: Callable[[Path], int | None] = free_bytes,
    local_world_size: int | None = None,
    spool_dir: str | None = None,
    why_not_private: Callable[[Path], str] = why_not_private,
) -> Placement:
    """Where a buffer of this size goes: `spool_dir` if it is given, which wins over the environment.

    Never fails: making the folder there may. `why_not_private` says why a private root cannot be used.
    """
    needed = buffer_bytes * max(1, local_world_size or 1)
    name, given = _given(spool_dir, environ)
    if given:
        root = Path(given).expanduser().absolute()
        free = free_bytes(root)
        message = None
        if free is None:
            message = f"{name}={given} is not a directory this process can write to"
        elif free < needed:
            message = (
                f"{name}={given} has {_mib(free)} free, less than the {_mib(needed)} "
                "that the buffers of the ranks on this machine can take"
            )
        return Placement(root, root, "given", message)
    disk = _disk(needed, environ, free_bytes, why_not_private)
    if cause := why_not_private(private_root(_MEMORY)):
        message = (
            f"{cause}; captured tensors wait in {disk} instead, which can be slower. Have it removed, "
            "or set SMDIST_SPOOL_DIR"
        )
        return Placement(disk, disk, "disk", message)
    shared = free_bytes(_MEMORY)
    if shared is not None and 2 * needed <= shared:
        return Placement(_MEMORY, disk, "memory", None)
    has = "cannot be used" if shared is None else f"has {_mib(shared)} free"
    return Placement(
        disk,
        disk,
        "disk",
        f"{_MEMORY} {has}, and the buffers of the ranks on this machine want {_mib(2 * needed)}; "
        f"captured tensors wait in {disk} instead, which can be slower. Give the machine or "
        "container more shared memory, make the buffer smaller, or set SMDIST_SPOOL_DIR",
    )


def _disk(
    needed: int,
    environ: Mapping[str, str],
    free_bytes: Callable[[Path], int | None],
    why_not_private: Callable[[Path], str],
) -> Path:
    # /var/tmp before /tmp: it outlives a reboot and is rarely in memory itself.
    paths = [Path(name) for name in (environ.get("TMPDIR"), "/var/tmp", "/tmp") if name]
    ours = [path for path in paths if not why_not_private(private_root(path))]
    frees = [(free_bytes(path) or 0, path) for path in ours or paths]
    fitting = [path for free, path in frees if free >= needed]
    return fitting[0] if fitting else max(frees, key=lambda pair: pair[0])[1]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"
