"""`SaveConfigMode`: when to save in one mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from smdist.config.readers import check_keys, error_context
from smdist.config.schedule import SAVE_KEYS, Schedule, read_save_key, read_save_keys
from smdist.config.settings import Configuration, ListView, Observable, Setting
from smdist.errors import ConfigurationError, UnknownKey

__all__ = ["SaveAttributes", "SaveConfigMode", "assign_save_key"]


class SaveAttributes(Configuration):
    """The four settings of a schedule as attributes."""

    save_interval: Setting[int] = Setting()
    start_step: Setting[int] = Setting()
    end_step: Setting[int | None] = Setting()
    save_steps: Setting[ListView[int]] = Setting()

    def __setattr__(self, name: str, value: object) -> None:
        # A misspelt setting must not become a new attribute that nothing reads.
        if not name.startswith("_") and name not in SAVE_KEYS:
            raise UnknownKey(name, SAVE_KEYS, type(self).__name__)
        super().__setattr__(name, value)


def assign_save_key(own: dict[str, Any], key: str, value: object) -> None:
    """Set a checked value. None removes the setting, except that `end_step` None means no end."""
    if value is None and key != "end_step":
        own.pop(key, None)
    else:
        own[key] = value


class SaveConfigMode(SaveAttributes):
    """When to save in one mode. The default is every 500 steps, starting at step 0."""

    def __init__(
        self,
        save_interval: int | None = None,
        start_step: int | None = None,
        end_step: int | None = None,
        save_steps: Any = None,
    ) -> None:
        super().__init__()
        given = (save_interval, start_step, end_step, save_steps)
        self._own = read_save_keys(dict(zip(SAVE_KEYS, given, strict=True)), type(self).__name__)
        self._resolve: Callable[[], Schedule] | None = None  # set in a view

    @classmethod
    def view(
        cls, own: dict[str, Any], resolve: Callable[[], Schedule], owner: Observable
    ) -> SaveConfigMode:
        """Return the settings of one mode of a SaveConfig: writes go to `own`, reads to `resolve`."""
        found = cls()
        found._own, found._resolve = own, resolve
        found.watch(owner)
        return found

    def schedule(self) -> Schedule:
        return Schedule(**self._own) if self._resolve is None else self._resolve()

    def should_save_step(self, step_num: int) -> bool:
        return self.schedule().should_save(step_num)

    def _get(self, key: str) -> Any:
        return getattr(self.schedule(), key)

    def _put(self, key: str, value: object) -> None:
        if value is not None:
            with error_context(type(self).__name__):
                value = read_save_key(key, value)
        assign_save_key(self._own, key, value)
        self.changed()

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if k == "save_steps" else v for k, v in asdict(self.schedule()).items()}

    @classmethod
    def from_dict(
        cls, params: Mapping[str, Any], default_values: Mapping[str, Any] | None = None
    ) -> SaveConfigMode:
        if not isinstance(params, Mapping):
            raise ConfigurationError(f"{cls.__name__}: {params!r} is not a dict of settings")
        settings = {**(default_values or {}), **params}
        check_keys(settings, SAVE_KEYS, cls.__name__)
        return cls(**settings)
