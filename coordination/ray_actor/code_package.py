"""Give a Ray cluster the smdist that runs here, if its nodes have none or another one.

The package's own files are copied, so that an editable or patched installation sends what it runs,
without a compiler, a checkout or a network. Called by `launcher` in the driver.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import smdist
from smdist.errors import ConfigurationError, CoordinationError

__all__ = ["check_wheel", "copy_package", "digest", "missing_code"]

# What a node needs besides smdist to run a coordinator, and aiobotocore for s3://.
_NEEDED = ("numpy", "safetensors", "ml_dtypes", "msgspec", "google_crc32c")
_PROBE_S = 120.0


@contextlib.contextmanager
def missing_code(ray: Any, watch: str, wheel: Path | None) -> Iterator[Mapping[str, Any]]:
    """Yield the runtime environment that gives a cluster our code; empty if it runs the same code.

    `wheel` is sent instead of our own files. The code travels as a folder: with a wheel file each
    node's pip would install its dependencies again, before the cluster's own.
    """
    needed = (*_NEEDED, "aiobotocore") if watch.startswith("s3://") else _NEEDED
    there, missing = _probe(ray, needed)
    if there == digest() and not missing and wheel is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="smdist-code-") as folder:
        if wheel is None:
            package = copy_package(Path(folder))
        else:
            package = Path(folder) / "smdist"
            with ZipFile(wheel) as archive:
                archive.extractall(folder)
        runtime_env: dict[str, Any] = {
            "py_modules": [str(package)],
            "config": {"setup_timeout_seconds": 600},
        }
        if missing:
            runtime_env["pip"] = [text for text in requirements() if _module(text) in missing]
        yield runtime_env


def copy_package(into: Path) -> Path:
    """Copy our Python files and compiled kernel to `into/smdist`, links to folders included."""
    (root,) = smdist.__path__
    return Path(shutil.copytree(root, into / "smdist", ignore=_not_code))


def _not_code(folder: str, names: list[str]) -> list[str]:
    def is_code(path: Path) -> bool:
        if path.is_dir():
            return (path / "__init__.py").exists()
        return path.suffix in (".py", ".pyi", ".so") or path.name == "py.typed"

    return [name for name in names if not is_code(Path(folder, name))]


def digest() -> str:
    """Return a digest of the Python sources, equal exactly where the same code runs."""
    (root,) = smdist.__path__
    files = {
        Path(folder, name).relative_to(root).as_posix(): Path(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    }
    summed = hashlib.sha256()
    for name, path in sorted(files.items()):
        summed.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return summed.hexdigest()[:16]


def requirements(extras: frozenset[str] = frozenset({"s3"})) -> list[str]:
    """Return what smdist needs besides itself, without Ray: a cluster has its own version of that."""
    found = []
    for line in metadata.requires("smdist") or ():
        text, _, marker = (part.strip() for part in line.partition(";"))
        if not marker or any(
            f"extra == {quote}{e}{quote}" in marker for e in extras for quote in "'\""
        ):
            found.append(text)
    return found


def check_wheel(path: Path) -> None:
    """Raise ConfigurationError if `path` is no wheel of smdist."""
    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, BadZipFile) as error:
        raise ConfigurationError(f"--wheel {path} is no wheel: {error}") from error
    if "smdist/__init__.py" not in names:
        raise ConfigurationError(f"--wheel {path} is no wheel of smdist")


def _module(requirement: str) -> str:
    name = requirement
    for mark in "[<>=!~ ":
        name = name.partition(mark)[0]
    return name.replace("-", "_")


def _probe(ray: Any, modules: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the digest of a worker's smdist, "" if it has none, and the modules that it lacks."""

    def look() -> tuple[str, tuple[str, ...]]:  # nested: travels as code, not as a name
        from importlib.util import find_spec

        missing = tuple(name for name in modules if find_spec(name) is None)
        try:
            from smdist.coordination.ray_actor.code_package import digest

            return digest(), missing
        except ImportError:
            return "", missing

    try:
        found: tuple[str, tuple[str, ...]] = ray.get(
            ray.remote(num_cpus=0, max_retries=3)(look).remote(), timeout=_PROBE_S
        )
    except ray.exceptions.GetTimeoutError as error:
        raise CoordinationError(
            f"The Ray cluster did not start a worker within {_PROBE_S:g} s. "
            "See `ray status` for pending resources."
        ) from error
    except ray.exceptions.RayError as error:
        raise CoordinationError(f"the cluster cannot start a process: {error}") from error
    return found
