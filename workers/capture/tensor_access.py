"""How a framework's tensors are read. One adapter per framework implements `TensorAccess`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from smdist.format.dtypes import dtype_code

__all__ = ["CopyHandle", "NumpyAccess", "TensorAccess", "to_little_endian"]

T = TypeVar("T", contravariant=False)

CopyHandle = Callable[[], None]


class TensorAccess(Protocol[T]):
    """Called by `Capture.save` on the thread that captures, in this order for each tensor:

    `on_device`; if so `start_copy` / `start_measure`, which return at once with a function that waits
    for the result to arrive in `target`, called later on another thread. Otherwise `address`; when
    that is 0, `write` for raw bytes or `contiguous` for statistics.
    """

    def on_device(self, tensor: T) -> bool:
        """Is it in memory that the CPU cannot read?"""
        ...

    def address(self, tensor: T) -> int:
        """Where its bytes lie in host memory, in C order without gaps; 0 when they do not."""
        ...

    def write(self, tensor: T, target: memoryview) -> None:
        """Copy its elements in C order to `target`."""
        ...

    def contiguous(self, tensor: T) -> T:
        """The same values with an address; kept alive by the caller until read."""
        ...

    def start_copy(self, tensor: T, target: memoryview) -> CopyHandle: ...

    def start_measure(
        self, tensor: T, columns: Sequence[str], target: memoryview
    ) -> CopyHandle: ...


def to_little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, its bytes in the order in which they are stored; CaptureError for one of a type
    that cannot be."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    dtype_code(array.dtype)
    return array


class NumpyAccess:
    """Arrays; also what `save_tensor` of any framework falls back to."""

    def on_device(self, tensor: npt.NDArray[np.generic]) -> bool:
        return False

    def address(self, tensor: npt.NDArray[np.generic]) -> int:
        return int(tensor.ctypes.data) if tensor.flags.c_contiguous else 0

    def write(self, tensor: npt.NDArray[np.generic], target: memoryview) -> None:
        view = np.frombuffer(target, dtype=np.uint8).view(tensor.dtype).reshape(tensor.shape)
        np.copyto(view, tensor)

    def contiguous(self, tensor: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return np.ascontiguousarray(tensor).reshape(tensor.shape)

    def start_copy(self, tensor: npt.NDArray[np.generic], target: memoryview) -> CopyHandle:
        raise NotImplementedError("arrays are never on a device")

    def start_measure(
        self, tensor: npt.NDArray[np.generic], columns: Sequence[str], target: memoryview
    ) -> CopyHandle:
        raise NotImplementedError("arrays are never on a device")
