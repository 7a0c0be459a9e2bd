"""The tree of errors: as it is drawn at the head of its module, as it is, and as it is exported."""

from __future__ import annotations

import inspect
import re

import pytest

from smdist import errors, exceptions

_LINE = re.compile(r"    (?P<bars>(?:│   |    )*)(?:├── |└── )(?P<name>\w+)")


def drawn() -> dict[str, str]:
    """Every class in the docstring, with the one that it stands under."""
    assert errors.__doc__ is not None
    above, parents = ["SmdistError"], {}
    for found in map(_LINE.match, errors.__doc__.splitlines()):
        if found is not None:
            depth = len(found["bars"]) // 4
            del above[depth + 1 :]
            parents[found["name"]] = above[-1]
            above.append(found["name"])
    return parents


def public() -> dict[str, type]:
    return {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.SmdistError) and not name.startswith("_")
    }


def test_every_error_is_exported_and_in_the_tree() -> None:
    assert sorted(public()) == sorted(errors.__all__)
    assert {"SmdistError", *drawn()} == set(errors.__all__)


@pytest.mark.parametrize(("name", "parent"), drawn().items())
def test_each_error_is_below_its_base_in_the_tree(name: str, parent: str) -> None:
    bases = [kind.__name__ for kind in public()[name].__mro__[1:] if kind.__name__ in public()]
    assert bases[0] == parent


def test_all_errors_are_in_smdist_exceptions() -> None:
    assert set(errors.__all__) <= set(exceptions.__all__)
    assert all(getattr(exceptions, name) is kind for name, kind in public().items())
    assert len(set(exceptions.__all__)) == len(exceptions.__all__)
    assert all(hasattr(exceptions, name) for name in exceptions.__all__)
