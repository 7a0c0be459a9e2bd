"""Convert the steps, modes and workers that users pass to trials and tensors.

`plain_arguments` decorates `Trial`, `LiveTrial` and `Tensor`. It wraps each public method that has a
parameter of a name in `_READERS`, so a method sees an int for `step`, a ModeKeys for `mode`, and a name
or rank for `worker`. Accepted steps are whole numbers of any library (numpy, torch, `2.0`); accepted
modes are those of `smdist.modes` or their names. Anything else is a TypeError, because a wrong type
would otherwise look like a step that was not saved.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, TypeVar, Union

from smdist.identity import ModeKeys

__all__ = ["Worker", "plain_arguments"]

Worker = Union[str, int, None]  # noqa: UP007 (3.10)
"""A worker as callers give it: a name such as "worker_3", a rank, or none."""

C = TypeVar("C", bound=type)


def plain_arguments(kind: C) -> C:
    """Convert the steps, modes and workers given to each public method of the class."""
    for name, method in list(vars(kind).items()):
        if not name.startswith("_") and inspect.isfunction(method):
            setattr(kind, name, _wrapped(method))
    return kind


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(method).parameters
    readers = {name: _READERS[name] for name in parameters if name in _READERS}
    if not readers:
        return method
    places = [(place, name) for place, name in enumerate(parameters) if name in readers]
    optional = {name for name in readers if parameters[name].default is None}

    @wraps(method)
    def asked(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for place, name in places:
            if place < len(given):
                value = given[place]
            elif name in kwargs:
                value = kwargs[name]
            else:
                continue
            if value is None and name in optional:
                continue
            plain = readers[name](name, value)
            if place < len(given):
                given[place] = plain
            else:
                kwargs[name] = plain
        return method(*given, **kwargs)

    return asked


def _mode(name: str, value: object) -> ModeKeys:
    if isinstance(value, ModeKeys):
        return value
    if isinstance(value, str) and value.upper() in ModeKeys.__members__:
        return ModeKeys[value.upper()]
    known = ", ".join(f"modes.{mode.name}" for mode in ModeKeys)
    raise TypeError(f"{name}={value!r} is no mode; give one of smdist's {known}, or its name")


def _step(name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={value!r} is no step; give its number, as 12") from None


def _worker(name: str, value: object) -> str | int:
    if isinstance(value, str):
        return value
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is no worker; give its name, as 'worker_0', or its rank, as 0"
        ) from None


def _several(read: Callable[[str, object], Any]) -> Callable[[str, object], list[Any]]:
    def each(name: str, value: object) -> list[Any]:
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            return [read(name, value)]
        return [read(name, item) for item in value]

    return each


_READERS: Final[dict[str, Callable[[str, object], Any]]] = {
    "mode": _mode,
    "step": _step,
    "step_num": _step,
    "mode_step": _step,
    "global_step": _step,
    "worker": _worker,
    "steps": _several(_step),
    "required_steps": _several(_step),
    "workers": _several(_worker),
}
