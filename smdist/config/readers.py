"""The grammar of a single setting, the same whether it comes from Python, from JSON or as text.

Every reader takes the key it reads for and raises `ConfigurationError` naming key, value and
remedy; callers that know more (a file, a section, a collection) put it in front with `located`.
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
    "boolean",
    "choice",
    "integer",
    "integers",
    "known_keys",
    "located",
    "moment",
    "number",
    "strings",
    "text",
    "texts",
]

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_YEAR_10000 = 253_402_300_800.0
# A comma inside a quantifier such as `{1,3}` separates nothing.
_SEPARATOR = re.compile(r",(?!\s*\d*\s*\})")


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put the place of a setting in front of what is wrong with it."""
    try:
        yield
    except UnknownKey:
        raise  # says where by itself
    except ConfigurationError as error:
        if type(error) is not ConfigurationError:
            raise
        raise ConfigurationError(f"{where}: {error}") from error


def known_keys(given: Iterable[object], known: Iterable[str], where: str) -> None:
    names = tuple(known)
    for key in given:
        if key not in names:
            raise UnknownKey(str(key), names, where)


def integer(key: str, value: object, minimum: int = 0) -> int:
    found = _integer(value)
    if found is None:
        raise ConfigurationError(
            f"{key}={value!r} is not a whole number; give one of at least {minimum}"
        )
    if found < minimum:
        raise ConfigurationError(f"{key}={found} is too small; it must be at least {minimum}")
    return found


def _integer(value: object) -> int | None:
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


def number(key: str, value: object, minimum: float = 0.0, *, finite: bool = True) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        found = float(value)  # type: ignore[arg-type]
        if math.isnan(found):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(
            f"{key}={value!r} is not a number; give one of at least {minimum}"
        ) from None
    if found < minimum:
        raise ConfigurationError(f"{key}={value!r} is too small; it must be at least {minimum}")
    if finite and math.isinf(found):
        raise ConfigurationError(f"{key}={value!r} has no end; give a number, as large as you like")
    return found


def absolute_path(text: str) -> str:
    """Resolved now: a script may change its working directory before anything is saved."""
    try:
        return str(Path(text).expanduser().absolute())
    except FileNotFoundError as error:
        raise FileNotFoundError("it is relative to a directory that was removed") from error


def boolean(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigurationError(f"{key}={value!r} is neither true nor false; write one of them")


def choice(key: str, value: object, allowed: tuple[str, ...]) -> str:
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in allowed:
        options = ", ".join(map(repr, allowed))
        raise ConfigurationError(f"{key}={value!r} is not known; choose one of {options}")
    return text


def integers(key: str, value: object) -> tuple[int, ...]:
    """Steps or ranks, ascending and without repetition; `"1,2"`, `"[1, 2]"` or an iterable."""
    if isinstance(value, str):
        value = _split(value)
    elif not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ConfigurationError(f"{key}={value!r} is not a list of numbers; write [1, 2] or '1,2'")
    return tuple(sorted({integer(key, item) for item in value}))


def strings(key: str, value: object) -> tuple[str, ...]:
    """Names: text separated by commas, a JSON list as text, or any nesting of iterables."""
    if isinstance(value, str):
        return texts(key, _split(value))
    return texts(key, value)


def texts(key: str, value: object) -> tuple[str, ...]:
    """As `strings`, but text stands for itself, commas and all."""
    if isinstance(value, str):
        return (text(key, value),)
    items: tuple[object, ...] | None = None
    if not isinstance(value, (Mapping, bytes)):
        with suppress(TypeError):
            items = tuple(value)  # type: ignore[arg-type]
    if items is None:
        raise ConfigurationError(
            f"{key}={reprlib.repr(value)} is neither text nor a list of text; write it as ['a', 'b']"
        )
    return tuple(found for item in items for found in texts(key, item))


def text(key: str, value: object) -> str:
    """A name, as plain `str`: numpy and enumerations have kinds of text that cannot be stored."""
    if not isinstance(value, str):
        raise ConfigurationError(
            f"{key}={reprlib.repr(value)} is of type {type(value).__name__}, not text; give a str"
        )
    return str.__str__(value)


def moment(key: str, value: object) -> float:
    """A time in seconds since 1970; one in milliseconds is refused."""
    try:
        found = math.nan if isinstance(value, (bool, str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not 0.0 <= found < _YEAR_10000:
        raise ConfigurationError(
            f"{key}={reprlib.repr(value)} is no time in seconds since 1970; give time.time()"
        )
    return found


def _split(text: str) -> list[object]:
    if text.lstrip().startswith("["):
        # A configuration service that allows only text can still carry a list; a character class
        # such as `[0-9]+` is no JSON and stays text.
        try:
            items = json.loads(text)
        except ValueError:
            pass
        else:
            if all(isinstance(item, str) for item in items) or "," in text:
                return list(items)
    return [piece for item in _SEPARATOR.split(text) if (piece := item.strip())]
