"""The shape of the code: no folder too full, no name that hides another, no import in a circle."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.support.code_metrics import (
    Module,
    begins_with_verb,
    folder_sizes,
    import_cycles,
    modules,
    numbers,
    repeated_classes,
)

# The limit, and what is allowed until it is reached: lower the second number whenever you can, and
# never raise it. `python -m tests.support.code_metrics` prints where we are.
AT_MOST = {
    "most modules in a folder": (16, 16),
    "lines of the longest class": (300, 300),
    "most attributes of a class": (20, 20),
    "class names with two meanings": (0, 0),
    "import cycles": (0, 0),
    "lines without rules and tables": (31_500, 36_920),
}
AT_LEAST = {"docstrings that begin with a verb, %": (70, 90)}
# What people import beside smdist. A script that runs in one of our folders must find those.
OTHERS = frozenset(
    [
        "aiobotocore",
        "boto3",
        "botocore",
        "duckdb",
        "google_crc32c",
        "horovod",
        "keras",
        "lightning",
        "ml_dtypes",
        "msgspec",
        "mxnet",
        "numpy",
        "pandas",
        "pyarrow",
        "pytest",
        "ray",
        "rich",
        "safetensors",
        "scipy",
        "setuptools",
        "tensorflow",
        "torch",
        "transformers",
        "typer",
        "wheel",
        "xgboost",
    ]
)
# Scripts written for smdebug import `smdebug.tensorflow`.
FIXED = {"smdist.tensorflow"}


@pytest.fixture(scope="module")
def found() -> list[Module]:
    return modules()


@pytest.fixture(scope="module")
def measured(found: list[Module]) -> dict[str, float]:
    return numbers(found)


@pytest.mark.parametrize("name", AT_MOST)
def test_limits(name: str, measured: dict[str, float], found: list[Module]) -> None:
    limit, allowed = AT_MOST[name]
    assert measured[name] <= max(limit, allowed), worst(name, found)


@pytest.mark.parametrize("name", AT_LEAST)
def test_least(name: str, measured: dict[str, float]) -> None:
    limit, required = AT_LEAST[name]
    assert measured[name] >= min(limit, required)


def worst(name: str, found: list[Module]) -> object:
    """Return what is beyond the limit, for the message."""
    classes = [each for module in found for each in module.classes]
    return {
        "most modules in a folder": folder_sizes(found).most_common(3),
        "lines of the longest class": [c for c in classes if c.lines > AT_MOST[name][0]],
        "most attributes of a class": [c for c in classes if c.attributes > AT_MOST[name][0]],
        "class names with two meanings": repeated_classes(found),
        "import cycles": import_cycles(found),
        "lines without rules and tables": Counter(
            {module.name: module.lines for module in found}
        ).most_common(5),
    }[name]


def test_no_module_hides_one_of_the_standard_library_or_a_framework(found: list[Module]) -> None:
    taken = OTHERS | sys.stdlib_module_names
    hiding = {m.name for m in found if m.path.stem in taken}
    assert hiding - FIXED == set()


def test_every_module_is_found_once(found: list[Module]) -> None:
    assert {name: n for name, n in Counter(m.name for m in found).items() if n > 1} == {}
    assert "smdist.workers.capture.capture" in {m.name for m in found}


@pytest.mark.parametrize(
    ("docstring", "verb"),
    [
        ("Return the rank.", True),
        ("Returns the rank.", True),
        ("Copies a tensor.", True),
        ("The rank of this process.", False),
        ("Whether it is open.", False),
        ("What is left.", False),
        ("", False),
    ],
)
def test_a_verb_is_told_from_a_noun(docstring: str, *, verb: bool) -> None:
    assert begins_with_verb(docstring) is verb
