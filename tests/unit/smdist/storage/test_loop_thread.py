from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from smdist.storage import loop_thread as sync


async def thread_id() -> int:
    await asyncio.sleep(0)
    return threading.get_ident()


def test_all_callers_share_one_loop_thread() -> None:
    found = [sync.run(thread_id())]
    caller = threading.Thread(target=lambda: found.append(sync.run(thread_id())))
    caller.start()
    caller.join()
    assert found[0] == found[1] != threading.get_ident()


def test_errors_come_back_as_they_are() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sync.run(fail())


def test_works_below_a_running_loop_but_not_on_its_own() -> None:
    async def outer() -> int:
        return sync.run(thread_id())

    assert asyncio.run(outer()) != threading.get_ident()

    async def on_the_loop() -> None:
        sync.run(thread_id())

    with pytest.raises(RuntimeError, match="wait for"):
        sync.run(on_the_loop())


SLOW = re.compile(r"Executing <.*> took [\d.]+ seconds")


def python(source: str, folder: Path) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", source, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # With -X dev asyncio also tells what took it long, which says something about the machine.
    errors = [line for line in done.stderr.splitlines(True) if not SLOW.fullmatch(line.rstrip())]
    return done.stdout, "".join(errors)


HEAD = """
import asyncio, atexit, os, sys, threading
from smdist.storage import LocalStore, loop_thread as sync
async def ident():
    return threading.get_ident()
"""


def test_a_forked_child_gets_its_own_loop_and_the_parent_keeps_its(tmp_path: Path) -> None:
    out, err = python(
        HEAD
        + """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of fork with threads, 3.12
before = sync.run(ident())
store = LocalStore(sys.argv[1])
sync.run(store.put("k", [b"v"]))
sync._lock.acquire()  # as another thread may have done: it is not there in the child
child = os.fork()
if child == 0:
    sync.run(store.put("child", [b"v"]))
    sys.exit(0)
sync._lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert sync.run(ident()) == before
print(sync.run(store.list()))
""",
        tmp_path,
    )
    assert out == "['child', 'k']\n"
    assert err == ""


def test_exit_cancels_what_is_under_way_and_is_silent(tmp_path: Path) -> None:
    out, err = python(
        HEAD
        + """
async def forever():
    try:
        await asyncio.sleep(1000)
    finally:
        print("cancelled", flush=True)
async def start():
    global task
    task = asyncio.ensure_future(forever())
    await asyncio.sleep(0)
sync.run(start())
""",
        tmp_path,
    )
    assert out == "cancelled\n"
    assert err == ""


def test_a_last_put_at_exit_still_works(tmp_path: Path) -> None:
    """Executors take no more work then, and no thread can be started."""
    for warm in ("", "sync.run(store.put('k', [b'v']))"):
        out, err = python(
            HEAD
            + f"""
store = LocalStore(sys.argv[1])
{warm}
def last():
    sync.run(store.put("last", [b"v"]))
    print(sync.run(store.get("last")))
atexit.register(last)
""",
            tmp_path,
        )
        assert out == "b'v'\n"
        assert err == ""


def test_work_after_our_own_exit_handler_still_works(tmp_path: Path) -> None:
    out, err = python(
        """
import atexit, sys
def last():
    print(sync.run(store.put("last", [b"v"])))
atexit.register(last)  # before ours, so it runs after it
from smdist.storage import LocalStore, loop_thread as sync
store = LocalStore(sys.argv[1])
sync.run(store.put("k", [b"v"]))
""",
        tmp_path,
    )
    assert out == "None\n"
    assert err == ""


def test_ctrl_c_interrupts_and_cancels() -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            HEAD
            + """
done = threading.Event()
async def forever():
    try:
        print("waiting", flush=True)
        await asyncio.sleep(1000)
    finally:
        done.set()
try:
    sync.run(forever())
except KeyboardInterrupt:
    assert done.wait(10)
    print("interrupted", sync.run(ident()) > 0)
""",
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert out == "interrupted True\n"
    assert process.returncode == 0


def test_what_is_kept_is_closed_when_its_owner_goes_and_at_exit() -> None:
    code = (
        HEAD
        + """
import gc
class Owner: pass
def close_of(name):
    async def close():
        print(name, threading.current_thread().name, flush=True)
    return close
first, second = Owner(), Owner()
sync.close_with(first, close_of("collected"))
sync.close_with(second, close_of("at exit"))
sync.run(ident())
del first
gc.collect()
sync.run(ident())
print("end", flush=True)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "collected smdist-loop\nend\nat exit smdist-loop\n"
    assert done.stderr == ""
