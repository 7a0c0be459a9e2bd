"""Real Rays for tests: a head, more nodes on this machine, and drivers in processes of their own.

Every node is `ray start --block` in a session of its own, so that killing one kills just that one
(`ray stop` would end every Ray of the machine). A driver is a process too: Ray in the tests' own
would bring its threads, its signal handlers and its warnings.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import pytest

from tests.servers.ports import free_port
from tests.support.waiting import until

__all__ = [
    "Cluster",
    "Driver",
    "Node",
    "environment",
    "ray_cluster",
    "start_cluster",
]

# Ends with the tests, also when those are killed.
START = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
from ray.scripts.scripts import main
sys.argv[0] = "ray"
main()
"""
DRIVER = Path(__file__).with_name("ray_driver.py")


def environment(**more: str) -> dict[str, str]:
    """Of Ray's processes and drivers: nothing is reported to anybody, nothing waits at the end."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "disabled",  # whatever token the account has
    }
    # A killed node refuses connections and is missed after seconds. One that only takes long to
    # answer, on a machine that stands still for a while, is not: its head would end itself.
    hasty = {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "60000",
        "RAY_health_check_failure_threshold": "3",
    }
    return {**inherited, **quiet, **hasty, **more}


class Node:
    """A raylet with its workers; for a head, the cluster's own processes too."""

    def __init__(self, folder: Path, *flags: str, **more: str) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.log = folder / "log"
        command = [sys.executable, "-c", START, "start", "--block"]
        # Workers take whatever port is free: the usual ones are those of every Ray on the machine.
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        command += ["--disable-usage-stats", "--log-color=false", "--include-log-monitor=false"]
        command += [f"--temp-dir={folder}", f"--object-store-memory={80 << 20}"]
        command += [f"--dashboard-agent-listen-port={free_port()}", *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(**more),
                cwd=folder,
                start_new_session=True,
            )

    def wait(self) -> Node:
        try:
            until(lambda: self.ended() or "will now block" in self.log.read_text(), "Ray is up")
            assert not self.ended(), self.log.read_text()
        except BaseException:
            self.kill()
            raise
        return self

    def ended(self) -> bool:
        return self.process.poll() is not None

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] not in "ZX":
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """As a machine that loses power: all at once."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait(10)


class Cluster:
    """A head on free ports, and nodes that were added to it."""

    def __init__(self, *flags: str, **more: str) -> None:
        # Ray's sockets lie below: their path is short, pytest's is not.
        self.folder = Path(tempfile.mkdtemp(prefix="smr-", dir="/tmp"))
        self.nodes: list[Node] = []
        self._flags, self._more = flags, more
        self.jobs = ""  # address of the job server, if it was asked for
        self.start()

    def start(self) -> None:
        """All over again: another Ray, which knows nothing of the one before."""
        self.client_port = free_port()
        flags = ["--head", "--port=0", f"--ray-client-server-port={self.client_port}"]
        if not any(flag.startswith("--include-dashboard") for flag in self._flags):
            flags.append("--include-dashboard=false")
        if not any(flag.startswith("--num-cpus") for flag in self._flags):
            flags.append("--num-cpus=0")
        self.head = Node(self.folder / f"n{len(self.nodes)}", *flags, *self._flags, **self._more)
        self.nodes.append(self.head)
        self.head.wait()
        self.address = (self.head.folder / "ray_current_cluster").read_text().strip()

    def add_node(self, *flags: str) -> Node:
        folder = self.folder / f"n{len(self.nodes)}"
        if not any(flag.startswith("--num-cpus") for flag in flags):
            flags = ("--num-cpus=0", *flags)
        node = Node(folder, f"--address={self.address}", *flags, **self._more)
        self.nodes.append(node)
        return node.wait()

    def kill(self) -> None:
        for node in reversed(self.nodes):
            node.kill()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@final
class Driver:
    """A process that is attached to a Ray and does what it is told; see ray_driver.py."""

    def __init__(self, address: str, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(DRIVER), address],
                cwd=log.parent,  # Ray lets workers import from a driver's folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment(PYTHONWARNINGS="ignore"),
            )
        try:
            self._answer()
        except BaseException:
            self.leave()
            raise

    def __call__(self, what: str, **values: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, **values}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the driver ended: {self.log.read_text()[-3000:]}"
        answer = json.loads(line)
        if "error" in answer:
            raise DriverError(answer["error"], answer["message"])
        return answer["value"]

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:  # its Ray is gone
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()


class DriverError(Exception):
    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, message
        super().__init__(kind, message)


@contextmanager
def start_cluster(*flags: str, **more: str) -> Iterator[Cluster]:
    """`more`: environment of its processes."""
    cluster = Cluster(*flags, **more)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Cluster]:
    with start_cluster() as cluster:
        yield cluster
