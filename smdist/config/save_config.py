"""`SaveConfig`: the settings of all modes, and what they follow where nothing is set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from smdist.config.readers import error_context
from smdist.config.save_config_mode import SaveConfigMode, SaveKeys
from smdist.config.schedule import SAVE_KEYS, Schedule, mode_key, read_save_key, read_save_keys
from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys

__all__ = ["SaveConfig"]


class SaveConfig(SaveKeys):
    """When to save, for every mode.

    `mode_save_configs` maps a mode (or its name) to a `SaveConfigMode` (or a dict of its settings);
    a mode that is given is complete with its own defaults, all others follow the four plain
    settings. Assigning a plain setting later (`config.end_step = 0`) sets it for all modes. Reading
    one gives what holds for mode GLOBAL.
    """

    def __init__(
        self,
        mode_save_configs: Mapping[Any, Any] | None = None,
        save_interval: int | None = None,
        start_step: int | None = None,
        end_step: int | None = None,
        save_steps: Any = None,
    ) -> None:
        super().__init__()
        given = (save_interval, start_step, end_step, save_steps)
        self._base = SaveConfigMode()
        self._base._own = read_save_keys(dict(zip(SAVE_KEYS, given, strict=True)), "SaveConfig")
        self._modes = _read_modes(mode_save_configs)
        # Handed out by get_save_config() for a mode that was not given; empty until assigned to.
        self._views: dict[ModeKeys, SaveConfigMode] = {}
        self._parent: SaveConfig | None = None
        # Modes given and nothing else: in a collection, the other modes follow the hook.
        self._open = mode_save_configs is not None and not self._base._own
        self._watch_parts()

    @classmethod
    def layered(
        cls,
        base: Mapping[str, Any] | None = None,
        modes: Mapping[ModeKeys, Mapping[str, Any]] | None = None,
        parent: SaveConfig | None = None,
    ) -> SaveConfig:
        """Each setting by itself: that of the mode, else of `base`, else whatever `parent` says."""
        config = cls(**dict(base or {}))
        config._parent, config._open = parent, True
        for mode, values in (modes or {}).items():
            config.get_save_config(mode)._own.update(
                read_save_keys(values, f"SaveConfig of {mode.name}")
            )
        config._watch_parts()
        return config

    def under(self, parent: SaveConfig) -> SaveConfig:
        """This configuration in a collection of a hook that is configured by `parent`.

        Itself, if it is complete; a collection that moves to another hook follows that one.
        """
        settled = not self._open or parent is self or parent is self._parent
        return self if settled else self._joined(parent)

    def filled(self, **defaults: Any) -> SaveConfig:
        """The same with other defaults (a framework's interval) for what was not given."""
        normal = all(getattr(Schedule(), key) == value for key, value in defaults.items())
        if normal or self._parent is not None or defaults.keys() <= self._base._own.keys():
            return self
        return self._joined(SaveConfig(**defaults))

    def _joined(self, parent: SaveConfig) -> SaveConfig:
        """Shares its settings with this one: a later change of either is seen in both."""
        joined = SaveConfig()
        joined._base, joined._modes = self._base, self._modes
        joined._parent, joined._open = parent, True
        for mode, view in self._views.items():
            joined.get_save_config(mode)._own = view._own
            view.watch(joined)
        joined._watch_parts()
        return joined

    def _watch_parts(self) -> None:
        for part in (self._base, self._parent, *self._modes.values(), *self._views.values()):
            if part is not None:
                part.watch(self)

    # -- what it comes to --------------------------------------------------------------------

    def schedule(self, mode: ModeKeys) -> Schedule:
        own = self._modes.get(mode) or self._views.get(mode)
        return own.schedule() if own is not None else self.schedule_below(mode)

    def schedule_below(self, mode: ModeKeys) -> Schedule:
        """What holds for `mode` apart from its own settings."""
        rest = self._parent.schedule(mode) if self._parent is not None else Schedule()
        return replace(rest, **self._base._own)

    def should_save(self, mode: ModeKeys, step: int) -> bool:
        return self.schedule(mode).should_save(step)

    def should_save_step(self, mode: ModeKeys, step_num: int) -> bool:
        return self.should_save(mode, step_num)

    def next_due(self, mode: ModeKeys, step: int) -> int:
        return self.schedule(mode).next_due(step)

    # -- access ------------------------------------------------------------------------------

    def _get(self, key: str) -> Any:
        return getattr(self.schedule(ModeKeys.GLOBAL), key)

    def _put(self, key: str, value: object) -> None:
        if value is not None:
            with error_context("SaveConfig"):
                value = read_save_key(key, value)
        for part in (self._base, *self._modes.values(), *self._views.values()):
            part._put(key, value)

    def get_save_config(self, mode: ModeKeys) -> SaveConfigMode:
        """The settings of one mode; assigning to them changes this mode only."""
        mode = mode_key(mode)
        found = self._modes.get(mode) or self._views.get(mode)
        if found is None:
            found = self._views[mode] = SaveConfigMode()
            found._below = (self, mode)
            found.watch(self)
        return found

    @property
    def mode_save_configs(self) -> Mapping[ModeKeys, SaveConfigMode]:
        """Every mode with its settings; `set_save_config()` replaces them."""
        return MappingProxyType({mode: self.get_save_config(mode) for mode in ModeKeys})

    def merge_default_save_config(self, default_save_config: SaveConfig) -> None:
        """Modes that were not given take over what `default_save_config` says now."""
        if self._open and self._parent is None:
            self._parent, self._open = default_save_config.copy(), False
            self._base.changed()

    def set_save_config(self, mode: ModeKeys, save_config_mode: Any) -> None:
        self._modes.update(_read_modes({mode: save_config_mode}))
        self._views.pop(mode_key(mode), None)
        self._watch_parts()
        self._base.changed()  # heard by everybody who shares these settings

    # -- as data -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Mode name -> its four settings, everything resolved."""
        result: dict[str, Any] = {}
        for mode in ModeKeys:
            values = asdict(self.schedule(mode))
            result[mode.name] = {**values, "save_steps": list(values["save_steps"])}
        return result

    @classmethod
    def from_dict(
        cls, params: Mapping[Any, Any], default_values: Mapping[str, Any] | None = None
    ) -> SaveConfig:
        """From mode -> settings, or from the plain settings themselves.

        `default_values` are for what is not set; modes that are not given at all stay open.
        """
        defaults = dict(default_values or {})
        if params and set(params) <= set(SAVE_KEYS):
            return cls(**{**defaults, **params})
        return cls(mode_save_configs=_read_modes(params, defaults))

    @classmethod
    def from_save_config_mode(cls, save_config_mode: SaveConfigMode) -> SaveConfig:
        """The same settings, shared, for every mode."""
        return cls(mode_save_configs=dict.fromkeys(ModeKeys, save_config_mode))

    @classmethod
    def parse(cls, obj: object) -> SaveConfig:
        """What a hook or a collection accepts as its `save_config`."""
        if obj is None:
            return cls()
        if isinstance(obj, SaveConfig):
            return obj
        if isinstance(obj, SaveConfigMode):
            return cls.from_save_config_mode(obj)
        if isinstance(obj, Mapping):
            return cls.from_dict(obj)
        raise ConfigurationError(
            f"save_config={obj!r} is not a SaveConfig; write SaveConfig(save_interval=...) "
            "or a dict of mode to SaveConfigMode"
        )

    def copy(self) -> SaveConfig:
        """An independent one that saves at the same steps."""
        if self._parent is not None:
            return SaveConfig.from_dict(self.to_dict())
        new = SaveConfig()
        new._base, new._open = self._base.copy(), self._open
        new._modes = {mode: value.copy() for mode, value in self._modes.items()}
        for mode, view in self._views.items():
            new.get_save_config(mode)._own.update(view._own)
        new._watch_parts()
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return SaveConfig.from_dict, (self.to_dict(),)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SaveConfig):
            return NotImplemented
        return all(self.schedule(mode) == other.schedule(mode) for mode in ModeKeys)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SaveConfig({', '.join(f'{m.name}: {self.schedule(m)}' for m in ModeKeys)})"


def _read_modes(
    given: Mapping[Any, Any] | None, defaults: Mapping[str, Any] | None = None
) -> dict[ModeKeys, SaveConfigMode]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"mode_save_configs={given!r} is not a dict of mode to SaveConfigMode"
        )
    result = {}
    for key, value in given.items():
        mode = mode_key(key)
        if value is None:
            continue
        if isinstance(value, Mapping):
            with error_context(f"mode_save_configs[{mode.name}]"):
                value = SaveConfigMode.from_dict(value, defaults)
        if not isinstance(value, SaveConfigMode):
            raise ConfigurationError(
                f"mode_save_configs[{mode.name}]={value!r} is not a SaveConfigMode; write "
                "SaveConfigMode(save_interval=...)"
            )
        result[mode] = value
    return result
