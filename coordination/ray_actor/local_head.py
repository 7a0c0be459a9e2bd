"""A Ray of this user on this machine, for a coordinator without a cluster. Does not import ray.

`start` leaves a head behind that outlives the caller: `ray start --head --block` in a session of
its own, so that `stop` can end exactly those processes. (`ray stop` ends every Ray of the machine.)
Whoever reaches a Ray may run anything: nothing of it listens beyond the loopback interface, and it
asks for a token that only this user can read, so that others of the machine are kept out too.

One folder per user holds the record of the head, its token, its log and Ray's own files. Unix sockets
below it limit the length of its path.
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

__all__ = ["LOOPBACK", "LocalRay", "find", "folder", "looks_for_loopback", "start", "stop"]

# Ray listens on the loopback interface alone when it believes to be on a machine that has no
# clusters. A driver needs the same setting, or it turns 127.0.0.1 into the machine's address.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nothing on it has to be moved elsewhere
}
_SOCKET_ROOM = 62  # of the 107 bytes of a socket's path, what Ray adds to its folder
_START_S, _STOP_S, _ALONE_S, _GONE_S = 90.0, 20.0, 3.0, 5.0


class LocalRay(msgspec.Struct, frozen=True):
    """The head that `start` left behind. `pid` leads a session of all its processes."""

    address: str
    pid: int
    ticks: int  # when it started, in clock ticks since boot: the pid may be another's by now
    log: str
    token: str = ""  # file that holds it; "" where one without a token was left behind


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`SMDIST_RAY_DIR`, or a folder of this user below the temporary one."""
    chosen = environ.get("SMDIST_RAY_DIR")
    if chosen:
        path = Path(chosen).expanduser().absolute()
        if len(os.fsencode(path)) > 107 - _SOCKET_ROOM:
            raise CoordinationError(
                f"SMDIST_RAY_DIR={path} is too long: Ray makes sockets below it, and their path "
                f"may have 107 bytes; use at most {107 - _SOCKET_ROOM}"
            )
        return path
    name = f"smdist-ray-{os.getuid()}"
    path = Path(tempfile.gettempdir()) / name
    return path if len(os.fsencode(path)) <= 107 - _SOCKET_ROOM else Path("/tmp") / name


def looks_for_loopback(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a driver with this environment finds a Ray of ours."""
    return any(environ.get(name) == value for name, value in LOOPBACK.items())


def find() -> LocalRay | None:
    """The one that runs, or None."""
    known = _known(folder())
    if known is None or _ticks(known.pid) != known.ticks or not reachable(known.address):
        return None
    return known


def _known(home: Path) -> LocalRay | None:
    try:
        return msgspec.json.decode((home / "head.json").read_bytes(), type=LocalRay)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def start() -> tuple[LocalRay, bool]:
    """The one that runs, or a new one, and whether it is new.

    CoordinationError says why Ray would not start.
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
        known = LocalRay("", pid, _ticks(pid), log, token)
        _record(home, known)  # already: if this process is killed, `stop` knows what to end
        known = msgspec.structs.replace(known, address=_await_address(home, process))
        _record(home, known)
        return known, True


def stop() -> bool:
    """End it with everything that runs on it; False when there was none."""
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


def reachable(address: str, timeout_s: float = 2.0) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout_s):
            return True
    except (OSError, ValueError):
        return False


def _private(path: Path) -> Path:
    """A folder that only this user can enter: what Ray keeps there may run code."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise CoordinationError(f"{path} is not a folder of this user; set SMDIST_RAY_DIR")
    path.chmod(0o700)
    return path


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _new_token(home: Path) -> str:
    """A file that only this user can read. Ray gets its path: an environment or a log may be read."""
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
        # A coordinator asks for no CPU; with none, Ray keeps no idle processes for tasks.
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
    """Ray writes its address down once the node is up."""
    deadline = time.monotonic() + _START_S
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                address = (home / "ray" / "ray_current_cluster").read_text().strip()
                if address and reachable(address):
                    process.returncode = 0  # it stays; let nobody wait for it
                    return address
            if process.poll() is not None:
                break
            time.sleep(0.05)
        said = (home / "head.log").read_text(errors="replace").splitlines()[-15:]
        raise CoordinationError("Ray did not start; it said:\n" + "\n".join(said))
    except BaseException:
        _end_session(process.pid)
        process.poll()
        raise


def _end(known: LocalRay | None) -> bool:
    """What there is of it. A session whose leader was killed keeps its number from others."""
    if known is None:
        return False
    leader = _ticks(known.pid)
    if leader == known.ticks:
        _end_session(known.pid)
        return True
    left = _members(known.pid, since=known.ticks) if leader < 0 else []
    _kill(left)
    return bool(left)


def _end_session(leader: int) -> None:
    """Kindly first; what is left of the session is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, signal.SIGTERM)
    deadline, alone = time.monotonic() + _STOP_S, False
    while (left := _members(leader)) and time.monotonic() < deadline:
        if not alone and leader not in left:  # one that hangs outlives it
            alone, deadline = True, min(deadline, time.monotonic() + _ALONE_S)
        time.sleep(0.05)
    _kill(left)


def _kill(pids: list[int]) -> None:
    """And wait until they are gone, which takes a moment."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _GONE_S
    while any(_ticks(pid) >= 0 for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)


def _members(leader: int, since: int = 0) -> list[int]:
    """Processes of the session that have not ended, and have not begun before."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if not fields or fields[0] in ("Z", "X") or int(fields[3]) != leader:
            continue
        if int(fields[19]) >= since:
            found.append(int(entry.name))
    return found


def _ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else -1


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on: the name before may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _client_port() -> tuple[str, ...]:
    """Where Ray has a server for `ray://`, it would take a port that another Ray may have."""
    if find_spec("grpc") is None:
        return ()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return (f"--ray-client-server-port={probe.getsockname()[1]}",)
