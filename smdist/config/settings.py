"""Base classes of the configuration objects that a script may change at any time.

Each object holds only what was set on it; what is not set is read from a fallback object. A change is
passed on to listeners: schedule -> collection -> manager -> planner -> hook, on the thread that makes
it. Listeners are weak references, so an object that a script keeps does not keep a closed hook alive.
They are not part of an object's value: copies and pickles have none.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableSequence, MutableSet, Sequence
from typing import Any, Generic, Protocol, TypeVar

from typing_extensions import Self

__all__ = [
    "Configuration",
    "LayeredConfiguration",
    "ListView",
    "Listener",
    "Observable",
    "SetView",
    "Setting",
]

T = TypeVar("T")


class Listener(Protocol):
    def changed(self) -> None: ...


class Observable:
    """An object whose `changed()` calls `changed()` of every listener."""

    def __init__(self) -> None:
        # By id: a listener may define equality and therefore have no hash.
        self._listeners: dict[int, weakref.ref[Any]] = {}

    def watch(self, listener: Listener) -> None:
        self._listeners[id(listener)] = weakref.ref(listener)

    def unwatch(self, listener: Listener) -> None:
        self._listeners.pop(id(listener), None)

    def changed(self) -> None:
        for key, reference in list(self._listeners.items()):
            listener = reference()
            if listener is None:
                self._listeners.pop(key, None)
            else:
                listener.changed()


class Configuration(Observable):
    """Settings as an object with a dict and a JSON form. Copies and pickles have no listeners."""

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_dict(cls, params: Any) -> Self:
        raise NotImplementedError

    def to_json_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        return cls.from_dict(json.loads(json_str))

    def copy(self) -> Self:
        return self.from_dict(self.to_dict())

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: object) -> Self:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self.to_dict(),)

    def __eq__(self, other: object) -> bool:
        return (
            self.to_dict() == other.to_dict() if isinstance(other, type(self)) else NotImplemented
        )

    __hash__: Any = None

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.to_dict().items())
        return f"{type(self).__name__}({settings})"

    def _get(self, key: str) -> Any:
        """Return the value of an attribute that is a `Setting`."""
        raise NotImplementedError

    def _put(self, key: str, value: object) -> None:
        """Check and set the value of an attribute that is a `Setting`."""
        raise NotImplementedError


class LayeredConfiguration(Configuration):
    """A configuration that reads what is not set in its layer from a fallback.

    Several objects may show one layer with different fallbacks: a script's own object, and the
    same in a collection of a hook. They share settings and listeners.
    """

    def __init__(self, layer: Observable) -> None:
        self._layer: Any = layer
        self._fallback: Any = None  # of the same type
        self._is_partial = False  # follows the hook when it is put into a collection

    def with_fallback(self, fallback: Self) -> Self:
        """Return this configuration for a collection of a hook that is configured by `fallback`.

        A complete configuration is returned unchanged. A collection that moves to another hook
        follows that one from then on.
        """
        if not self._is_partial or fallback is self or fallback is self._fallback:
            return self
        return self._over(fallback)

    def _over(self, fallback: Self) -> Self:
        view = type(self)()  # type: ignore[call-arg]
        view._layer, view._fallback, view._is_partial = self._layer, fallback, True
        return view

    def watch(self, listener: Listener) -> None:
        self._layer.watch(listener)

    def unwatch(self, listener: Listener) -> None:
        self._layer.unwatch(listener)

    def changed(self) -> None:
        self._layer.changed()


class Setting(Generic[T]):
    """An attribute of a configuration, resolved when it is read and checked when it is assigned.

    A list is returned as a view, so that it can be edited in place.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = name

    def __get__(self, instance: Configuration, owner: type) -> T:
        value: Any = instance._get(self._key)
        if isinstance(value, tuple):
            value = ListView(
                lambda: instance._get(self._key), lambda new: self.__set__(instance, new)
            )
        return value  # type: ignore[no-any-return]

    def __set__(self, instance: Configuration, value: Any) -> None:
        instance._put(self._key, value)


class ListView(MutableSequence[T]):
    """A list attribute whose edits go through the owner's setter.

    An edit is therefore checked and reported like an assignment.
    """

    def __init__(self, read: Callable[[], Sequence[T]], assign: Callable[[list[T]], None]) -> None:
        self._read, self._assign = read, assign

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, index: Any) -> Any:
        return list(self._read())[index]

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
    """The same for a set. Iterates in the order in which items were added."""

    def __init__(self, read: Callable[[], Iterable[T]], assign: Callable[[list[T]], None]) -> None:
        self._read, self._assign = read, assign

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> set[Any]:
        return set(it)  # the result of `a | b` belongs to no owner

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
