"""Parameters of rules: texts as SageMaker passes them, or values, become what a rule declares.

A rule is a dataclass; its fields are its parameters. Text may be "True", "0.5", "None", or a list
separated by commas.
"""

from __future__ import annotations

import math
import types
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from smdist.errors import ConfigurationError, UnknownKey

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["make_rule", "parameter_names"]

_TRUE = frozenset(["true", "1", "yes"])
_FALSE = frozenset(["false", "0", "no"])
_WHAT = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

_R = TypeVar("_R")


def parameter_names(rule: type[Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a rule class, in their order."""
    return tuple(each.name for each in fields(rule) if each.init)


def make_rule(rule: type[_R], parameters: Mapping[str, Any]) -> _R:
    """Return the rule with these parameters.

    Raises UnknownKey for an unknown name and ConfigurationError for a value that does not fit.
    """
    known = parameter_names(rule)
    for name in parameters:
        if name not in known:
            raise UnknownKey(name, known, f"the parameters of rule {rule.__name__}")
    kinds = get_type_hints(rule)
    values = {
        name: _convert(kinds[name], value, f"rule {rule.__name__}: {name}")
        for name, value in parameters.items()
    }
    return rule(**values)


def _convert(kind: Any, value: Any, where: str) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        choices = get_args(kind)
        if value is None or _is_none(value):
            return None
        (kind,) = (each for each in choices if each is not type(None))
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple(_convert(item, each, where) for each in _items(value))
    if kind is str and isinstance(value, list | tuple):
        return ",".join(str(each) for each in value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind, value, where)
    try:
        return _scalar(kind, value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(f"{where} is {value!r}; give {_WHAT[kind]}") from None


def _is_none(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("none", "null", "")


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        text = value.strip().removeprefix("[").removesuffix("]")
        text = text.removeprefix("(").removesuffix(")")
        return [item.strip() for item in text.split(",") if item.strip()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else [value]


def _member(kind: type[Enum], value: Any, where: str) -> Enum:
    if isinstance(value, kind):
        return value
    name = str(value).strip().upper().rpartition(".")[2]
    if name not in kind.__members__:
        raise ConfigurationError(f"{where} is {value!r}; known: {', '.join(kind.__members__)}")
    return kind[name]


def _scalar(kind: Any, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, str):
            text = value.strip().lower()
            if text not in _TRUE | _FALSE:
                raise ValueError
            return text in _TRUE
        if isinstance(value, bool):
            return value
        raise ValueError
    if isinstance(value, bool) and kind in (int, float):
        raise ValueError
    if kind is int:
        number = float(value)
        if number != int(number):
            raise ValueError
        return int(number)
    if kind is float:
        number = float(value)
        if math.isnan(number):
            raise ValueError
        return number
    if not isinstance(value, str):
        raise TypeError
    return value
