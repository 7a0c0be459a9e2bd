"""Copy the tensors of a part, and their statistics, to their places in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from smdist import kernel
from smdist.kernel.tensor_stats import measure_into
from smdist.workers.capture.part_plan import PartPlan
from smdist.workers.capture.tensor_access import CopyHandle, TensorAccess

__all__ = ["CopiedPart", "TensorCopier"]

T = TypeVar("T")


class CopiedPart(NamedTuple):
    """A part whose bytes are in place once all `pending` device copies have arrived."""

    pending: list[CopyHandle]
    base: int
    copied: int  # the guard of what the kernel has copied
    addresses: list[int]  # of the rest
    sizes: list[int]

    def guard(self) -> int:
        """Return the checksum that the uploader verifies; nothing may be pending."""
        return (self.copied + kernel.guard(self.addresses, self.sizes, self.base)) & 0xFFFFFFFF


class TensorCopier(Generic[T]):
    def __init__(self, access: TensorAccess[T]) -> None:
        self._access = access

    def copy(
        self, plan: PartPlan, tensors: Sequence[T], base: int, target: memoryview
    ) -> CopiedPart:
        """Copy `tensors` to `target`, which lies at address `base`, as `plan` says."""
        access, pending = self._access, []
        targets, sources, sizes = [], [], []
        others, other_sizes = [], []  # not copied by the kernel
        for index, offset, size in zip(plan.raw, plan.raw_offsets, plan.raw_sizes, strict=True):
            tensor = tensors[index]
            if address := access.address(tensor):
                targets.append(base + offset)
                sources.append(address)
                sizes.append(size)
                continue
            others.append(base + offset)
            other_sizes.append(size)
            if access.on_device(tensor):
                pending.append(access.start_copy(tensor, target[offset : offset + size]))
            elif size:
                access.write(tensor, target[offset : offset + size])
        copied = kernel.copy(targets, sources, sizes, base)
        if plan.reduced:
            pending += self._reduce(plan, tensors, base, target)
            others.append(base)
            other_sizes.append(len(plan.reduced) * plan.stride)
        return CopiedPart(pending, base, copied, others, other_sizes)

    def _reduce(
        self, plan: PartPlan, tensors: Sequence[T], base: int, target: memoryview
    ) -> list[CopyHandle]:
        """Write the rows of statistics; those of tensors on a device follow later."""
        access, stride = self._access, plan.stride
        pending, keep_alive = [], []
        rows: list[int] = []
        addresses: list[int] = []
        for row, index in enumerate(plan.reduced):
            tensor = tensors[index]
            if access.on_device(tensor):
                place = target[row * stride : (row + 1) * stride]
                pending.append(access.start_measure(tensor, plan.columns, place))
                continue
            address = access.address(tensor)
            if not address and plan.reduced_counts[row]:
                keep_alive.append(access.contiguous(tensor))
                address = access.address(keep_alive[-1])
            rows.append(row)
            addresses.append(address)
        counts, dtypes = plan.reduced_counts, plan.reduced_dtypes
        if not pending:
            measure_into(addresses, counts, dtypes, plan.columns, base, stride)
            return pending
        for row, address in zip(rows, addresses, strict=True):  # between those of a device
            place_of_row = base + row * stride
            measure_into(
                [address], [counts[row]], [dtypes[row]], plan.columns, place_of_row, stride
            )
        return pending
