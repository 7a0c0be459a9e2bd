"""Modes under the path that smdebug scripts import."""

from __future__ import annotations

from smdist.identity import ModeKeys

__all__ = ["ModeKeys"]
