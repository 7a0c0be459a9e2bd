"""Rows of the tensors of one block: statistics that were saved, and tensors that are measured in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from smdist import kernel
from smdist.kernel.tensor_stats import COLUMNS, measure_many

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["BlockRows", "Measured", "SpanTensor"]


class SpanTensor(NamedTuple):
    """A raw tensor: its place among the rows, and where its elements lie, in which span of bytes."""

    place: int
    dtype: str
    size: int
    span: int
    start: int


class Measured(NamedTuple):
    """Rows of one block: `matrix` has `smdist.kernel.COLUMNS`, all else one value per row."""

    tensor: Array
    dtype: Array
    order: Array
    matrix: Array
    fingerprint: Array
    has_fingerprint: Array


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Room for the rows of a block; `here` marks those that are filled."""

    here: Array
    matrix: Array
    fingerprint: Array
    has_fingerprint: Array

    @staticmethod
    def empty(size: int) -> BlockRows:
        here, has = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        return BlockRows(here, np.empty((size, len(COLUMNS))), np.zeros(size, np.uint64), has)

    def put(self, places: Array, statistics: Array) -> None:
        """Take rows that were saved."""
        self.matrix[places], self.here[places] = statistics, True

    def measure(self, spans: Sequence[bytes | None], tensors: Sequence[SpanTensor]) -> None:
        """Measure the tensors that have no row yet."""
        bases = [kernel.address_of(data or b"") for data in spans]
        new = [one for one in tensors if not self.here[one.place]]
        if new:
            addresses = [bases[one.span] + one.start for one in new]
            counts, dtypes = [one.size for one in new], [one.dtype for one in new]
            places = np.array([one.place for one in new], np.intp)
            self.put(places, measure_many(addresses, counts, dtypes))

    def measured(self, tensor: Array, dtype: Array, order: Array) -> Measured:
        """Return the rows that are filled, with what else is known of them."""
        all_of = Measured(tensor, dtype, order, self.matrix, self.fingerprint, self.has_fingerprint)
        return all_of if self.here.all() else Measured(*(column[self.here] for column in all_of))
