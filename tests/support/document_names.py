"""What the code in a document names, and whether that exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

from smdist.trials import Trial


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def check_names(document: Path, facade: ModuleType, hook: str) -> None:
    """`smd` is the facade in it, `hook` one of its hooks."""
    for block in python_blocks(document):
        for module, name in _imported(block):
            found = importlib.import_module(module)
            assert name is None or hasattr(found, name), f"{module} has no {name}"
        for name in re.findall(r"\bsmd\.(\w+)", block):
            assert hasattr(facade, name), f"{document.name}: smd.{name}"
    classes = {"trial": Trial, "hook": getattr(facade, hook)}
    # File names such as `workers/hook/base.py` are no members.
    text = re.sub(r"[\w/]*\w\.(?:py|md)\b", "", document.read_text())
    for owner, name in re.findall(r"\b(trial|hook)\.(\w+)\(", text):
        assert hasattr(classes[owner], name), f"{document.name}: {owner}.{name}()"


def _imported(block: str) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [(node.module, alias.name) for alias in node.names]
    return found
