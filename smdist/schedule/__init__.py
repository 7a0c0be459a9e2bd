"""When to save: `SaveConfig` for all modes, `SaveConfigMode` for one, `Schedule` what both come to.

A step of a mode is saved if it is in `save_steps`, or if
`start_step <= step < end_step and step % save_interval == 0`. `end_step=0` turns the interval off.
"""

from __future__ import annotations

from smdist.schedule.config import SaveConfig
from smdist.schedule.due import NEVER, SAVE_KEYS, Schedule, mode_key, read_save_key
from smdist.schedule.mode import SaveConfigMode

__all__ = [
    "NEVER",
    "SAVE_KEYS",
    "SaveConfig",
    "SaveConfigMode",
    "Schedule",
    "mode_key",
    "read_save_key",
]
