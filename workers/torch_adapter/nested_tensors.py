"""Find the tensors inside the arguments and results of a module, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import islice

import torch

__all__ = ["MAX_ENTRIES", "MAX_VALUES", "FoundTensors", "tensors_in"]

_DEEPEST = 32
# Limits of the search: entries of a sequence until one holds a tensor, and non-tensor values in all.
MAX_ENTRIES, MAX_VALUES = 256, 100_000
_LEAVES = frozenset({int, float, bool, str, bytes, complex, type(None)})


@dataclasses.dataclass
class FoundTensors:
    """`truncated`: a limit ended the search. `error`: the first exception that reading a value raised."""

    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    truncated: bool = False
    error: Exception | None = None


def tensors_in(value: object) -> FoundTensors:
    """Return the tensors in nested tuples, lists, mappings and dataclasses.

    Sets are skipped: they have no order, so a number would not name the same tensor in the next step.
    A container that occurs again, as in a tree with links to parents, is read once. A value that cannot
    be read ends the search of its container.
    """
    search = _Search()
    search.visit(value, 0)
    return search.found


class _Search:
    def __init__(self) -> None:
        self.found = FoundTensors()
        self._values_left = MAX_VALUES
        # Keeps the containers alive: the id of a temporary one must not be reused.
        self._seen: dict[int, object] = {}

    def visit(self, value: object, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.found.tensors.append(value)
            return
        self._values_left -= 1
        if type(value) in _LEAVES or depth == _DEEPEST or id(value) in self._seen:
            return
        try:
            # Before dataclasses: a model output of Hugging Face is both, and its mapping omits unset
            # fields.
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
        except Exception as error:  # noqa: BLE001 (classes of the script may raise anything)
            self.found.error = self.found.error or error

    def _sequence(self, value: tuple[object, ...] | list[object], depth: int) -> None:
        before = len(self.found.tensors)
        self._each(islice(value, MAX_ENTRIES), depth)
        if len(value) <= MAX_ENTRIES:
            return
        if len(self.found.tensors) == before:
            self.found.truncated = True
        else:
            self._each(islice(value, MAX_ENTRIES, None), depth)

    def _each(self, items: Iterable[object], depth: int) -> None:
        for item in items:
            if self._values_left <= 0:
                self.found.truncated = True
                return
            self.visit(item, depth + 1)
