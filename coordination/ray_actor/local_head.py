"""Run a local Ray of this user, for a coordinator without a cluster. Does not import ray.

`start` leaves a head that outlives the caller: `ray start --head --block` in a process session of its
own, so that `stop` can end exactly those processes. (`ray stop` ends every Ray of the machine.) A client
of a Ray may run any code. So it listens on the loopback interface only, and requires a token that only
this user can read, which keeps out other users of the machine.

One folder per user holds the record of the head, its token, its log and Ray's own files. Unix sockets in
it limit the length of its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from smdist.coordination.ray_actor.tokens import with_token
from smdist.errors import CoordinationError
from smdist.processes import is_alive, session_members, start_ticks

__all__ = ["LOOPBACK", "LocalRay", "find", "folder", "looks_for_loopback", "start", "stop"]

# With this, Ray assumes a machine without clusters and listens on the loopback interface only. A
# driver needs the same setting, or it replaces 127.0.0.1 by the machine's address.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nothing has to be moved elsewhere
}
_SOCKET_ROOM = 62  # what Ray adds to its folder, of the 107 bytes of a socket's path
_START_S, _STOP_S, _ALONE_S, _GONE_S = 90.0, 20.0, 3.0, 5.0


class LocalRay(msgspec.Struct, frozen=True):
    """The head that `start` left behind. `pid` leads a session of all its processes."""

    address: str
    pid: int
    ticks: int  # when it started, in clock ticks since boot: the pid may be reused
    log: str
    token: str = ""  # the file that holds it; "" if the head requires none


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `SMDIST_RAY_DIR`, or a folder of this user below the temporary one."""
    chosen = environ.get("SMDIST_RAY_DIR")
    if chosen:
        path = Path(chosen).expanduser().absolute()
        if len(os.fsencode(path)) > 107 - _SOCKET_ROOM:
            raise CoordinationError(
                f"SMDIST_RAY_DIR={path} is too long: Ray makes sockets there. "
                f"Use at most {107 - _SOCKET_ROOM} bytes."
            )
        return path
    name = f"smdist-ray-{os.getuid()}"
    path = Path(tempfile.gettempdir()) / name
    return path if len(os.fsencode(path)) <= 107 - _SOCKET_ROOM else Path("/tmp") / name


def looks_for_loopback(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a driver with this environment finds a local Ray."""
    return any(environ.get(name) == value for name, value in LOOPBACK.items())


def find() -> LocalRay | None:
    """Return the local Ray if it runs."""
    known = _known(folder())
    if known is None or not is_alive(known.pid, known.ticks) or not _reachable(known.address):
        return None
    return known


def _known(home: Path) -> LocalRay | None:
    try:
        return msgspec.json.decode((home / "head.json").read_bytes(), type=LocalRay)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def start() -> tuple[LocalRay, bool]:
    """Return the local Ray, started if none runs, and whether it is new.

    Raise CoordinationError with the end of its log if Ray does not start.
    """
    home = _private(folder())
    with _locked(home):
        known = find()
        if known is not None:
            return known, False
        _end(_known(home))
        _sweep(home)
        token = _new_token(home)
        process = _spawn(home, token)
        pid, log = process.pid, str(home / "head.log")
        known = LocalRay("", pid, start_ticks(pid), log, token)
        _record(home, known)  # before it answers: if we are killed, `stop` knows what to end
        known = msgspec.structs.replace(known, address=_await_address(home, process))
        _record(home, known)
        return known, True


def stop() -> bool:
    """End the local Ray with everything that runs on it; return False if there was none."""
    home = folder()
    if not home.exists():
        return False
    with _locked(_private(home)):
        known = _known(home)
        if known is None:
            return False
        ended = _end(known)
        _sweep(home)
        return ended


def _reachable(address: str, timeout_s: float = 2.0) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout_s):
            return True
    except (OSError, ValueError):
        return False


def _private(path: Path) -> Path:
    """Create a folder that only this user can enter: files of Ray in it may run code."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise CoordinationError(
            f"{path} is not a folder of this user. Set SMDIST_RAY_DIR to another folder."
        )
    path.chmod(0o700)
    return path


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _new_token(home: Path) -> str:
    """Write a token to a file that only this user can read; Ray gets the path, not the token."""
    path = home / "auth_token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return str(path)


def _record(home: Path, known: LocalRay) -> None:
    (home / "head.json").write_bytes(msgspec.json.encode(known))


def _sweep(home: Path) -> None:
    for name in ("head.json", "auth_token", "ray/ray_current_cluster"):
        (home / name).unlink(missing_ok=True)
    for session in (home / "ray").glob("session_*"):
        if session.is_symlink():
            session.unlink()
        else:
            shutil.rmtree(session, ignore_errors=True)


def _spawn(home: Path, token: str) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--port=0", *_client_port()),
        *("--dashboard-agent-listen-port=0", "--include-dashboard=false"),
        *("--disable-usage-stats", "--log-color=false"),
        # A coordinator needs no CPU slot. Without any, Ray keeps no idle processes for tasks.
        *("--num-cpus=0", "--num-gpus=0", f"--object-store-memory={100 << 20}"),
        f"--temp-dir={home / 'ray'}",
    ]
    (home / "ray").mkdir(mode=0o700, exist_ok=True)
    with (home / "head.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=home,
            env={**with_token(os.environ, token), **LOOPBACK, **_QUIET},
            start_new_session=True,
        )


def _await_address(home: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait until Ray has written its address, which it does once the node is up."""
    deadline = time.monotonic() + _START_S
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                address = (home / "ray" / "ray_current_cluster").read_text().strip()
                if address and _reachable(address):
                    process.returncode = 0  # it stays running: Popen must not wait for it
                    return address
            if process.poll() is not None:
                break
            time.sleep(0.05)
        log = (home / "head.log").read_text(errors="replace").splitlines()[-15:]
        raise CoordinationError("Ray did not start. Its log ends with:\n" + "\n".join(log))
    except BaseException:
        _end_session(process.pid)
        process.poll()
        raise


def _end(known: LocalRay | None) -> bool:
    """End what is left of it. The pid of a killed leader is not reused while its session lives."""
    if known is None:
        return False
    if is_alive(known.pid, known.ticks):
        _end_session(known.pid)
        return True
    left = [] if is_alive(known.pid) else session_members(known.pid, since=known.ticks)
    _kill(left)
    return bool(left)


def _end_session(leader: int) -> None:
    """Terminate the leader, then kill what is left of the session."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGTERM)
    deadline, alone = time.monotonic() + _STOP_S, False
    while (left := session_members(leader)) and time.monotonic() < deadline:
        if not alone and leader not in left:  # a process that hangs outlives it
            alone, deadline = True, min(deadline, time.monotonic() + _ALONE_S)
        time.sleep(0.05)
    _kill(left)


def _kill(pids: list[int]) -> None:
    """Kill processes and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _GONE_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _client_port() -> tuple[str, ...]:
    """Choose a free port for `ray://` clients: Ray's default may be used by another Ray."""
    if find_spec("grpc") is None:
        return ()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return (f"--ray-client-server-port={probe.getsockname()[1]}",)
