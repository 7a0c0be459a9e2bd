"""The processes that the demo starts, each ended when its block is left, by whatever way."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from smdist.coordination.ray_actor import local_head
from smdist.coordinator import CoordinatorClient, Settings, attach, start

__all__ = ["BUCKET", "coordinator", "job", "s3_server"]

BUCKET = "demo"
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}


@contextlib.contextmanager
def s3_server(out: Path) -> Iterator[str]:
    """Run a real S3 server on the loopback interface; yield its URL. Objects are files below `out/s3`."""
    data = out / "s3"
    (data / BUCKET).mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Whatever credentials this machine has are not for this server, and the other way round.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(_CREDENTIALS)
    program = Path(sys.executable).with_name("rclone")
    command = [str(program) if program.exists() else "rclone", "serve", "s3", str(data)]
    command += ["--addr", f"127.0.0.1:{port}", "--auth-key", ",".join(_CREDENTIALS.values())]
    command += ["--config", os.devnull, "--poll-interval", "0"]
    with _running(command, out / "s3.log") as server:
        _await_port(port, server, out / "s3.log")
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def coordinator(watch: str) -> Iterator[CoordinatorClient]:
    """Run a Ray for the demo, and on it the coordinator of the place `watch`."""
    home = tempfile.mkdtemp(prefix="smdemo-", dir="/tmp")  # short: Ray makes sockets below it
    os.environ["SMDIST_RAY_DIR"] = home
    try:
        with attach("local") as ray:
            client = start(ray, Settings(watch, interval_s=0.3))
            yield client
            client.stop()
    finally:
        with _undisturbed():
            local_head.stop()
            shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def job(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job. Uploaders outlive their ranks by design: the block ends when they have ended, too."""
    # Adopt them, to see them end.
    _prctl(_SET_CHILD_SUBREAPER, 1)
    others = set(_children())
    with _running(command, log, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1") as started:
        try:
            yield started
        finally:
            with _undisturbed():
                _end_all(started, others)


_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: no worse than without
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@contextlib.contextmanager
def _running(
    command: list[str], log: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is ours alone, and passed on in order
            preexec_fn=lambda: _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),  # noqa: PLW1509
        )
    try:
        yield process
    finally:
        with _undisturbed():
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore a second Ctrl-C, so that it does not interrupt the cleanup of the first."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _await_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while server.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the S3 server did not start; {log} says:\n{log.read_text()}")


def _end_all(started: subprocess.Popen[bytes], others: set[int]) -> None:
    """Torchrun ends its ranks, and each rank's uploader ends once it has stored what is left."""
    if started.poll() is None:
        started.terminate()
    for signal_number, patience_s in ((None, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if signal_number is not None:
            for pid in set(_children()) - others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            started.poll()
            for pid in set(_children()) - others - {started.pid}:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not set(_children()) - others:
                return
            time.sleep(0.05)


def _children() -> list[int]:
    """Processes of ours that have not ended, adopted ones too."""
    found = list[int]()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has ended
            found += map(int, path.read_text().split())
    return found
