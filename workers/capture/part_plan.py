"""Where each tensor of a batch goes: computed once per kind of batch, used at every step.

A part in the arena: the statistics matrix of its reduced tensors, then raw tensors, each aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smdist import kernel
from smdist.format.dtypes import itemsize
from smdist.format.journal_records import Declare, TensorSpec
from smdist.kernel.tensor_stats import columns_for
from smdist.messages import encodable
from smdist.planning import TensorPlan

__all__ = ["INLINE_BYTES", "CaptureRequest", "PartPlan", "plan_part"]

INLINE_BYTES = 512  # parts up to this size travel in the journal
_SMALL, _SMALL_ALIGNMENT, _ALIGNMENT = 4096, 8, 64


class CaptureRequest(NamedTuple):
    """A tensor to be captured: as its framework describes it, and as the planner wants it."""

    name: str
    dtype: str  # safetensors code
    shape: tuple[int, ...]
    nbytes: int
    plan: TensorPlan


class PartPlan:
    """Identity is its key: the hook keeps it for as long as it may use it again."""

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
        # One raw tensor and nothing else, as gradients come.
        self.single = len(tensors) == len(self.raw) == 1 and not columns and nbytes > INLINE_BYTES

    def declaration(self, kind: int) -> Declare:
        return Declare(kind, self.columns, self.tensors, self.nbytes)


def plan_part(wanted: Sequence[CaptureRequest]) -> PartPlan:
    """Pure: equal wishes give an equal plan. Names that cannot be written are escaped.

    Types without statistics (complex numbers) are kept raw where reductions were asked for.
    """
    reduced = [bool(wish.plan.reductions) and wish.dtype in kernel.DTYPES for wish in wanted]
    names = {n for wish in wanted for n in wish.plan.reductions}
    columns = columns_for(sorted(names)) if names else ()
    at = sum(reduced) * len(columns) * 8
    row, tensors = 0, []
    for wish, is_reduced in zip(wanted, reduced, strict=True):
        offset = -1
        if wish.plan.raw or (wish.plan.reductions and not is_reduced):
            offset = at + (-at % (_SMALL_ALIGNMENT if wish.nbytes < _SMALL else _ALIGNMENT))
            at = offset + wish.nbytes
        tensors.append(
            TensorSpec(
                encodable(wish.name),
                wish.dtype,
                tuple(wish.shape),
                wish.nbytes,
                offset,
                row if is_reduced else -1,
                tuple(map(encodable, wish.plan.collections)),
            )
        )
        row += is_reduced
    return PartPlan(columns, tuple(tensors), at)
