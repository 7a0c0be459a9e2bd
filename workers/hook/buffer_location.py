"""Choose the default size of the capture buffer, and where it is kept.

    buffer = free memory / 8 / ranks on this machine, between 64 MiB and 4 GiB, in whole MiB

Free memory is what the kernel reports (`MemAvailable`), or what a control group of this process allows if
that is less: shared memory counts against a container's limit. Page cache that can be dropped counts as
free. A rank that does not know how many ranks share its machine assumes all of the world, up to the number
of processors.

The buffer is in `/dev/shm` if all ranks of the machine together fill at most half of the free space there:
data loaders use it too, and die when it is full. Otherwise it is on disk, with one message. A place is
skipped where the folder for it belongs to another user.
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
_SHARE = 8  # of free memory, as a divisor
_UNKNOWN_FREE_BYTES = 4096 * MIB  # where the kernel does not report it
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
    """Compute the formula at the head of this module."""
    ranks = max(1, local_world_size or min(world_size, processors))
    share = facts.free_bytes // _SHARE // ranks // MIB * MIB
    return min(max(share, SMALLEST_BUFFER_BYTES), LARGEST_BUFFER_BYTES)


def read_memory(root: Path = Path("/")) -> MemoryFacts:
    """Read free memory from /proc and the control groups, which are mounted under `root`."""
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
    """Yield a group and those above it: the limits of all of them apply.

    In a container the path may be the host's and not exist here. The mount itself is then the container's
    group.
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
    """`root` holds the spool; what does not fit there goes to `overflow`, on disk."""

    root: Path
    overflow: Path
    kind: Literal["memory", "disk", "given"]
    message: str | None


def free_bytes(path: Path) -> int | None:
    """Return the free space where `path` is or would be made; None if this process may not write there."""
    existing = next((p for p in (path, *path.parents) if p.exists()), None)
    if existing is None or not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return None
    return shutil.disk_usage(existing).free


def _given(spool_dir: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of the setting that gives the place, and the place; empty if none is given."""
    if spool_dir:
        return "spool_dir", spool_dir
    return "SMDIST_SPOOL_DIR", environ.get("SMDIST_SPOOL_DIR", "")


def check_spool(spool_dir: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigurationError if no folder can be made in the place that is given, if one is.

    A full file system passes: there may be room when it is needed, and otherwise that is reported then.
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
            if _can_make_folder(place, may_reappear=place is own):
                break
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and no_room(error):
            return
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"{name}={given!r} cannot hold the buffer: {why}; use a directory that this process can "
            "make and write to, or omit it"
        ) from error


def _can_make_folder(place: Path, *, may_reappear: bool) -> bool:
    """Make a folder in `place` and remove it; False if `place` does not exist.

    The private root may have reappeared meanwhile: it is removed with its last spool, and the next spool
    makes it again.
    """
    try:
        Path(tempfile.mkdtemp(prefix=".smdist-", dir=place)).rmdir()
    except FileNotFoundError:
        if place.is_symlink() or (place.exists() and not may_reappear):  # dangling; or as in /proc
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
    """Choose where a buffer of this size goes: `spool_dir` before the environment before the default.

    Never fails, but making the folder there may. `why_not_private` returns why a private root cannot be used.
    """
    needed = buffer_bytes * max(1, local_world_size or 1)
    name, given = _given(spool_dir, environ)
    if given:
        root = Path(given).expanduser().absolute()
        free = free_bytes(root)
        message = None
        if free is None:
            message = f"{name}={given} is not a directory that this process can write to"
        elif free < needed:
            message = (
                f"{name}={given} has {_mib(free)} free; the buffers of this machine's ranks may need "
                f"{_mib(needed)}"
            )
        return Placement(root, root, "given", message)
    disk = _disk(needed, environ, free_bytes, why_not_private)
    if cause := why_not_private(private_root(_MEMORY)):
        message = (
            f"{cause}. The buffer is in {disk} instead, which may be slower. Have it removed, or set "
            "SMDIST_SPOOL_DIR."
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
        f"{_MEMORY} {has}; the buffers of this machine's ranks need {_mib(2 * needed)}. The buffer is in "
        f"{disk} instead, which may be slower. Raise the shared memory, lower buffer_bytes, or set "
        "SMDIST_SPOOL_DIR.",
    )


def _disk(
    needed: int,
    environ: Mapping[str, str],
    free_bytes: Callable[[Path], int | None],
    why_not_private: Callable[[Path], str],
) -> Path:
    # /var/tmp before /tmp: it outlives a reboot and is rarely in memory itself.
    paths = [Path(name) for name in (environ.get("TMPDIR"), "/var/tmp", "/tmp") if name]
    own = [path for path in paths if not why_not_private(private_root(path))]
    frees = [(free_bytes(path) or 0, path) for path in own or paths]
    fitting = [path for free, path in frees if free >= needed]
    return fitting[0] if fitting else max(frees, key=lambda pair: pair[0])[1]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"
