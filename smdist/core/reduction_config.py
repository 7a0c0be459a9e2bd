"""What to keep, likewise."""

from __future__ import annotations

from smdist.config.reduction_config import ReductionConfig

__all__ = ["ReductionConfig"]
