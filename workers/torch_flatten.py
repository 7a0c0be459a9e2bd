"""The tensors inside whatever a module takes and returns, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

__all__ = ["tensors_in"]

_DEEPEST = 32


def tensors_in(value: object, _depth: int = 0) -> Iterator[torch.Tensor]:
    """Tensors of nested tuples, lists, mappings and dataclasses; anything else has none.

    Sets have no order, so a number would not name the same tensor in the next step: they have none.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (str, bytes)) or value is None or _depth == _DEEPEST:
        return
    elif isinstance(value, Mapping):
        # Before dataclasses: a model output of Hugging Face is both, and its mapping leaves out
        # the fields that are not set.
        for item in value.values():
            yield from tensors_in(item, _depth + 1)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item, _depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), _depth + 1)
