"""Tensors and step states of a trial, under the path that smdebug scripts import."""

from __future__ import annotations

from smdist.trials import StepState, Tensor

__all__ = ["StepState", "Tensor"]
