"""What a trial says of a step, likewise."""

from __future__ import annotations

from smdist.trials import StepState, Tensor

__all__ = ["StepState", "Tensor"]
