"""Describe and read torch tensors: what the capture calls, on the thread that captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import numpy.typing as npt
import torch

from smdist.errors import CaptureError
from smdist.format.dtypes import dtype_code
from smdist.workers.capture.tensor_access import CopyHandle, NumpyAccess
from smdist.workers.torch_adapter.device_copy import DeviceReader

__all__ = ["TorchAccess", "Value", "describe", "readable"]

Value = Union[torch.Tensor, npt.NDArray[Any]]  # noqa: UP007 (3.10)

_CODES: dict[torch.dtype, tuple[str, int]] = {
    getattr(torch, name): (code, nbytes)
    for name, code, nbytes in (
        ("float64", "F64", 8),
        ("float32", "F32", 4),
        ("float16", "F16", 2),
        ("bfloat16", "BF16", 2),
        ("float8_e4m3fn", "F8_E4M3", 1),
        ("float8_e5m2", "F8_E5M2", 1),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
        ("float8_e8m0fnu", "F8_E8M0", 1),
        ("int64", "I64", 8),
        ("int32", "I32", 4),
        ("int16", "I16", 2),
        ("int8", "I8", 1),
        ("uint64", "U64", 8),
        ("uint32", "U32", 4),
        ("uint16", "U16", 2),
        ("uint8", "U8", 1),
        ("bool", "BOOL", 1),
        ("complex64", "C64", 8),
        ("complex128", "C128", 16),
    )
    if hasattr(torch, name)
}
# Elements are moved as integers: every bit pattern is kept, and every type can be copied.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as a plain dense one; raise CaptureError if its values cannot be read here."""
    if type(tensor) not in _PLAIN:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise CaptureError(f"a {type(tensor).__name__} keeps its values elsewhere")
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.layout is not torch.strided:
        raise CaptureError(f"a tensor with layout {tensor.layout} has no dense values")
    if tensor.is_meta:
        raise CaptureError("a tensor on the meta device has no values")
    if tensor.dtype not in _CODES:
        raise CaptureError(_unknown(tensor.dtype))
    try:
        held = tensor.untyped_storage().nbytes()
    except RuntimeError as error:
        raise CaptureError(f"its values cannot be read here: {error}") from error
    # Reading freed storage would end the process; FSDP frees it between uses. A tensor that fills its
    # storage is the usual case, and the cheap one.
    if held != tensor.nbytes and held < _extent(tensor):
        raise CaptureError(
            "its storage was freed or shrunk. Exclude it, or call save_tensor() while it is allocated"
        )
    return tensor


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the beginning of its storage to the end of its last element."""
    if not tensor.numel():
        return 0
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sides)
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def _unknown(dtype: torch.dtype) -> str:
    return (
        f"elements of type {dtype} cannot be stored. Exclude it, or save a converted copy with "
        "save_tensor()"
    )


def describe(value: Value) -> tuple[str, tuple[int, ...], int]:
    """Return the code of the element type, the shape, and the size in bytes."""
    if isinstance(value, torch.Tensor):
        known = _CODES.get(value.dtype)
        if known is None:
            raise CaptureError(_unknown(value.dtype))
        return known[0], tuple(value.shape), value.numel() * known[1]
    return dtype_code(value.dtype), value.shape, value.nbytes


class TorchAccess:
    """Tensors that `readable` let pass, and arrays. The contract is `TensorAccess`."""

    def __init__(self) -> None:
        self._arrays = NumpyAccess()
        self._device = DeviceReader()

    def on_device(self, tensor: Value) -> bool:
        return isinstance(tensor, torch.Tensor) and not tensor.is_cpu

    def address(self, tensor: Value) -> int:
        if not isinstance(tensor, torch.Tensor):
            return self._arrays.address(tensor)
        if (
            tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        ):
            return tensor.data_ptr()
        return 0

    def write(self, tensor: Value, target: memoryview) -> None:
        if not isinstance(tensor, torch.Tensor):
            self._arrays.write(tensor, target)
            return
        bits = _as_bits(tensor.detach())
        torch.frombuffer(target, dtype=bits.dtype).view(bits.shape).copy_(bits)

    def contiguous(self, tensor: Value) -> Value:
        if not isinstance(tensor, torch.Tensor):
            return self._arrays.contiguous(tensor)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        bits = _BITS.get(tensor.element_size())
        # Not every device can copy every element type.
        if bits is None:
            return tensor.contiguous()
        return tensor.view(bits).contiguous().view(tensor.dtype)

    def start_copy(self, tensor: Value, target: memoryview) -> CopyHandle:
        assert isinstance(tensor, torch.Tensor)
        return self._device.start_copy(tensor, target)

    def start_measure(
        self, tensor: Value, columns: Sequence[str], target: memoryview
    ) -> CopyHandle:
        assert isinstance(tensor, torch.Tensor)
        return self._device.start_measure(tensor, describe(tensor)[0], columns, target)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])
