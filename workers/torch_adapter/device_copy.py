"""Read tensors in a device's memory without making training wait.

The tests of this repository have no device and do not run this: it is kept small for that reason.

`TorchAccess` calls it on the capturing thread. The tensor is copied within the device on training's own
stream, as it may be overwritten right after. The copy is sent to page-locked memory on a side stream.
The returned function waits for it and puts it in its place; another thread calls that. Statistics are
computed on the device, on the side stream, so that only a row of numbers travels.

Devices without such streams (mps, xpu, ...) are read at once, which makes training wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from smdist.format.dtypes import decode
from smdist.kernel.tensor_stats import COLUMNS, measure
from smdist.workers.capture.tensor_access import CopyHandle

__all__ = ["DeviceReader"]

cuda: Any = torch.cuda  # partly untyped


class DeviceReader:
    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def start_copy(self, tensor: torch.Tensor, target: memoryview) -> CopyHandle:
        arrived = self._send(tensor)
        return lambda: _put(arrived(), target)

    def start_measure(
        self,
        tensor: torch.Tensor,
        dtype_code: str,
        columns: Sequence[str],
        target: memoryview,
    ) -> CopyHandle:
        plain = tuple(columns) == COLUMNS and not tensor.is_complex() and tensor.numel() > 0
        if plain:
            with torch.no_grad():
                arrived = self._send(_row(tensor.detach()))
            return lambda: _put(arrived(), target)
        arrived_all, shape = self._send(tensor), tuple(tensor.shape)

        def finish() -> None:
            row = measure(decode(_bytes(arrived_all()), dtype_code, shape), columns)
            target[:] = np.ascontiguousarray(row, np.float64).tobytes()

        return finish

    def _send(self, tensor: torch.Tensor) -> _Arrival:
        """Start the transfer; the result, called on any thread, waits and returns the tensor on the host."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.device.type != "cuda":
            host = tensor.to("cpu", copy=True).contiguous()
            return _Arrival(host, None)
        stream = self._stream(tensor.device)
        snapshot = tensor.clone(memory_format=torch.contiguous_format)
        stream.wait_stream(cuda.current_stream(tensor.device))
        with cuda.stream(stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(snapshot, non_blocking=True)
            event: Any = cuda.Event()
            event.record(stream)
        snapshot.record_stream(stream)
        return _Arrival(host, event)

    def _stream(self, device: torch.device) -> Any:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = cuda.Stream(device)
        return stream


class _Arrival:
    def __init__(self, host: torch.Tensor, event: Any) -> None:
        self._host, self._event = host, event

    def __call__(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the statistics in `COLUMNS`, one float64 each, on the tensor's device."""
    values = tensor.to(torch.float64)
    magnitudes = values.abs()
    total = values.sum()
    found = {
        "count": torch.full_like(total, float(values.numel())),
        "nans": values.isnan().sum(),
        "infs": values.isinf().sum(),
        "zeros": (values == 0).sum(),
        "sum": total,
        "m2": (values - total / values.numel()).square().sum(),
        "abs_sum": magnitudes.sum(),
        "min": values.min(),
        "max": values.max(),
        "abs_min": magnitudes.min(),
    }
    return torch.stack([found[column].to(torch.float64) for column in COLUMNS])


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _put(tensor: torch.Tensor, target: memoryview) -> None:
    target[:] = _bytes(tensor)
