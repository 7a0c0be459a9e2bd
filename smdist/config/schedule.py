"""The saved steps of one mode as plain values, and how the settings behind them are read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from smdist.config.readers import check_keys, error_context, read_integer, read_integers
from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys

__all__ = ["NEVER", "SAVE_KEYS", "Schedule", "read_mode", "read_save_key", "read_save_keys"]

NEVER: Final = (1 << 63) - 1
SAVE_KEYS: Final = ("save_interval", "start_step", "end_step", "save_steps")


@dataclass(frozen=True)
class Schedule:
    """The saved steps of one mode. `save_steps` is sorted."""

    save_interval: int = 500
    start_step: int = 0
    end_step: int | None = None
    save_steps: tuple[int, ...] = ()

    def should_save(self, step: int) -> bool:
        return self.next_due(step) == step

    def next_due(self, step: int) -> int:
        """Return the first saved step that is not before `step`, or NEVER."""
        first = max(step, self.start_step)
        due = first + -first % self.save_interval
        if self.end_step is not None and due >= self.end_step:
            due = NEVER
        index = bisect_left(self.save_steps, step)
        return due if index == len(self.save_steps) else min(due, self.save_steps[index])


def read_save_key(key: str, value: object) -> object:
    """Check the value of one of SAVE_KEYS. The key may name a mode, as in `train.save_steps`."""
    bare = key.rpartition(".")[2]
    if bare == "save_steps":
        return read_integers(key, value)
    return read_integer(key, value, minimum=1 if bare == "save_interval" else 0)


def read_save_keys(values: Mapping[str, object], where: str) -> dict[str, Any]:
    """Check several settings; None means that a setting is not given."""
    check_keys(values, SAVE_KEYS, where)
    with error_context(where):
        return {k: read_save_key(k, v) for k, v in values.items() if v is not None}


def read_mode(value: object) -> ModeKeys:
    """Return the mode for a mode or its name. Raises ConfigurationError for anything else."""
    if isinstance(value, ModeKeys):
        return value
    if isinstance(value, str) and value.upper() in ModeKeys.__members__:
        return ModeKeys[value.upper()]
    options = ", ".join(f"modes.{mode.name}" for mode in ModeKeys)
    raise ConfigurationError(f"mode_save_configs: {value!r} is not a mode; use one of {options}")
