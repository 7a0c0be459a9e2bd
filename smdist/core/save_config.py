"""When to save, under the path that smdebug scripts import."""

from __future__ import annotations

from smdist.config.save_config import SaveConfig
from smdist.config.save_config_mode import SaveConfigMode

__all__ = ["SaveConfig", "SaveConfigMode"]
