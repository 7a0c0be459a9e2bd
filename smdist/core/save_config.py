"""When to save, likewise."""

from __future__ import annotations

from smdist.schedule import SaveConfig, SaveConfigMode

__all__ = ["SaveConfig", "SaveConfigMode"]
