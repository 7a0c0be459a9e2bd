"""How capture reads tensors. Each framework adapter implements `TensorAccess`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from smdist.format.dtypes import dtype_code

__all__ = ["CopyHandle", "NumpyAccess", "TensorAccess", "to_little_endian"]

T = TypeVar("T")

CopyHandle = Callable[[], None]  # waits until a copy from a device has arrived


class TensorAccess(Protocol[T]):
    """How `Capture` reaches the bytes of a framework's tensors.

    `Capture.save` calls it on the capturing thread, in this order for each tensor:

    1. `address`. If it is not 0, the bytes are read from there.
    2. Otherwise `on_device`. If so, `start_copy` or `start_measure` return at once with a handle.
       Another thread calls the handle later and waits for the result to arrive in `target`.
    3. Otherwise `write` for raw bytes, or `contiguous` for statistics.
    """

    def on_device(self, tensor: T) -> bool:
        """Check whether the CPU cannot read its memory."""
        ...

    def address(self, tensor: T) -> int:
        """Return the address of its bytes in host memory, 0 unless in C order without gaps."""
        ...

    def write(self, tensor: T, target: memoryview) -> None:
        """Copy its elements to `target` in C order."""
        ...

    def contiguous(self, tensor: T) -> T:
        """Return the same values with an address. The caller keeps them alive until read."""
        ...

    def start_copy(self, tensor: T, target: memoryview) -> CopyHandle: ...

    def start_measure(
        self, tensor: T, columns: Sequence[str], target: memoryview
    ) -> CopyHandle: ...


def to_little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `array` in the byte order of storage. Raise CaptureError for an unsupported type."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    dtype_code(array.dtype)
    return array


class NumpyAccess:
    """NumPy arrays; also the fallback of `save_tensor` in every framework."""

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
