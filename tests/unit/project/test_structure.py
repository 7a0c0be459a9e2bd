"""The shape of the code: no folder too full, no name that hides another, no import in a circle."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.support.code_metrics import Module, begins_with_verb, folder_sizes, modules

MOST_MODULES_IN_A_FOLDER = 17
# What people import beside smdist. A script that runs in one of our folders must find those.
OTHERS = frozenset(
    [
        "aiobotocore",
        "boto3",
        "botocore",
        "google_crc32c",
        "horovod",
        "keras",
        "lightning",
        "ml_dtypes",
        "msgspec",
        "mxnet",
        "numpy",
        "pandas",
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


def test_no_folder_is_too_full(found: list[Module]) -> None:
    sizes = folder_sizes(found)
    assert {str(f): n for f, n in sizes.items() if n > MOST_MODULES_IN_A_FOLDER} == {}


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
