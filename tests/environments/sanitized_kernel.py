"""Compile the kernel with all warnings as errors, and run its tests under ASan and UBSan.

    python tests/environments/sanitized_kernel.py [arguments for pytest]
    python tests/environments/sanitized_kernel.py --compile-only

The tests run in a copy of the source tree, so the kernel of the environment stays as it is. Without
a compiler or a sanitizer library the command fails and says what to install. `make test` runs it,
and `make check` compiles.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "smdist/kernel/_native.c"
TREES = ("smdist", "workers", "coordination", "tests")
TESTS = ("tests/unit/smdist/kernel", "tests/unit/workers/spool/test_journal.py")
WARNINGS = ("-Wall", "-Wextra", "-Werror")
# The second aborts: a report that nobody reads is none.
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIBRARIES = ("libasan.so", "libubsan.so")
INSTALL = "install gcc with its sanitizers (Debian: gcc libc6-dev; Fedora: gcc libasan libubsan)"


def compiler() -> str:
    """Return the path of the C compiler, or exit with a message if there is none."""
    found = shutil.which(os.environ.get("CC", "gcc"))
    if found is None:
        sys.exit(f"The kernel cannot be compiled: no gcc on PATH. To check it, {INSTALL}.")
    return found


def compile_kernel(*options: str) -> None:
    """Compile the kernel as setup.py does, with warnings as errors and `options`."""
    include = f"-I{sysconfig.get_path('include')}"
    limited = [] if sysconfig.get_config_var("Py_GIL_DISABLED") else ["-DPy_LIMITED_API=0x030A0000"]
    command = [compiler(), *WARNINGS, *limited, "-fPIC", include, *options, SOURCE]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(f"The kernel does not compile with {' '.join((*WARNINGS, *options))}.")


def sanitizer_libraries() -> list[str]:
    """Return the paths of the run-time libraries, or exit with a message that names a missing one."""
    found = []
    for name in LIBRARIES:
        command = [compiler(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():  # gcc answers with the bare name
            sys.exit(f"The kernel's tests need {name}, which gcc does not find: {INSTALL}.")
        found.append(path)
    return found


def copy_sources(folder: Path) -> None:
    """Copy what the tests need, without compiled kernels."""
    ignore = shutil.ignore_patterns("_native*.so", "__pycache__")
    for name in TREES:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)


def run_tests(arguments: Sequence[str]) -> int:
    """Run the kernel's tests with a sanitized kernel, and return the exit code of pytest."""
    libraries = sanitizer_libraries()
    with tempfile.TemporaryDirectory(prefix="smdist-sanitized-") as name:
        folder = Path(name)
        copy_sources(folder)
        target = folder / "smdist" / "kernel" / "_native.abi3.so"
        compile_kernel(
            "-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS, "-shared", "-o", f"{target}"
        )
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(libraries),
            # The interpreter itself leaks on purpose.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment.pop("PYTHONPATH", None)
        code = "import smdist.kernel._native as k, sys; sys.exit(0 if k.__file__ == sys.argv[1] else 1)"
        loads = subprocess.run(
            [sys.executable, "-c", code, str(target)], cwd=folder, env=environment, check=False
        )
        if loads.returncode:
            sys.exit("The sanitized kernel was not loaded: its tests would say nothing.")
        command = [sys.executable, "-m", "pytest", "-m", "not torch", *arguments, *TESTS]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    if arguments == ["--compile-only"]:
        compile_kernel("-O3", "-c", "-o", os.devnull)
        return 0
    return run_tests(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
