"""The layout of a part: tensors that are captured together and stored in one piece.

A part holds the statistics matrix of its reduced tensors, then raw tensors, each aligned. The plan is
computed once per set of tensors and used at every step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from smdist import kernel
from smdist.format.dtypes import itemsize
from smdist.format.journal_records import Declare, TensorSpec
from smdist.identity import StepRef
from smdist.kernel.tensor_stats import columns_for
from smdist.messages import encodable
from smdist.planning import TensorPlan

__all__ = ["INLINE_BYTES", "CaptureRequest", "PartPlan", "Stamp", "plan_part", "stamp_of"]

Stamp = tuple[int, int, int, float]  # mode, step of the mode, global step, time

INLINE_BYTES = 512  # parts up to this size travel in the journal
_SMALL_BYTES, _SMALL_ALIGNMENT, _ALIGNMENT = 4096, 8, 64


def stamp_of(ref: StepRef) -> Stamp:
    return (ref.mode.value, ref.mode_step, ref.step, time.time())


class CaptureRequest(NamedTuple):
    """A tensor to be captured, as its framework describes it, and what the planner wants of it."""

    name: str
    dtype: str  # safetensors code
    shape: tuple[int, ...]
    nbytes: int
    plan: TensorPlan


class PartPlan:
    """Compared by identity: the hook keeps a plan for as long as it may use it again."""

    __slots__ = (
        "columns",
        "names",
        "nbytes",
        "raw",
        "raw_offsets",
        "raw_sizes",
        "reduced",
        "reduced_counts",
        "reduced_dtypes",
        "single",
        "stride",
        "tensors",
    )

    def __init__(
        self, columns: tuple[str, ...], tensors: tuple[TensorSpec, ...], nbytes: int
    ) -> None:
        self.columns, self.tensors, self.nbytes = columns, tensors, nbytes
        self.names = tuple(spec.name for spec in tensors)
        self.raw = tuple(i for i, spec in enumerate(tensors) if spec.offset >= 0)
        self.raw_offsets = tuple(tensors[i].offset for i in self.raw)
        self.raw_sizes = tuple(tensors[i].nbytes for i in self.raw)
        self.reduced = tuple(i for i, spec in enumerate(tensors) if spec.row >= 0)
        self.reduced_counts = tuple(
            tensors[i].nbytes // itemsize(tensors[i].dtype) for i in self.reduced
        )
        self.reduced_dtypes = tuple(tensors[i].dtype for i in self.reduced)
        self.stride = 8 * len(columns)
        # A single raw tensor, such as a gradient, takes a shorter path.
        self.single = len(tensors) == len(self.raw) == 1 and not columns and nbytes > INLINE_BYTES

    def declaration(self, kind: int) -> Declare:
        return Declare(kind, self.columns, self.tensors, self.nbytes)


def plan_part(requests: Sequence[CaptureRequest]) -> PartPlan:
    """Lay out a part for the requests. Pure: equal requests give equal plans.

    Types without statistics (complex numbers) are kept raw where reductions were requested. Names that
    cannot be encoded are escaped.
    """
    reduced = [
        bool(request.plan.reductions) and request.dtype in kernel.DTYPES for request in requests
    ]
    names = {n for request in requests for n in request.plan.reductions}
    columns = columns_for(sorted(names)) if names else ()
    at = sum(reduced) * len(columns) * 8
    row, tensors = 0, []
    for request, is_reduced in zip(requests, reduced, strict=True):
        offset = -1
        if request.plan.raw or (request.plan.reductions and not is_reduced):
            offset = at + (
                -at % (_SMALL_ALIGNMENT if request.nbytes < _SMALL_BYTES else _ALIGNMENT)
            )
            at = offset + request.nbytes
        tensors.append(
            TensorSpec(
                encodable(request.name),
                request.dtype,
                tuple(request.shape),
                request.nbytes,
                offset,
                row if is_reduced else -1,
                tuple(map(encodable, request.plan.collections)),
            )
        )
        row += is_reduced
    return PartPlan(columns, tuple(tensors), at)
