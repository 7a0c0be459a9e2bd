"""Parse and check single setting values, in the same way for Python arguments, JSON and text.

Each reader takes the name of the setting and its value. It returns the checked value or raises
`ConfigurationError` with name, value and remedy. Callers that know the file, section or collection
add it to the message with `error_context`.
"""

from __future__ import annotations

import json
import math
import operator
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from smdist.errors import ConfigurationError, UnknownKey

__all__ = [
    "absolute_path",
    "check_keys",
    "error_context",
    "read_boolean",
    "read_choice",
    "read_integer",
    "read_integers",
    "read_names",
    "read_number",
    "read_text",
    "read_texts",
    "read_timestamp",
]

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_YEAR_10000 = 253_402_300_800.0
# A comma inside a quantifier such as `{1,3}` is not a separator.
_SEPARATOR = re.compile(r",(?!\s*\d*\s*\})")


@contextmanager
def error_context(where: str) -> Iterator[None]:
    """Prefix the message of a ConfigurationError with the location of the setting."""
    try:
        yield
    except ConfigurationError as error:
        if type(error) is not ConfigurationError:
            raise  # subclasses name the location themselves
        raise ConfigurationError(f"{where}: {error}") from error


def check_keys(given: Iterable[object], known: Iterable[str], where: str) -> None:
    """Raise UnknownKey for the first given key that is not known."""
    names = tuple(known)
    for key in given:
        if key not in names:
            raise UnknownKey(str(key), names, where)


def read_integer(key: str, value: object, minimum: int = 0) -> int:
    found = _to_integer(value)
    if found is None:
        raise ConfigurationError(
            f"{key}={value!r} is not a whole number; give one of at least {minimum}"
        )
    if found < minimum:
        raise ConfigurationError(f"{key}={found} is too small; it must be at least {minimum}")
    return found


def _to_integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"\s*[+-]?\d+\s*", value, re.ASCII) else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def read_number(key: str, value: object, minimum: float = 0.0, *, finite: bool = True) -> float:
    found = math.nan if isinstance(value, bool) else _to_float(value)
    if math.isnan(found):
        raise ConfigurationError(f"{key}={value!r} is not a number; give one of at least {minimum}")
    if found < minimum:
        raise ConfigurationError(f"{key}={value!r} is too small; it must be at least {minimum}")
    if finite and math.isinf(found):
        raise ConfigurationError(f"{key}={value!r} is infinite; give a finite number")
    return found


def _to_float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def read_timestamp(key: str, value: object) -> float:
    """Return seconds since 1970. Milliseconds are rejected as too large."""
    found = math.nan if isinstance(value, (bool, str, bytes)) else _to_float(value)
    if not 0.0 <= found < _YEAR_10000:
        raise ConfigurationError(
            f"{key}={reprlib.repr(value)} is not a time in seconds since 1970; give time.time()"
        )
    return found


def absolute_path(path: str) -> str:
    """Make a path absolute now: a script may change its working directory later."""
    try:
        return str(Path(path).expanduser().absolute())
    except FileNotFoundError as error:
        raise FileNotFoundError("it is relative to a directory that was removed") from error


def read_boolean(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ConfigurationError(f"{key}={value!r} is neither true nor false; write one of them")


def read_choice(key: str, value: object, allowed: tuple[str, ...]) -> str:
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in allowed:
        options = ", ".join(map(repr, allowed))
        raise ConfigurationError(f"{key}={value!r} is not known; choose one of {options}")
    return word


def read_integers(key: str, value: object) -> tuple[int, ...]:
    """Return sorted, distinct integers from `"1,2"`, `"[1, 2]"` or an iterable."""
    if isinstance(value, str):
        value = _split(value)
    elif not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ConfigurationError(f"{key}={value!r} is not a list of numbers; write [1, 2] or '1,2'")
    return tuple(sorted({read_integer(key, item) for item in value}))


def read_names(key: str, value: object) -> tuple[str, ...]:
    """Return names from text separated by commas, a JSON list as text, or nested iterables."""
    return read_texts(key, _split(value) if isinstance(value, str) else value)


def read_texts(key: str, value: object) -> tuple[str, ...]:
    """Return the strings of nested iterables. A single string is one item, commas included."""
    if isinstance(value, str):
        return (read_text(key, value),)
    items: tuple[object, ...] | None = None
    if not isinstance(value, (Mapping, bytes)):
        with suppress(TypeError):
            items = tuple(value)  # type: ignore[arg-type]
    if items is None:
        raise ConfigurationError(
            f"{key}={reprlib.repr(value)} is neither text nor a list of text; write it as ['a', 'b']"
        )
    return tuple(found for item in items for found in read_texts(key, item))


def read_text(key: str, value: object) -> str:
    """Return a plain `str`: string types of numpy and of enums cannot be stored."""
    if not isinstance(value, str):
        raise ConfigurationError(
            f"{key}={reprlib.repr(value)} is of type {type(value).__name__}, not text; give a str"
        )
    return str.__str__(value)


def _split(text: str) -> list[object]:
    if text.lstrip().startswith("["):
        # Services that allow only text can still send a list. A character class such as `[0-9]+`
        # is not JSON and stays text.
        try:
            items = json.loads(text)
        except ValueError:
            pass
        else:
            if all(isinstance(item, str) for item in items) or "," in text:
                return list(items)
    return [piece for item in _SEPARATOR.split(text) if (piece := item.strip())]
