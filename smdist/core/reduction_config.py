"""What to keep, under the path that smdebug scripts import."""

from __future__ import annotations

from smdist.config.reduction_config import ReductionConfig

__all__ = ["ReductionConfig"]
