"""The wheel lists its packages by hand; this keeps the list honest and the wheel clean."""

from __future__ import annotations

import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

import smdist

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETTINGS: dict[str, Any] = PROJECT["tool"]["setuptools"]
SHIPPED = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "smdist",
    "workers",
    "coordination",
)


def packages_on_disk() -> set[str]:
    found = set[str]()
    for name, folder in SETTINGS["package-dir"].items():
        # rglob does not follow the links on every Python; the table names their targets anyway.
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *inner)))
    return found


def modules_on_disk() -> set[str]:
    found = set[str]()
    for package in SETTINGS["packages"]:
        folder = ROOT / package.replace(".", "/")
        found.update(path.relative_to(ROOT).as_posix() for path in folder.glob("*.py"))
    return found


def test_every_package_is_shipped() -> None:
    assert set(SETTINGS["packages"]) == packages_on_disk()


def test_no_module_hides_in_a_folder_without_init() -> None:
    folders = {path.parent for path in (ROOT / "smdist").rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


@pytest.mark.parametrize("name", ["workers", "coordination"])
def test_links_agree_with_package_dir(name: str) -> None:
    link = ROOT / "smdist" / name
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == (ROOT / SETTINGS["package-dir"][f"smdist.{name}"]).resolve()


@pytest.mark.parametrize("name", ["main", "oldest"])
def test_constraints_pin_every_core_dependency(name: str) -> None:
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if line and not line.startswith("#")}
    wanted = {text.partition(">=")[0] for text in PROJECT["project"]["dependencies"]}
    assert wanted <= pinned


def test_extra_all_names_only_extras() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    inside = extras["all"][0].partition("[")[2].rstrip("]").split(",")
    assert set(inside) <= set(extras)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist from a copy of the repository, and a wheel from what the sdist holds."""
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        path = ROOT / name
        if path.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(path, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    target = tmp_path_factory.mktemp("built")
    shutil.unpack_archive(build("sdist", source, target), target, filter="data")
    return build("wheel", target / f"smdist-{smdist.__version__}", target)


def build(kind: str, source: Path, target: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_wheel_holds_the_namespace_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"smdist-{smdist.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"smdist", info}
    inside = {name for name in names if name.startswith("smdist/")}
    others = {name for name in inside - modules_on_disk() if not name.endswith((".so", ".pyi"))}
    assert others == {"smdist/py.typed"}
    assert modules_on_disk() <= inside


def test_wheel_serves_every_supported_python(wheel: Path) -> None:
    assert wheel.name.startswith(f"smdist-{smdist.__version__}-cp310-abi3-")


def test_wheel_has_the_command_and_the_licence(wheel: Path) -> None:
    info = f"smdist-{smdist.__version__}.dist-info"
    with ZipFile(wheel) as archive:
        entries = ConfigParser()
        entries.read_string(archive.read(f"{info}/entry_points.txt").decode())
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert dict(entries["console_scripts"]) == {"smdist": "smdist.cli:main"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_wheel_has_the_compiled_kernel(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        assert "smdist/kernel/_native.abi3.so" in archive.namelist()
