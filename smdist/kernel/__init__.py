"""Copies and statistics over plain addresses: the work of the training thread on a captured step.

The compiled `smdist.kernel._native` does it, or numpy where that was not built or where the
environment has `SMDIST_KERNEL=numpy`. Both return the same rows up to rounding; `compiled` tells
which one is in use. To build it in place: `python setup.py build_ext --inplace`.

Called by the training thread, through the capture. Addresses are integers and are not checked: each
must point to live memory of the stated size that no other thread frees or writes during the call.
They need not be aligned. The compiled functions release the GIL, except for work below 256 KiB, which
takes less time than getting the GIL back from another thread.

A row of statistics holds these float64 columns:

    count                       number of elements
    nans infs zeros             number of NaN, of infinities, of zeros (-0.0 is a zero)
    sum m2 abs_sum              m2: sum of squared deviations from the mean
    min max abs_min             abs_min: least magnitude

Any NaN makes everything after the counts NaN, as in numpy; infinities make m2 NaN. A row of no
elements has the sums 0, min and abs_min +inf, max -inf: merging it changes nothing.

The *guard* of bytes is a short checksum. The training process writes it to the journal, and the
uploader checks it. Ranges up to 2 KiB are covered entirely, larger ones by the first word of each 512
bytes and the last word. It depends on the positions of the ranges, counted from an origin; the guard
of several ranges is the sum of theirs, in 32 bits.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from smdist.kernel.numpy_kernel import COLUMNS, DTYPES, ELEMENT_NAMES, NumpyKernel, merge, values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "COLUMNS",
    "DTYPES",
    "ELEMENT_NAMES",
    "NumpyKernel",
    "address_of",
    "compiled",
    "copy",
    "fingerprint",
    "guard",
    "merge",
    "populate",
    "record",
    "statistics",
    "values",
]

_compiled: Any
try:
    from smdist.kernel import _native as _compiled
except ImportError:  # installed without a compiler
    _compiled = None


def address_of(buffer: Any) -> int:
    """Return the address of a contiguous buffer (mmap, memoryview, array, bytes); 0 when it is empty.

    No reference is kept: the caller keeps the buffer alive and does not resize it.
    """
    if isinstance(buffer, np.ndarray):  # memoryview does not know the types of ml_dtypes
        if not buffer.flags.c_contiguous:
            raise ValueError("the array is not contiguous")
        return int(buffer.ctypes.data) if buffer.size else 0
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    if not view.nbytes:
        return 0
    return int(np.frombuffer(view.cast("B"), np.uint8).__array_interface__["data"][0])


def populate(address: int, nbytes: int) -> None:
    """Make the pages of a writable mapping resident and keep their contents.

    No other thread may write the range meanwhile: without MADV_POPULATE_WRITE (Linux before 5.14)
    each page is touched, which is atomic in the compiled kernel only. Raises OSError when there is
    no memory for the pages and the operating system reports that (otherwise: SIGBUS).
    """
    _chosen.populate(address, nbytes)


compiled: bool = _compiled is not None and os.environ.get("SMDIST_KERNEL") != "numpy"
_chosen: Any = _compiled if compiled else NumpyKernel

# Bound directly: a Python function around each would cost a frame per call.
copy: Callable[[Sequence[int], Sequence[int], Sequence[int], int], int] = _chosen.copy
"""copy(targets, sources, sizes, origin): copy ranges that do not overlap; return their guard."""

guard: Callable[[Sequence[int], Sequence[int], int], int] = _chosen.guard
"""guard(addresses, sizes, origin): return the guard of ranges that are in place."""

record: Callable[[int, int, int, int, bytes, float, int, int, int], None] = _chosen.record
"""record(target, source, size, cursor, opening, when, kind, arena, offset): copy and journal it.

The journal frame is a `Part` record with the guard of the bytes from `target` on. At the address
`cursor` are two 64-bit numbers: the address of the frame (a multiple of 8, with 72 bytes of room) and
its ordinal. Both are advanced to the next frame. `opening` is the encoded beginning of the record, up
to its time. The bytes are in place before the frame is.
"""

statistics: Callable[[Sequence[int], Sequence[int], Sequence[str], int, int], None]
statistics = _chosen.statistics
"""statistics(addresses, counts, dtypes, out, stride): write row i at out + i * stride bytes.

`counts` are numbers of elements, `dtypes` codes of `DTYPES`. Raises ValueError for another dtype.
"""

fingerprint: Callable[[Sequence[int], Sequence[int], Sequence[str], Sequence[int]], list[int]]
fingerprint = _chosen.fingerprint
"""fingerprint(addresses, counts, dtypes, firsts): the sum of weight times bits, modulo 2**64.

The weight, odd, is made of the index of the element in the whole tensor; `firsts` are the indices
where each part begins, so the fingerprints of the shards of a tensor add up to that of the whole.
"""
