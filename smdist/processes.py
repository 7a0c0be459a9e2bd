"""Find out whether a process still runs, even if its number was given to a later process.

cpu_seconds(pid)             processor time that it has used
start_ticks(pid)             start time, which identifies a process together with its number
is_alive(pid, ticks)         check once
is_stopped(pid)              stopped by SIGSTOP or SIGTSTP
session_members(leader)      the running processes of a session
async with watch_exit(...)   wait by pidfd or, where there is none, by polling
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

__all__ = ["cpu_seconds", "is_alive", "is_stopped", "session_members", "start_ticks", "watch_exit"]

_POLL_S = 0.5
# Fields of /proc/<pid>/stat, counted after the command's name.
_STATE, _SESSION, _USER, _SYSTEM, _START = 0, 3, 11, 12, 19


def _stat(pid: int) -> list[str] | None:
    """Return the fields after the command's name; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # the name may contain spaces and brackets


def start_ticks(pid: int) -> int:
    """Return the start time in clock ticks since boot; 0 without such a process or without /proc."""
    fields = _stat(pid)
    return int(fields[_START]) if fields else 0


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all its threads; 0 without such a process or without /proc."""
    fields = _stat(pid)
    if fields is None:
        return 0.0
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int, ticks: int = 0) -> bool:
    """Check whether the process `pid` that started at `ticks` (0: unknown) still runs.

    A zombie, which has ended and waits for its parent, does not.
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
    """Check whether the process is stopped by a signal (not by a debugger)."""
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
    """Check for threads that outlive the first one: they still hold files and locks."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


@contextlib.asynccontextmanager
async def watch_exit(pid: int, ticks: int, poll_s: float = _POLL_S) -> AsyncIterator[asyncio.Event]:
    """Provide an event that is set once the process has ended. For use in one event loop."""
    gone = asyncio.Event()
    descriptor = _open_pidfd(pid)
    # Check after opening: from now on the descriptor cannot refer to a later process.
    if not is_alive(pid, ticks):
        gone.set()
    loop = asyncio.get_running_loop()
    poll: asyncio.Task[None] | None = None
    if descriptor >= 0:
        loop.add_reader(descriptor, _on_exit, loop, descriptor, gone)
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


def _open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; -1 if there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not supported, no such process, or not permitted
        return -1


def _on_exit(loop: asyncio.AbstractEventLoop, descriptor: int, gone: asyncio.Event) -> None:
    loop.remove_reader(descriptor)  # it stays readable
    gone.set()


async def _poll(pid: int, ticks: int, poll_s: float, gone: asyncio.Event) -> None:
    while is_alive(pid, ticks):  # noqa: ASYNC110 - nothing would set an event
        await asyncio.sleep(poll_s)
    gone.set()
