"""The smdist that runs here, as a wheel: for a cluster whose nodes have none or another one.

Built from the files of the package itself, so that an editable installation or a patched one gives
what it runs, without a compiler, a checkout or a network.
"""

from __future__ import annotations

import base64
import hashlib
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import smdist

__all__ = ["digest", "pack", "requirements"]


def digest() -> str:
    """Of the Python sources: equal exactly where the same code runs."""
    summed = hashlib.sha256()
    for name, path in _sources():
        if name.endswith(".py"):
            summed.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return summed.hexdigest()[:16]


def requirements(extras: frozenset[str] = frozenset({"s3"})) -> list[str]:
    """What the wheel needs besides itself, without Ray, which a cluster has in its own version."""
    found = []
    for line in metadata.requires("smdist") or ():
        text, _, marker = (part.strip() for part in line.partition(";"))
        if not marker or any(
            f"extra == {quote}{e}{quote}" in marker for e in extras for quote in "'\""
        ):
            found.append(text)
    return found


def pack(into: Path) -> Path:
    """Write the wheel into a folder; the same sources give the same bytes."""
    version = smdist.__version__
    files = {name: path.read_bytes() for name, path in _sources()}
    compiled = any(name.endswith(".so") for name in files)
    tag = f"cp310-abi3-{_platform()}" if compiled else "py3-none-any"
    info = f"smdist-{version}.dist-info"
    described = metadata.distribution("smdist").read_text("METADATA") or ""
    files[f"{info}/METADATA"] = described.encode()
    files[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: smdist\n"
        f"Root-Is-Purelib: {'false' if compiled else 'true'}\nTag: {tag}\n"
    ).encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nsmdist = smdist.cli:main\n"
    record = "".join(_record_line(name, data) for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = into / f"smdist-{version}-{tag}.whl"
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(ZipInfo(name), data, ZIP_DEFLATED)  # without the time of writing
    return path


def _sources() -> Iterator[tuple[str, Path]]:
    """Name in the wheel and file, sorted. smdist/workers and others may be links to folders."""
    (root,) = (Path(path) for path in smdist.__path__)
    pending, found = [root], []
    while pending:
        for path in pending.pop().iterdir():
            if path.is_dir() and (path / "__init__.py").exists():
                pending.append(path)
            elif path.suffix in (".py", ".pyi", ".so") or path.name == "py.typed":
                found.append((f"smdist/{path.relative_to(root).as_posix()}", path))
    yield from sorted(found)


def _platform() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _record_line(name: str, data: bytes) -> str:
    summed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={summed},{len(data)}\n"
