"""The records of a journal, which the training process writes and its uploader reads.

For every saved step the training process appends, in this order:

    Declare*            once per journal file and kind of part, before its first use
    (Part | Inline)*    a batch of tensors is stored: in the arena, or in the record itself
    Drop*               tensors that did not fit into the buffer or that an exception prevented
    Close               the step is complete

`Describe`, `Trouble`, `Flush` and `End` come when needed. A part after the Close of its step (a scalar
after the optimizer) is legal and becomes a block of its own. A record counts once it is completely in
the journal; its number is its *ordinal*, from 0 per session.
"""

from __future__ import annotations

from typing import NamedTuple, Union

import msgspec

from smdist import kernel
from smdist.identity import ModeKeys, StepRef

__all__ = [
    "Close",
    "Declare",
    "Describe",
    "Drop",
    "End",
    "Flush",
    "Inline",
    "Part",
    "Piece",
    "Record",
    "TensorSpec",
    "Trouble",
]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a part.

    `dtype` is a safetensors code (`F32`, `BF16`, ...). `offset` is the start of the raw bytes within
    the part (-1: none), `row` the row in the part's statistics matrix (-1: none).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    row: int
    collections: tuple[str, ...]


class Declare(msgspec.Struct, frozen=True, array_like=True, tag="declare"):
    """A kind of part. Its number is valid in this journal file only.

    The bytes of a part: `rows x columns` float64 statistics, then raw tensors at offsets that are
    multiples of 8.
    """

    kind: int
    columns: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    nbytes: int

    def guard(self, address: int) -> int:
        """Compute the guard of a part of this kind at `address`."""
        raw = [spec for spec in self.tensors if spec.offset >= 0]
        rows = 1 + max((spec.row for spec in self.tensors), default=-1)
        offsets = [0, *(spec.offset for spec in raw)]
        sizes = [8 * rows * len(self.columns), *(spec.nbytes for spec in raw)]
        if any(o + n > self.nbytes for o, n in zip(offsets, sizes, strict=True)):
            raise ValueError(f"the tensors of a part exceed its {self.nbytes} bytes")
        return kernel.guard([address + offset for offset in offsets], sizes, address)


class _OfStep(msgspec.Struct, frozen=True, array_like=True):
    mode: int
    mode_step: int
    step: int
    time: float

    @property
    def ref(self) -> StepRef:
        return StepRef(ModeKeys(self.mode), self.mode_step, self.step)


class Part(_OfStep, frozen=True, array_like=True, tag="part"):
    """A part in the arena. `guard` covers statistics and raw tensors, but not the padding."""

    kind: int
    arena: int
    offset: int
    guard: int


class Inline(_OfStep, frozen=True, array_like=True, tag="inline"):
    """A part that is small enough for the journal."""

    kind: int
    data: bytes


class Drop(_OfStep, frozen=True, array_like=True, tag="drop"):
    """Tensors that were not captured. Without names: it is not known which.

    Stands for `steps` consecutive steps, whose numbers grow by the strides.
    """

    names: tuple[str, ...]
    nbytes: int
    reason: str
    mode_stride: int = 0
    stride: int = 0
    steps: int = 1


class Close(_OfStep, frozen=True, array_like=True, tag="close"):
    """The end of a step. `planned` false: nothing was due, only the script saved values."""

    planned: bool = True


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """The training thread waits for room: the uploader stores everything, including the open step."""


class Describe(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """A small object of this rank (its collections), stored under `key` with the next manifest."""

    key: str
    data: bytes


class Trouble(msgspec.Struct, frozen=True, array_like=True, tag="trouble"):
    """An error in smdist that did not stop training."""

    message: str
    step: int
    time: float


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The hook was closed. `reason` is empty for a regular end, else what ended the process."""

    reason: str
    time: float


Record = Union[Declare, Part, Inline, Drop, Close, Flush, Describe, Trouble, End]  # noqa: UP007


class Piece(NamedTuple):
    """A record that was read, with the declaration of its kind, if it has one."""

    ordinal: int
    record: Record
    kind: Declare | None
