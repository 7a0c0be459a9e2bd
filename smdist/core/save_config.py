"""When to save, likewise."""

from __future__ import annotations

from smdist.config.save_config import SaveConfig
from smdist.config.save_config_mode import SaveConfigMode

__all__ = ["SaveConfig", "SaveConfigMode"]
