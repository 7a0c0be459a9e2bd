"""Keeps an uploader running beside the training process.

In the training process: `start()` once the spool exists; a thread then starts the uploader, sleeps in the
kernel until it exits, and starts another one if that was no orderly exit. No exception that a signal handler
raises comes to that thread, so no uploader is started twice or lost track of.
The uploader lives in a session of its own and outlives the training process; nobody has to stop it.

In a child that was forked from the training process a supervisor does nothing and knows nothing.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import smdist
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.spool import Spool

__all__ = ["EXIT_DATA_PENDING", "EXIT_RANK_REJECTED", "Supervisor", "uploader_command"]

# Exit codes; the spool is kept for `smdist recover`.
EXIT_DATA_PENDING = 75  # the store stayed closed
EXIT_RANK_REJECTED = 76  # this rank has no part in the run that is there

_START_S = 60.0
_RAPID_S = 5.0
_MOST_BACKOFF_S = 15.0

# Runs under -I -S: the interpreter knows its standard library and nothing else, whatever folder it
# starts in. Of smdist it takes the very files that the training process runs.
_ENTRY = """\
import json, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
order = json.loads(sys.argv[1])
sys.path.extend(order["path"])
spec = PathFinder.find_spec("smdist", order["home"])
sys.modules["smdist"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["smdist"])
from smdist.workers.upload.entry_point import main
sys.exit(main(order["spool"]))
"""

# One thread is all the uploader's arithmetic is worth; pools of them cost memory and cores.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


def uploader_command(spool: Spool, python: str) -> list[str]:
    """Return the command line of an uploader for `spool` that uses the modules of this process."""
    home = [os.path.dirname(_absolute(place)) for place in smdist.__path__]
    order = {"path": _module_path(sys.path), "home": home, "spool": os.path.abspath(spool.path)}
    return [python, "-I", "-S", "-c", _ENTRY, json.dumps(order)]


def _module_path(entries: Sequence[object]) -> list[str]:
    """`entries` without those a job can put modules of any name in; these come last."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    last = {_absolute(""), os.path.dirname(_absolute(main)) if main else ""}
    kept = dict.fromkeys(_absolute(entry) for entry in entries if isinstance(entry, str))
    return sorted(filter(None, kept), key=lambda entry: entry in last)


def _absolute(path: str) -> str:
    """Empty if it is relative to a working directory that was removed."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        return ""


class Supervisor:
    """Owned by one thread of the training process; `running`, `pid`, `join` may be asked by any."""

    def __init__(
        self,
        spool: Spool,
        python: str = sys.executable,
        trouble: Callable[[str], None] = lambda _message: None,
        most_rapid_deaths: int = 8,
    ) -> None:
        """`trouble` is told, on the supervisor's thread, when no uploader can be kept running."""
        self._spool = spool
        self._python = python
        self._trouble = trouble
        self._most_rapid_deaths = most_rapid_deaths
        self._owner = os.getpid()
        self._started = self._over = False
        self._first = threading.Lock()  # until the first uploader is started
        self._first.acquire()
        self._alone = threading.Lock()  # held by the thread for as long as it lives
        self._pid = 0
        self.restarts = 0
        self.refused = ""  # why this rank has no part in the run, if it has none

    def start(self) -> None:
        """Start an uploader. Failures are reported, never raised.

        The call can be repeated if it is interrupted.
        """
        if self._started or not self._ours:
            return
        _thread.start_new_thread(self._run, ())
        self._started = True  # one that is started twice ends at once
        self._first.acquire(timeout=_START_S)

    @property
    def running(self) -> bool:
        """An uploader is at work, or about to be."""
        return self._ours and self._started and not self._over

    @property
    def pid(self) -> int:
        """The uploader's process, 0 when there is none right now."""
        return self._pid if self._ours else 0

    def join(self, timeout_s: float) -> bool:
        """Wait until the uploader has left for good. It does so after `End` and when told to give up."""
        if not self._ours or not self._started or self._over:
            return True
        if self._alone.acquire(timeout=timeout_s):
            self._alone.release()
        return self._over

    @property
    def _ours(self) -> bool:
        return os.getpid() == self._owner

    # -- the supervisor's thread ---------------------------------------------------------------

    def _run(self) -> None:
        if not self._alone.acquire(blocking=False):
            return
        try:
            self._keep()
        except Exception as error:  # noqa: BLE001 - a thread of ours must not print a traceback into a job
            self._trouble(f"the uploader is no longer watched: {error!r}")
        finally:
            self._pid, self._over = 0, True
            self._alone.release()

    def _keep(self) -> None:
        rapid, pid = 0, self._spawn()
        self._first.release()
        while True:
            began, stored = time.monotonic(), self._acked()
            code = _wait(pid) if pid else None
            self._pid = 0
            if code == 0 or not self._spool.path.exists():
                return
            if code == EXIT_DATA_PENDING:
                self._trouble(f"the uploader gave up; run `smdist recover {self._spool.path}`")
                return
            if code == EXIT_RANK_REJECTED:
                self.refused = self._read_last_error()
                self._trouble(
                    f"{self.refused}. Nothing more is saved; what was captured so far is "
                    f"kept in {self._spool.path}"
                )
                return
            lived = time.monotonic() - began > _RAPID_S or self._acked() > stored
            rapid = 0 if lived else rapid + 1
            if rapid >= self._most_rapid_deaths:
                self._trouble(
                    f"the uploader ended {rapid} times at once (last: {_told(code)}); what was captured "
                    f"stays in {self._spool.path}; run `smdist recover` on it after the job"
                )
                return
            if rapid > 1:
                time.sleep(min(0.05 * 2**rapid, _MOST_BACKOFF_S))
            self.restarts += 1
            pid = self._spawn()

    def _acked(self) -> int:
        try:
            ack_page = AckPage(self._spool.path / "ack_page")
        except OSError:
            return 0
        try:
            return ack_page.acked
        finally:
            ack_page.close()

    def _read_last_error(self) -> str:
        """Return the last error that the uploader wrote to the acknowledgement page."""
        try:
            ack_page = AckPage(self._spool.path / "ack_page")
        except OSError:
            return ""
        try:
            return ack_page.last_error
        finally:
            ack_page.close()

    def _spawn(self) -> int:
        """Its process number, 0 when it could not be started."""
        try:
            process = subprocess.Popen(
                uploader_command(self._spool, self._python),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                close_fds=True,
                cwd=None if _absolute("") else "/",  # this one, unless it was removed
                env={**os.environ, **_ENVIRONMENT},
            )
        except (OSError, ValueError) as error:
            self._trouble(f"cannot start the uploader with {self._python!r}: {error}")
            return 0
        # It is meant to outlive us, and we wait for it by number: spare us the warning about that.
        process.returncode = 0
        self._pid = process.pid
        return process.pid


def _wait(pid: int) -> int | None:
    """Its exit code, negative for a signal, None when somebody else has already asked for it."""
    with suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None


def _told(code: int | None) -> str:
    if code is None:
        return "it did not start, or its exit code was taken by somebody else"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
