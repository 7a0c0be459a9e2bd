"""What the training process says to its uploader: the records of a journal.

The training process appends them, in this order for every saved step:

    Declare*            once per journal file and kind of part, before its first use
    (Part | Inline)*    a batch of tensors is safe: in the arena, or in the record itself
    Drop*               tensors the buffer had no room for, or that an exception cut off
    Close               everything of the step is there

and `Describe`, `Trouble`, `Flush`, `End` when there is reason to. The uploader only reads. A part
that comes after its step's Close (a scalar after the optimizer) is legal and becomes a block of
its own.
A record counts once it is wholly in the journal; its place is its *ordinal*, from 0 per session.
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

    `dtype` is a safetensors code (`F32`, `BF16`, ...). `offset` is where the raw bytes begin within
    the part (-1: not saved raw), `row` its row in the part's statistics matrix (-1: none).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    row: int
    collections: tuple[str, ...]


class Declare(msgspec.Struct, frozen=True, array_like=True, tag="declare"):
    """A kind of part, by a number that holds for this journal file only.

    A part's bytes: `rows x columns` float64 statistics, then raw tensors at 8-byte aligned offsets.
    """

    kind: int
    columns: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    nbytes: int

    def guard(self, address: int) -> int:
        """The guard of a part of this kind that lies at `address`."""
        raw = [spec for spec in self.tensors if spec.offset >= 0]
        rows = 1 + max((spec.row for spec in self.tensors), default=-1)
        offsets = [0, *(spec.offset for spec in raw)]
        sizes = [8 * rows * len(self.columns), *(spec.nbytes for spec in raw)]
        if any(o + n > self.nbytes for o, n in zip(offsets, sizes, strict=True)):
            raise ValueError(f"a part of {self.nbytes} bytes does not hold what it declares")
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
    """`guard` is that of what was captured: of the statistics and of the raw tensors, holes left out."""

    kind: int
    arena: int
    offset: int
    guard: int


class Inline(_OfStep, frozen=True, array_like=True, tag="inline"):
    """A part so small that it travels in the journal."""

    kind: int
    data: bytes


class Drop(_OfStep, frozen=True, array_like=True, tag="drop"):
    """Without names: some of the step is not there, nobody knows which.

    `steps` of them after one another are meant, whose numbers grow by the strides.
    """

    names: tuple[str, ...]
    nbytes: int
    reason: str
    mode_stride: int = 0
    stride: int = 0
    steps: int = 1


class Close(_OfStep, frozen=True, array_like=True, tag="close"):
    """`planned` false: nothing was due at this step, the script saved values of its own."""

    planned: bool = True


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """The training thread waits for room: write out what you have, open step included."""


class Describe(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """A small object of this rank (its collections), to be put under `key` with the next manifest."""

    key: str
    data: bytes


class Trouble(msgspec.Struct, frozen=True, array_like=True, tag="trouble"):
    """An error of ours that training was not bothered with."""

    message: str
    step: int
    time: float


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The hook was closed. `reason` is empty for an orderly end, else what ended the process."""

    reason: str
    time: float


Record = Union[Declare, Part, Inline, Drop, Close, Flush, Describe, Trouble, End]  # noqa: UP007


class Piece(NamedTuple):
    """A record as read back: `kind` is the declaration its number stood for, if it has one."""

    ordinal: int
    record: Record
    kind: Declare | None
