"""Check decoded values against constraints in the types of their fields.

    Rank = Annotated[int, Between(0, 9)]

`check(kind, value)` checks each field for all entries of a structure at once, with one `min` and one
`max`, so that thousands of entries cost little. `msgspec.Meta` could do this while decoding, but it
sometimes crashes the interpreter at exit (msgspec/msgspec#717).
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

__all__ = ["Between", "Matches", "check"]

_Check = Callable[[Sequence[Any]], None]
"""Raises ValueError if one of the values is not permitted."""


class Between(NamedTuple):
    """A number from `least` to `most`."""

    least: int
    most: float

    def check(self, values: Sequence[Any]) -> None:
        least, most = min(values), max(values)
        if least < self.least or most > self.most:
            value = least if least < self.least else most
            raise ValueError(f"{value} is not between {self.least} and {self.most}")


class Matches(NamedTuple):
    """Text that matches `pattern` entirely and has at most `longest` characters."""

    pattern: re.Pattern[str]
    what: str
    longest: int

    def check(self, values: Sequence[Any]) -> None:
        for value in set(values):
            if len(value) > self.longest or not self.pattern.fullmatch(value):
                raise ValueError(f"{value[:100]!r} is not a {self.what}")


def check(kind: Any, value: Any) -> None:
    """Raise ValueError if anything in `value`, which has the type `kind`, is not permitted."""
    plan = _plan(kind)
    if plan is not None:
        plan([value])


@lru_cache(maxsize=256)
def _plan(kind: Any) -> _Check | None:
    """Return the check for values of that type; None if there is nothing to check."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        (mark,) = (mark for mark in arguments[1:] if isinstance(mark, (Between, Matches)))
        return mark.check
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        return _fields(attrgetter, {name: _plan(hints[name]) for name in kind.__struct_fields__})
    if origin is tuple and arguments[1:] == (...,):
        return _inside(_plan(arguments[0]))
    if origin is tuple:
        return _fields(itemgetter, {n: _plan(one) for n, one in enumerate(arguments)})
    if origin in (Union, types.UnionType):
        return _union([(_plain(one), plan) for one in arguments if (plan := _plan(one))])
    return None


def _fields(getter: Callable[..., Any], plans: Mapping[Any, _Check | None]) -> _Check | None:
    """Return a check of structures or tuples, field by field for all of them."""
    some = [(name, plan) for name, plan in plans.items() if plan is not None]
    if not some:
        return None
    names, checks = zip(*some, strict=True)
    get = getter(*names) if len(names) > 1 else _one(getter(*names))

    def check_fields(values: Sequence[Any]) -> None:
        columns = zip(*map(get, values), strict=True)
        name = ""
        try:
            for name, plan, column in zip(names, checks, columns, strict=True):  # noqa: B007
                plan(column)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    return check_fields


def _one(get: Callable[[Any], Any]) -> Callable[[Any], tuple[Any]]:
    return lambda value: (get(value),)


def _inside(plan: _Check | None) -> _Check | None:
    def check_inside(values: Sequence[Any]) -> None:
        inside = values[0] if len(values) == 1 else list(chain.from_iterable(values))
        if inside:
            plan(inside)  # type: ignore[misc]

    return plan and check_inside


def _union(plans: Sequence[tuple[type, _Check]]) -> _Check | None:
    """Return a check that applies each plan to the values of its type."""

    def check_each(values: Sequence[Any]) -> None:
        for kind, plan in plans:
            some = [value for value in values if isinstance(value, kind)]
            if some:
                plan(some)

    return check_each if plans else None


def _plain(kind: Any) -> type:
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    plain: type = get_origin(kind) or kind
    return plain
