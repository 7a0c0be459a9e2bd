"""Configuration objects that may be changed at any time, and those who must hear of it.

A change travels upwards: schedule -> collection -> manager -> planner -> hook. Watchers are held
weakly, so an object that a script keeps does not keep a closed hook alive, and they are no part of
an object's value: copies and pickles have none.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableSequence, MutableSet, Sequence
from typing import Any, Protocol, TypeVar, overload

from typing_extensions import Self

__all__ = ["Configuration", "ListView", "Observable", "SetView", "Watcher"]

T = TypeVar("T")


class Watcher(Protocol):
    def changed(self) -> None: ...


class Observable:
    """Something whose `changed()` tells everybody that watches it."""

    def __init__(self) -> None:
        # By id: what watches may define equality and so have no hash.
        self._watchers: dict[int, weakref.ref[Any]] = {}

    def watch(self, watcher: Watcher) -> None:
        self._watchers[id(watcher)] = weakref.ref(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.pop(id(watcher), None)

    def changed(self) -> None:
        for key, reference in list(self._watchers.items()):
            watcher = reference()
            if watcher is None:
                self._watchers.pop(key, None)
            else:
                watcher.changed()


class Configuration(Observable):
    """Settings as an object: as data and as JSON, and copied without whoever watches."""

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_dict(cls, params: Any) -> Self:
        raise NotImplementedError

    def copy(self) -> Self:
        raise NotImplementedError

    def to_json_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        return cls.from_dict(json.loads(json_str))

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: object) -> Self:
        return self.copy()


class ListView(MutableSequence[T]):
    """A list attribute that can be edited in place: every edit goes through the owner's setter.

    So an edit is validated and noticed like an assignment, and never lost.
    """

    def __init__(self, read: Callable[[], Sequence[T]], assign: Callable[[list[T]], None]) -> None:
        self._read, self._assign = read, assign

    def __len__(self) -> int:
        return len(self._read())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return list(self._read())[index]

    @overload
    def __setitem__(self, index: int, value: T) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[T]) -> None: ...
    def __setitem__(self, index: Any, value: Any) -> None:
        items = list(self._read())
        items[index] = value
        self._assign(items)

    def __delitem__(self, index: int | slice) -> None:
        items = list(self._read())
        del items[index]
        self._assign(items)

    def insert(self, index: int, value: T) -> None:
        items = list(self._read())
        items.insert(index, value)
        self._assign(items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, tuple, ListView)):
            return NotImplemented
        return list(self) == list(other)

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self, *other]

    def __repr__(self) -> str:
        return repr(list(self._read()))


class SetView(MutableSet[T]):
    """The same for a set; iterates in the order in which things were added."""

    def __init__(self, read: Callable[[], Iterable[T]], assign: Callable[[list[T]], None]) -> None:
        self._read, self._assign = read, assign

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> set[Any]:
        return set(it)  # the result of `a | b` is nobody's attribute

    def __contains__(self, item: object) -> bool:
        return item in tuple(self._read())

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._read()))

    def __len__(self) -> int:
        return len(tuple(self._read()))

    def add(self, value: T) -> None:
        self._assign([*self._read(), value])

    def discard(self, value: T) -> None:
        self._assign([item for item in self._read() if item != value])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, tuple)):
            other = set(other)
        return super().__eq__(other)

    def __repr__(self) -> str:
        return repr(set(self._read()))
