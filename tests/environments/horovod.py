"""Makes the virtual environment for Horovod: TensorFlow with Keras 2, torch, Horovod, smdist.

    python tests/environments/horovod.py .venv-horovod

Horovod is built from its source archive, which takes ten minutes on two cores, a C++ compiler and make;
cmake comes from the package index. The wheel is kept in `$XDG_CACHE_HOME/smdist/wheels` (`~/.cache`
if unset) under the versions it was built with, so the next environment takes as long as its
downloads. Ray has no place here: TensorFlow of this age and a current Ray ask for different versions
of protobuf.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints" / "horovod.txt"
HOROVOD = "0.28.1"
TORCH = "torch==2.13.0"
FRAMEWORKS = ("tensorflow-cpu", "torch")
PYTHON = (3, 11)  # the newest that TensorFlow 2.15 has wheels for
WITHOUT = "make test-main runs the tests that need no Horovod"

# Beside the frameworks. cmake 4 no longer takes projects as old as Gloo.
BUILD_TOOLS = (
    "setuptools>=77,<80",
    "wheel",
    "cmake<4",
    "cffi",
    "cloudpickle",
    "packaging",
    "psutil",
    "pyyaml",
)
BUILD_SWITCHES = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
# (file, before, after). The headers of torch are C++17 since 2.1; debugging symbols are a third of
# the time and most of the size.
EDITS = (
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    ("setup.py", "'RelWithDebInfo'", "'Release'"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="of the virtual environment")
    folder = parser.parse_args().folder.absolute()
    python = folder / "bin" / "python"
    _check_python()
    if not any(_cache().glob("*/horovod-*.whl")):
        _check_tools()  # before the downloads
    if _succeeds([python, "-m", "pip", "--version"]):
        _say(f"[1/4] {folder.name} is there, and is brought up to date")
    else:
        _say(f"[1/4] virtual environment in {folder.name}")
        venv.create(folder, clear=True, with_pip=True)
    _say(f"[2/4] TensorFlow with Keras 2, {TORCH} (the largest downloads)")
    _install(python, *BUILD_TOOLS, "tensorflow-cpu", TORCH)
    wheel = _wheel(python, folder)
    _say("[4/4] Horovod and smdist")
    _install(python, str(wheel))
    _install(python, "--no-build-isolation", "--editable", f"{ROOT}[test,s3]")
    _run([python, "-m", "pip", "check"], "what was installed does not fit together")
    load = "import horovod.torch, horovod.tensorflow.keras"
    quiet = "import os; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'; "
    _run([python, "-c", quiet + load], f"Horovod does not load; {wheel} may be removed")


def _wheel(python: Path, folder: Path) -> Path:
    kept = _cache() / _key(python)
    for found in sorted(kept.glob("horovod-*.whl")):
        _say(f"[3/4] Horovod {HOROVOD}, built before: {found}")
        return found
    _check_tools()
    _say(f"[3/4] Horovod {HOROVOD} is built (ten minutes on two cores), for {kept}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="horovod-") as place:
        built = _build(python, Path(place), folder / "horovod-build.log")
        try:
            found = _keep(built, kept)
        except OSError as problem:
            found = _keep(built, folder / "wheels")
            _say(f"      not kept for other environments: {problem}")
    _say(f"      built in {(time.monotonic() - began) / 60:.1f} minutes")
    return found


def _keep(wheel: Path, folder: Path) -> Path:
    """Whole or not at all; whoever builds at the same time replaces it by the same."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{os.getpid()}.{wheel.name}"
    shutil.copyfile(wheel, aside)
    return aside.replace(folder / wheel.name)


def _build(python: Path, place: Path, log: Path) -> Path:
    archives, source, wheels = place / "archives", place / "source", place / "wheels"
    download: list[str | Path] = [
        python,
        "-m",
        "pip",
        "download",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
    ]
    _run(
        [*download, "--no-binary", "horovod", "--dest", archives, f"horovod=={HOROVOD}"],
        f"pip could not download the source of Horovod {HOROVOD}: is there a package index?",
    )
    with tarfile.open(next(archives.glob("horovod-*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    unpacked = next(source.iterdir())
    for name, before, after in EDITS:
        path = unpacked / name
        text = path.read_text()
        if before not in text:
            sys.exit(f"{name} of Horovod {HOROVOD} has no {before}")
        path.write_text(text.replace(before, after))
    environ = {
        **os.environ,
        **BUILD_SWITCHES,
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
    }
    command: list[str | Path] = [
        python,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-v",
    ]
    if _logged([*command, "--wheel-dir", wheels, unpacked], environ, log) != 0:
        tail = log.read_text(errors="replace").splitlines()[-40:]
        sys.exit("\n".join([*tail, f"Horovod was not built; all of it is in {log}"]))
    return next(wheels.glob("horovod-*.whl"))


def _logged(command: Sequence[str | Path], environ: Mapping[str, str], log: Path) -> int:
    """Its output goes into a file; how far it is, by its own account, is told."""
    told = 0
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            output.write(line)
            percent = re.match(r"\s*\[ *(\d+)%\]", line)
            if percent is not None and int(percent[1]) >= told + 10:
                told = int(percent[1])
                _say(f"      {told} %")
    return process.returncode


def _key(python: Path) -> str:
    """A folder name: everything that the compiled libraries depend on."""
    ask = (
        "import json, sys, sysconfig\n"
        "from importlib.metadata import version\n"
        "print(json.dumps([sys.implementation.cache_tag, sysconfig.get_platform()]"
        " + [name + '-' + version(name) for name in sys.argv[1:]]))"
    )
    said = subprocess.run(
        [python, "-c", ask, *FRAMEWORKS], check=True, capture_output=True, text=True
    )
    recipe = hashlib.sha256(repr((BUILD_SWITCHES, EDITS)).encode()).hexdigest()[:8]
    return "_".join([f"horovod-{HOROVOD}", *json.loads(said.stdout), recipe])


def _cache(environ: Mapping[str, str] = os.environ) -> Path:
    root = environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "smdist" / "wheels"


def _check_tools() -> None:
    missing = [name for name in ("c++", "make") if shutil.which(name) is None]
    if missing:
        sys.exit(
            f"To build Horovod, {' and '.join(missing)} must be on PATH "
            f"(Debian and Ubuntu: apt-get install build-essential). {WITHOUT}."
        )


def _check_python() -> None:
    wanted, this = (".".join(map(str, v[:2])) for v in (PYTHON, sys.version_info))
    if this != wanted:
        sys.exit(
            f"The last TensorFlow with Keras 2 is tried with Python {wanted}, this is {this}: "
            f"make HOROVOD_PYTHON=path/to/python{wanted} ... {WITHOUT}."
        )


def _install(python: Path, *what: str) -> None:
    command: list[str | Path] = [python, "-m", "pip", "install", "-qq", "-c", CONSTRAINTS, *what]
    _run(command, f"pip could not install {' '.join(what)}: is there a package index?")


def _run(command: Sequence[str | Path], trouble: str) -> None:
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"{trouble}\n{WITHOUT}.")


def _succeeds(command: Sequence[str | Path]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
