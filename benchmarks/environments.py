"""Where peers are installed: those that do not fit beside smdist have environments of their own.

    main      the interpreter that runs this
    peers     .venv-peers: benchmarks/peers.txt on top of main's packages, which it shares
    s3_peers  .venv-s3_peers: benchmarks/s3_peers.txt, in the same way
    smdebug   .venv-smdebug: benchmarks/smdebug.txt, nothing shared: smdebug needs an old protobuf

One is made when it is first asked for. If that fails, whoever needs it is left out, with the reason.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from benchmarks.pipe import ROOT

__all__ = ["Unavailable", "interpreter"]

RETRY_AFTER_S = 1800.0
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")


class Unavailable(Exception):
    """An environment could not be set up; the text says why."""


def interpreter(name: str) -> Path:
    """The Python of an environment, which is set up if it is not there."""
    if name == "main":
        return Path(sys.executable)
    folder, wanted = ROOT / f".venv-{name}", ROOT / "benchmarks" / f"{name}.txt"
    python, ready, failed = folder / "bin" / "python", folder / "ready", folder / "failed"
    mark = hashlib.sha256(f"{sys.prefix} {sys.version} {wanted.read_text()}".encode()).hexdigest()
    if ready.exists() and ready.read_text() == mark:
        return python
    if failed.exists() and time.time() - failed.stat().st_mtime < RETRY_AFTER_S:
        raise Unavailable(failed.read_text())
    print(f"setting up {folder.name} for {name} (once) ...", file=sys.stderr, flush=True)
    try:
        _set_up(folder, wanted, shared=name != "smdebug")
    except subprocess.CalledProcessError as problem:
        text = problem.stderr.decode(errors="replace").strip().splitlines() or ["pip failed"]
        folder.mkdir(exist_ok=True)
        failed.write_text(text[-1])
        raise Unavailable(text[-1]) from None
    failed.unlink(missing_ok=True)
    ready.write_text(mark)
    return python


def _set_up(folder: Path, wanted: Path, *, shared: bool) -> None:
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    python = str(folder / "bin" / "python")
    if not shared:
        _run(python, *_PIP, "-r", str(wanted))
        return
    own = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(own, "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _run(python, *_PIP, "-c", str(ROOT / "constraints" / "main.txt"), "-r", str(wanted))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True).stdout.decode()
