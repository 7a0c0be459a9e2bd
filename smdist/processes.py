"""Is that process still there? Told apart from a later process that was given the same number.

cpu_seconds(pid)             processor time it has used
start_ticks(pid)             what to remember of a process besides its number
alive(pid, ticks)            asked once
stopped(pid)                 held by SIGSTOP or SIGTSTP
async with watching(...)     asked by the kernel (pidfd) or, where there is none, by polling
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

__all__ = ["cpu_seconds", "is_alive", "is_stopped", "session_members", "start_ticks", "watch_exit"]

_POLL_S = 0.5
# fields of /proc/<pid>/stat, counted behind the command's name
_STATE, _SESSION, _USER, _SYSTEM, _START = 0, 3, 11, 12, 19


def _stat(pid: int) -> list[str] | None:
    """Its fields behind the name, None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # the name itself may hold blanks and brackets


def start_ticks(pid: int) -> int:
    """When it started, in clock ticks since boot; 0 when there is no such process or no /proc."""
    fields = _stat(pid)
    return int(fields[_START]) if fields else 0


def cpu_seconds(pid: int) -> float:
    """Of all its threads; 0 when there is no such process or no /proc."""
    fields = _stat(pid)
    if fields is None:
        return 0.0
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int, ticks: int = 0) -> bool:
    """Does the process that was `pid` and started at `ticks` (0: unknown) still run?

    One that has ended and waits for its parent to notice does not.
    """
    fields = _stat(pid)
    if fields is not None:
        if ticks not in (0, int(fields[_START])):
            return False
        return fields[_STATE] not in ("Z", "X") or _has_threads(pid)
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped it, a debugger aside; it is there and does nothing."""
    fields = _stat(pid)
    return fields is not None and fields[_STATE] == "T"


def session_members(leader: int, since: int = 0) -> list[int]:
    """Return the running processes of a session that started at or after `since` (in ticks)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if not fields or fields[_STATE] in ("Z", "X") or int(fields[_SESSION]) != leader:
            continue
        if int(fields[_START]) >= since:
            found.append(int(entry.name))
    return found


def _has_threads(pid: int) -> bool:
    """Its first thread has ended; others may still be on their way out, with its files and locks."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


@contextlib.asynccontextmanager
async def watch_exit(pid: int, ticks: int, poll_s: float = _POLL_S) -> AsyncIterator[asyncio.Event]:
    """An event that is set once that process is gone. Used within one event loop."""
    gone = asyncio.Event()
    descriptor = _open(pid)
    # Only now: from here on the descriptor cannot mean a later process of the same number.
    if not is_alive(pid, ticks):
        gone.set()
    loop = asyncio.get_running_loop()
    poll: asyncio.Task[None] | None = None
    if descriptor >= 0:
        loop.add_reader(descriptor, _told, loop, descriptor, gone)
    else:
        poll = loop.create_task(_poll(pid, ticks, poll_s, gone))
    try:
        yield gone
    finally:
        if poll is not None:
            poll.cancel()
            await asyncio.wait([poll])
        if descriptor >= 0:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def _open(pid: int) -> int:
    """A descriptor that becomes readable when the process ends, -1 where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # no such call, no such process, or not permitted
        return -1


def _told(loop: asyncio.AbstractEventLoop, descriptor: int, gone: asyncio.Event) -> None:
    loop.remove_reader(descriptor)  # it stays readable for ever
    gone.set()


async def _poll(pid: int, ticks: int, poll_s: float, gone: asyncio.Event) -> None:
    while is_alive(pid, ticks):  # noqa: ASYNC110 - nothing would set an event
        await asyncio.sleep(poll_s)
    gone.set()
