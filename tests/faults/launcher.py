"""The test's side of `job.py`: start processes, follow what they wrote down, end them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from smdist.processes import is_alive
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.private_files import private_root
from smdist.workers.upload.recover import find_spools
from tests.faults.job import Exited, Order
from tests.support.waiting import until

REPOSITORY = Path(__file__).parents[2]
TRAIN = "train(order)"


class Noted(NamedTuple):
    """A line of evidence: at `step` the capture of `name` had returned."""

    step: int
    checksum: int
    name: str


class Started:
    """A process, as the test sees it."""

    def __init__(self, launcher: Launcher, pid: int, order: Order) -> None:
        self._launcher, self.pid, self.order = launcher, pid, order
        self.folder = Path(order.folder)

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._launcher.exited.get(self.pid)

    def wait(self, timeout_s: float = 60.0) -> int:
        until(
            lambda: self.code is not None,
            f"process {self.pid} to end",
            timeout_s,
            lambda: (self, self.marks()[-1:]),
        )
        assert self.code is not None
        return self.code

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def _lines(self) -> list[str]:
        try:
            text = (self.folder / "evidence").read_text()
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def evidence(self) -> list[Noted]:
        found = []
        for line in self._lines():
            if not line.startswith("#"):
                step, checksum, name = line.rstrip("\n").split(" ", 2)
                found.append(Noted(int(step), int(checksum), name))
        return found

    def marks(self) -> list[str]:
        return [line[2:].rstrip("\n") for line in self._lines() if line.startswith("#")]

    def wait_for(self, mark: str, timeout_s: float = 60.0) -> None:
        until(
            lambda: mark in self.marks() or self.code is not None,
            f"{mark!r} of process {self.pid}",
            timeout_s,
            lambda: (self, self.marks()[-1:]),
        )

    @property
    def stderr(self) -> str:
        path = self.folder / "stderr"
        return path.read_text() if path.exists() else ""

    def __repr__(self) -> str:
        arguments = {k: v for k, v in self.order.arguments.items() if k != "hook"}
        return f"<{arguments} in {self.folder}, exit code {self.code}, stderr: {self.stderr!r}>"


class Launcher:
    """Ends every process it has started when it is closed. Any thread may start some."""

    def __init__(self, program: str = "job.py") -> None:
        self._lock = threading.Lock()
        self.exited: dict[int, int] = {}
        self._pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._all: list[Started] = []
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        environ.pop("SMDIST_SPOOL_DIR", None)
        self._popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(program))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
        )
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        assert self._pids.get(timeout=120) == 0  # everything is imported

    def _listen(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            said = msgspec.json.decode(line, type=int | Exited)
            if isinstance(said, Exited):
                self.exited[said.pid] = said.code
            else:
                self.exited.pop(said, None)  # an earlier process had the same number
                self._pids.put(said)

    def start(
        self,
        folder: Path,
        script: str = TRAIN,
        environ: dict[str, str] | None = None,
        **arguments: Any,
    ) -> Started:
        order = Order(script, str(folder), arguments, environ or {})
        assert self._popen.stdin is not None
        with self._lock:
            self._popen.stdin.write(msgspec.json.encode(order) + b"\n")
            self._popen.stdin.flush()
            started = Started(self, self._pids.get(timeout=60), order)
            self._all.append(started)
        return started

    def close(self) -> None:
        for started in self._all:
            started.kill()
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.wait(60)
        self._listener.join(60)
        self._popen.stdout.close()


@contextlib.contextmanager
def launching(program: str = "job.py") -> Iterator[Launcher]:
    launcher = Launcher(program)
    try:
        yield launcher
    finally:
        launcher.close()


# -- spools ----------------------------------------------------------------------------------------


def spools(root: Path) -> list[Path]:
    return find_spools([root])


def uploaders(spool: Path) -> list[int]:
    """Processes that were started to upload from `spool`, whether they have said so yet or not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(spool).encode() in path.read_bytes() and is_alive(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


def drained(root: Path, timeout_s: float = 60.0) -> None:
    """Wait until every uploader of this spool root has stored everything, and has ended."""
    until(lambda: not spools(root), f"uploaders to empty {root}", timeout_s, lambda: spools(root))
    ended(root)


def ended(root: Path) -> None:
    """Wait until there is no uploader of this spool root: the last one merges once its spool is gone."""
    until(lambda: not uploaders(private_root(root)), f"the uploaders of {root} to end", 120.0)


@contextlib.contextmanager
def ack_page_of(spool: Path) -> Iterator[AckPage]:
    ack_page = AckPage(spool / "ack_page")
    try:
        yield ack_page
    finally:
        ack_page.close()


def uploader_of(spool: Path) -> int:
    """Its process number, 0 while there is none."""
    with contextlib.suppress(OSError), ack_page_of(spool) as ack_page:
        if ack_page.uploader_pid and is_alive(ack_page.uploader_pid):
            return ack_page.uploader_pid
    return 0
