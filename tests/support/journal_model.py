"""Build journal records and the buffer they point into, without a hook or a journal file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smdist import kernel
from smdist.format.dtypes import dtype_code
from smdist.format.journal_records import Close, Declare, Inline, Part, Piece, Record, TensorSpec
from smdist.identity import ModeKeys

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = np.ndarray[Any, np.dtype[Any]]


class Scribe:
    """A training process: every call appends one record."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.arena = bytearray(b"\xee" * 24)
        self.reads: list[memoryview] = []

    def say(self, record: Record, kind: Declare | None = None) -> Piece:
        piece = Piece(len(self.pieces), record, kind)
        self.pieces.append(piece)
        return piece

    def part(
        self,
        tensors: Mapping[str, Array],
        mode_step: int,
        *,
        mode: ModeKeys = ModeKeys.TRAIN,
        step: int | None = None,
        statistics: Mapping[str, Mapping[str, float]] | None = None,
        raw: bool = True,
        inline: bool = False,
        time: float = 0.0,
    ) -> Piece:
        kind, data = pack(tensors, statistics or {}, raw)
        place = (mode.value, mode_step, mode_step if step is None else step, time, len(self.pieces))
        if inline:
            return self.say(Inline(*place, data), kind)
        offset = len(self.arena)
        self.arena += data + bytes(-len(data) % 8)
        guard = kind.guard(kernel.address_of(data))
        return self.say(Part(*place, 0, offset, guard), kind)

    def close(self, mode_step: int, *, mode: ModeKeys = ModeKeys.TRAIN, time: float = 0.0) -> Piece:
        return self.say(Close(mode.value, mode_step, mode_step, time))

    def read(self, arena: int, offset: int, nbytes: int) -> memoryview:
        assert arena == 0
        view = memoryview(self.arena)[offset : offset + nbytes]
        assert len(view) == nbytes
        self.reads.append(view)
        return view


def pack(
    tensors: Mapping[str, Array], statistics: Mapping[str, Mapping[str, float]], raw: bool
) -> tuple[Declare, bytes]:
    columns = tuple(dict.fromkeys(c for row in statistics.values() for c in row))
    data = np.array([[row[c] for c in columns] for row in statistics.values()], "<f8").tobytes()
    rows = list(statistics)
    specs = []
    for name, array in tensors.items():
        code, row = dtype_code(array.dtype), rows.index(name) if name in rows else -1
        specs.append(
            TensorSpec(name, code, array.shape, array.nbytes, len(data) if raw else -1, row, ("c",))
        )
        if raw:
            data += array.tobytes() + bytes(-array.nbytes % 8)
    return Declare(0, columns, tuple(specs), len(data)), data
