"""One table of all parameters: key, reader, and where each may be given.

Python arguments and JSON are both read with it. So a key means the same in both, and an unknown key
is reported with the nearest known one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

from smdist.config.collection import compile_regex
from smdist.config.readers import (
    absolute_path,
    check_keys,
    read_boolean,
    read_choice,
    read_integer,
    read_integers,
    read_names,
    read_number,
    read_texts,
)
from smdist.config.reduction_config import ReductionConfig, canonical_reduction
from smdist.config.save_config import SaveConfig
from smdist.config.schedule import SAVE_KEYS, read_save_key
from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys

__all__ = ["PARAMETERS", "Parameter", "Scope", "Section", "read_arguments", "read_section"]


class Scope(Flag):
    """Where a parameter may be given."""

    PYTHON = auto()  # an argument of a hook's constructor
    HOOK = auto()  # HookParameters in JSON
    COLLECTION = auto()  # CollectionParameters in JSON


Reader = Callable[[str, Any], Any]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True)
class Parameter:
    """A parameter and its reader.

    by_mode: may also be given as `train.<key>`, `eval.<key>`, ...
    in_text: the reader of values from JSON, if it differs from that for Python
    """

    key: str
    read: Reader
    scopes: Scope
    by_mode: bool = False
    in_text: Reader | None = None


def _path(key: str, value: Any) -> str:
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(
            f"{key}={value!r} is not a path; give a directory or s3://bucket/prefix"
        )
    # A URL; also one that lost a slash in pathlib, because the store explains that.
    if _SCHEME.match(text):
        return text
    try:
        return absolute_path(text)
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"{key}={value!r}: {error}; give an absolute path") from error


def _regex(key: str, value: Any) -> tuple[str, ...]:
    return tuple(compile_regex(pattern).pattern for pattern in read_texts(key, value))


def _regex_in_text(key: str, value: Any) -> tuple[str, ...]:
    return _regex(key, read_names(key, value))


def _workers(key: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value.strip().lower() in ("one", "all"):
        return value.strip().lower()
    remedy = "write 'one', 'all' or a list of ranks such as [0, 3]"
    try:
        ranks = read_integers(key, [value] if isinstance(value, int) else value)
    except ConfigurationError:
        raise ConfigurationError(f"{key}={value!r} is not understood; {remedy}") from None
    if not ranks:
        raise ConfigurationError(f"{key}={value!r} selects no rank; {remedy}")
    return ranks


def _reductions(key: str, value: Any) -> tuple[str, ...]:
    return tuple(canonical_reduction(name, key) for name in read_names(key, value))


def _size(key: str, value: Any) -> int:
    return read_integer(key, value, minimum=1)


def _share(key: str, value: Any) -> float:
    found = read_number(key, value)
    if not 0 < found < 1:
        raise ConfigurationError(f"{key}={value!r} must lie between 0 and 1; 0.03 is 3 %")
    return found


def _one_of(*allowed: str) -> Reader:
    return lambda key, value: read_choice(key, value, allowed)


_EVERYWHERE = Scope.PYTHON | Scope.HOOK
_JSON = Scope.HOOK | Scope.COLLECTION

_TABLE = (
    Parameter("out_dir", _path, Scope.PYTHON),
    Parameter("export_tensorboard", read_boolean, _EVERYWHERE),
    Parameter("tensorboard_dir", _path, _EVERYWHERE),
    Parameter("dry_run", read_boolean, _EVERYWHERE),
    Parameter("reduction_config", lambda _, value: ReductionConfig.parse(value), Scope.PYTHON),
    Parameter("save_config", lambda _, value: SaveConfig.parse(value), Scope.PYTHON),
    Parameter("include_regex", _regex, _EVERYWHERE | Scope.COLLECTION, in_text=_regex_in_text),
    Parameter("include_collections", read_names, _EVERYWHERE),
    Parameter("save_all", read_boolean, _EVERYWHERE),
    Parameter("include_workers", _workers, _EVERYWHERE),
    # How the hook behaves beside the training job.
    Parameter("buffer_bytes", _size, _EVERYWHERE),
    Parameter("segment_bytes", _size, _EVERYWHERE),
    Parameter("linger_s", read_number, _EVERYWHERE),
    Parameter("drain_deadline_s", read_number, _EVERYWHERE),
    Parameter("on_full", _one_of("block", "drop"), _EVERYWHERE),
    Parameter("on_error", _one_of("warn", "raise"), _EVERYWHERE),
    Parameter("overhead_budget", _share, _EVERYWHERE),
    Parameter("resume", read_boolean, _EVERYWHERE),
    Parameter("stage_gradients", _one_of("local", "synced"), _EVERYWHERE),
    # Flat keys in JSON for what are objects in Python.
    Parameter("reductions", _reductions, _JSON),
    Parameter("save_raw_tensor", read_boolean, _JSON),
    Parameter("save_shape", read_boolean, _JSON),
    *(Parameter(key, read_save_key, _JSON, by_mode=True) for key in SAVE_KEYS),
    Parameter("save_histogram", read_boolean, Scope.COLLECTION),
    Parameter("tensor_names", read_names, Scope.COLLECTION),
)
PARAMETERS: Mapping[str, Parameter] = {parameter.key: parameter for parameter in _TABLE}

_REDUCTION = ("reductions", "save_raw_tensor", "save_shape")


@dataclass(frozen=True)
class Section:
    """A parsed JSON section: schedule settings plain and by mode, reductions, all others."""

    save: Mapping[str, Any]
    save_by_mode: Mapping[ModeKeys, Mapping[str, Any]]
    reduction: Mapping[str, Any]
    rest: Mapping[str, Any]

    def save_config(self, fallback: SaveConfig | None = None) -> SaveConfig:
        return SaveConfig.partial(self.save, self.save_by_mode, fallback)

    def reduction_config(self, fallback: ReductionConfig | None = None) -> ReductionConfig:
        return ReductionConfig.partial(self.reduction, fallback)


def keys_in(scope: Scope) -> Iterable[str]:
    """Return every key that may be given in `scope`, including those with a mode."""
    for parameter in PARAMETERS.values():
        if scope in parameter.scopes:
            yield parameter.key
            if parameter.by_mode:
                yield from (f"{mode.name.lower()}.{parameter.key}" for mode in ModeKeys)


def read_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Read Python arguments by name; None means that one is not given."""
    check_keys(arguments, keys_in(Scope.PYTHON), "the hook's arguments")
    return {
        key: PARAMETERS[key].read(key, value)
        for key, value in arguments.items()
        if value is not None
    }


def read_section(values: Mapping[str, Any], scope: Scope, where: str) -> Section:
    """Read a JSON section; null means that a key is not given."""
    check_keys(values, keys_in(scope), where)
    plain: dict[str, dict[str, Any]] = {"save": {}, "reduction": {}, "rest": {}}
    by_mode: dict[ModeKeys, dict[str, Any]] = {}
    for key, value in values.items():
        if value is None:
            continue
        mode, dot, bare = key.rpartition(".")
        parameter = PARAMETERS[bare]
        found = (parameter.in_text or parameter.read)(key, value)
        if dot:
            by_mode.setdefault(ModeKeys[mode.upper()], {})[bare] = found
        elif parameter.by_mode:
            plain["save"][bare] = found
        else:
            plain["reduction" if bare in _REDUCTION else "rest"][bare] = found
    return Section(save_by_mode=by_mode, **plain)
