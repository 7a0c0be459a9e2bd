"""Collects rows block by block, as they are read, and joins them to `Rows` once at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from smdist.kernel import COLUMNS
from smdist.tables.block_rows import Measured
from smdist.tables.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["RowBuilder", "RowPlace"]


class RowPlace(NamedTuple):
    """What all rows of one block have in common."""

    attempt: int
    mode: int
    mode_step: int
    step: int
    rank: int


class RowBuilder:
    """Gives names and element types their numbers, and keeps what was added."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._dtypes: dict[str, int] = {}
        self._places: list[RowPlace] = []
        self._parts: list[Measured] = []

    def names(self, names: Sequence[str]) -> Array:
        """Return the numbers of tensors, new ones for those that are new."""
        return np.array([self._names.setdefault(n, len(self._names)) for n in names], np.int32)

    def dtypes(self, dtypes: Sequence[str]) -> Array:
        """Return the numbers of element types, new ones for those that are new."""
        return np.array([self._dtypes.setdefault(d, len(self._dtypes)) for d in dtypes], np.int16)

    def add(self, place: RowPlace, part: Measured) -> None:
        if len(part.tensor):
            self._places.append(place)
            self._parts.append(part)

    def build(self, members: Mapping[str, Iterable[str]]) -> Rows:
        """Return all that was added; `members` are the tensors of each collection.

        Names without rows are left out; names are in order.
        """
        if not self._parts:
            empty: dict[str, Any] = dict.fromkeys(
                (*RowPlace._fields, *Measured._fields, *COLUMNS), ()
            )
            return Rows.of((), (), {}, empty)
        joined = Measured(*map(np.concatenate, zip(*self._parts, strict=True)))
        lengths = [len(part.tensor) for part in self._parts]
        places = np.repeat(np.array(self._places, np.int64), lengths, axis=0)
        columns: dict[str, Any] = {name: places[:, at] for at, name in enumerate(RowPlace._fields)}
        columns |= {name: joined.matrix[:, at] for at, name in enumerate(COLUMNS)}
        columns |= joined._asdict()
        names, columns["tensor"] = _in_order(self._names, joined.tensor)
        dtypes, columns["dtype"] = _in_order(self._dtypes, joined.dtype)
        collections: dict[str, set[str]] = {name: set() for name in names}
        for collection, tensors in members.items():
            for name in collections.keys() & set(tensors):
                collections[name].add(collection)
        return Rows.of(names, dtypes, {n: frozenset(c) for n, c in collections.items()}, columns)


def _in_order(numbers: Mapping[str, int], used: Array) -> tuple[tuple[str, ...], Array]:
    """Return the texts that are used, sorted, and the column with their new numbers."""
    here = np.bincount(used, minlength=len(numbers)) > 0
    texts = sorted(text for text, number in numbers.items() if here[number])
    renumbered = np.zeros(len(numbers), used.dtype)
    renumbered[[numbers[text] for text in texts]] = np.arange(len(texts))
    return tuple(texts), renumbered[used]
