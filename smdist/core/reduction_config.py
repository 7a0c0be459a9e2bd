"""What to keep, likewise."""

from __future__ import annotations

from smdist.reduction import ReductionConfig

__all__ = ["ReductionConfig"]
