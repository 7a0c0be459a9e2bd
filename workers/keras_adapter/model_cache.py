"""What a hook keeps for each Keras model that it has seen.

The value hangs on the model itself, in an attribute that Keras ignores. Functions that were traced
for a model refer to all of it, so keeping them anywhere else would keep every model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

__all__ = ["ModelCache"]

T = TypeVar("T")
_numbers = count()


class _Slot(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the model starts without it


class ModelCache(Generic[T]):
    """One value for each model, made by `make` on first use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._attribute = f"_smdist_{next(_numbers)}"
        self._models: list[weakref.ref[Any]] = []

    def of(self, model: Any) -> T:
        slot: _Slot[T] | None = vars(model).get(self._attribute)
        if slot is None:
            slot = vars(model)[self._attribute] = _Slot(self._make())
            self._models = [*(m for m in self._models if m() is not None), weakref.ref(model)]
        return slot.value

    def __iter__(self) -> Iterator[T]:
        for reference in self._models:
            model = reference()
            if model is not None:
                yield self.of(model)

    def clear(self) -> None:
        for reference in self._models:
            model = reference()
            if model is not None:
                vars(model).pop(self._attribute, None)
        self._models = []
