from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smdist import processes
from smdist.processes import is_alive, is_stopped, start_ticks, watch_exit


def start_sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_this_process_is_alive() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks > 0
    assert is_alive(os.getpid())
    assert is_alive(os.getpid(), ticks)
    assert not is_alive(os.getpid(), ticks + 1), "another process of the same number"


def test_zombie_is_not_alive() -> None:
    process = start_sleeper()
    assert is_alive(process.pid, start_ticks(process.pid))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process.pid)
    end(process)
    assert not is_alive(process.pid)
    assert start_ticks(process.pid) == 0


@pytest.mark.parametrize("by", ["pidfd", "polling"])
def test_exit_sets_the_event(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "polling":
        monkeypatch.setattr(processes, "_open_pidfd", lambda _pid: -1)
    process = start_sleeper()

    async def watch() -> None:
        async with watch_exit(process.pid, start_ticks(process.pid), poll_s=0.01) as gone:
            assert not gone.is_set()
            process.kill()
            await asyncio.wait_for(gone.wait(), 60)

    asyncio.run(watch())
    end(process)


def pidfds() -> set[str]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this listing itself
            if "pidfd" in os.readlink(path):
                found.add(path.name)
    return found


@pytest.mark.parametrize("by", ["pidfd", "polling"])
def test_leaving_before_the_exit_leaks_nothing(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "polling":
        monkeypatch.setattr(processes, "_open_pidfd", lambda _pid: -1)
    before = pidfds()

    async def watch() -> None:
        async with watch_exit(os.getpid(), 0, poll_s=0.01) as gone:
            await asyncio.sleep(0)
            assert not gone.is_set()
            assert len(pidfds()) == len(before) + (by == "pidfd")

    asyncio.run(watch())
    assert pidfds() == before


def test_earlier_exit_sets_the_event_at_once() -> None:
    process = start_sleeper()
    ticks = start_ticks(process.pid)
    end(process)

    async def watch(pid: int, ticks: int) -> bool:
        async with watch_exit(pid, ticks) as gone:
            return gone.is_set()

    assert asyncio.run(watch(process.pid, ticks))
    assert asyncio.run(watch(os.getpid(), start_ticks(os.getpid()) + 1)), "the number was reused"


def test_stopped_process_is_distinguished_from_a_waiting_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 60
            while not is_stopped(process.pid):
                assert time.monotonic() < deadline
            assert is_alive(process.pid)
            process.send_signal(signal.SIGCONT)
            while is_stopped(process.pid):
                assert time.monotonic() < deadline
        finally:
            process.kill()
    assert not is_stopped(process.pid)
