"""The tensors inside whatever a module takes and returns, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import islice

import torch

__all__ = ["MOST_ENTRIES", "MOST_LOOKS", "Flat", "tensors_in"]

_DEEPEST = 32
# What is looked at, at most: entries at the beginning of a sequence, until one holds a tensor; and
# whatever is not a tensor, in all.
MOST_ENTRIES, MOST_LOOKS = 256, 100_000
_LEAVES = frozenset({int, float, bool, str, bytes, complex, type(None)})


@dataclasses.dataclass
class Flat:
    """`cut`: not everything was looked at. `error`: what reading a value raised, the first time."""

    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    cut: bool = False
    error: Exception | None = None


def tensors_in(value: object) -> Flat:
    """Tensors of nested tuples, lists, mappings and dataclasses; anything else has none.

    Sets have no order, so a number would not name the same tensor in the next step: they have none.
    A container that is met again (a tree whose nodes know their parents) was looked at before. What
    cannot be read is passed over, with what comes after it in the same container.
    """
    walk = _Walk()
    walk.look(value, 0)
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found = Flat()
        self._left = MOST_LOOKS
        # The containers themselves: one that was made on the way must not leave its id to another.
        self._seen: dict[int, object] = {}

    def look(self, value: object, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.found.tensors.append(value)
            return
        self._left -= 1
        if type(value) in _LEAVES or depth == _DEEPEST or id(value) in self._seen:
            return
        try:
            # Before dataclasses: a model output of Hugging Face is both, and its mapping leaves out
            # the fields that are not set.
            if isinstance(value, Mapping):
                self._seen[id(value)] = value
                self._each(value.values(), depth)
            elif isinstance(value, (tuple, list)):
                self._seen[id(value)] = value
                self._sequence(value, depth)
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                self._seen[id(value)] = value
                fields = dataclasses.fields(value)
                self._each((getattr(value, field.name, None) for field in fields), depth)
        except Exception as error:  # noqa: BLE001 (of the script's own classes: anything)
            self.found.error = self.found.error or error

    def _sequence(self, value: tuple[object, ...] | list[object], depth: int) -> None:
        before = len(self.found.tensors)
        self._each(islice(value, MOST_ENTRIES), depth)
        if len(value) <= MOST_ENTRIES:
            return
        if len(self.found.tensors) == before:
            self.found.cut = True
        else:
            self._each(islice(value, MOST_ENTRIES, None), depth)

    def _each(self, items: Iterable[object], depth: int) -> None:
        for item in items:
            if self._left <= 0:
                self.found.cut = True
                return
            self.look(item, depth + 1)
