"""Modes under the name that scripts written for smdebug import them by."""

from __future__ import annotations

from smdist.identity import ModeKeys

__all__ = ["ModeKeys"]
