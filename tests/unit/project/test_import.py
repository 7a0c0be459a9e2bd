"""`import smdist` is cheap, and frameworks and SDKs load only when asked for."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import smdist

ROOT = Path(__file__).parents[3]
# Which of our files may import an optional dependency while they are themselves imported.
ADAPTERS = {
    "aiobotocore": "smdist/storage/s3/*.py",
    "boto3": "smdist/storage/s3/*.py",
    "botocore": "smdist/storage/s3/*.py",
    "horovod": "",
    "mxnet": "workers/mxnet_adapter/*.py",
    "pandas": "",
    "ray": "coordination/ray_actor/*.py",
    "tensorflow": "workers/[kt][ef]*_adapter/*.py",
    "torch": "workers/torch_adapter/*.py",
    "xgboost": "workers/xgboost_adapter/*.py",
}


def loaded_by(statement: str) -> set[str]:
    """Modules that `statement` adds to a fresh interpreter."""
    script = (
        "import json, sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def top_level(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_import_loads_nothing_but_the_standard_library() -> None:
    modules = loaded_by("import smdist")
    assert {name for name in modules if name.partition(".")[0] == "smdist"} == {"smdist"}
    assert top_level(modules) <= {"smdist", *sys.stdlib_module_names}


@pytest.mark.parametrize("name", smdist.__all__)
def test_public_name_loads_no_framework(name: str) -> None:
    modules = loaded_by(f"from smdist import {name}")
    assert not top_level(modules) & set(ADAPTERS)


def test_star_import_gives_every_public_name() -> None:
    loaded_by("from smdist import *; import smdist; assert set(smdist.__all__) <= set(globals())")


def test_all_lists_every_public_name_once() -> None:
    lazy = set(smdist._HOME)
    assert set(smdist.__all__) == {*lazy, "__version__"}
    assert len(smdist.__all__) == len(set(smdist.__all__))
    assert set(smdist.__all__) <= set(dir(smdist))


def test_type_checkers_see_the_same_homes() -> None:
    tree = ast.parse((ROOT / "smdist" / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == smdist._HOME


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SaveConfg'"):
        smdist.SaveConfg  # type: ignore[attr-defined]  # noqa: B018


def imported_at_load(path: Path) -> set[str]:
    """Top-level names of what a file imports while it is imported: not in functions or for types."""
    found = set[str]()
    pending: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pending.extend(node.orelse)
                continue
            case ast.Import(names=names):
                found.update(alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module)):
                found.add(module.partition(".")[0])
        pending.extend(ast.iter_child_nodes(node))
    return found


def sources() -> list[str]:
    files = (
        path
        for folder in ("smdist", "workers", "coordination")
        for path in (ROOT / folder).rglob("*.py")
    )
    real = {path.resolve().relative_to(ROOT).as_posix() for path in files}
    return sorted(real)


@pytest.mark.parametrize("source", sources())
def test_only_adapters_load_a_framework(source: str) -> None:
    found = imported_at_load(ROOT / source) & set(ADAPTERS)
    assert {name for name in found if not fnmatch(source, ADAPTERS[name])} == set()


def test_public_names_are_found_under_older_paths() -> None:
    from smdist.core.collection import CollectionKeys
    from smdist.core.modes import ModeKeys
    from smdist.core.reduction_config import ReductionConfig
    from smdist.core.save_config import SaveConfig, SaveConfigMode
    from smdist.core.tensor import StepState
    from smdist.trials import StepState as Answer

    assert ModeKeys is smdist.modes
    assert (SaveConfig, SaveConfigMode) == (smdist.SaveConfig, smdist.SaveConfigMode)
    assert (ReductionConfig, CollectionKeys) == (smdist.ReductionConfig, smdist.CollectionKeys)
    assert StepState is Answer
