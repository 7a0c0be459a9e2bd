"""`SaveConfig`: when to save, in every mode.

A setting is looked up in this order: the mode's own settings, the plain settings, then the same two
of the fallback (a hook under a collection, a framework's default under a hook).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from smdist.config.readers import error_context
from smdist.config.save_config_mode import SaveAttributes, SaveConfigMode, assign_save_key
from smdist.config.schedule import SAVE_KEYS, Schedule, read_mode, read_save_key, read_save_keys
from smdist.config.settings import LayeredConfiguration, Observable
from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys

__all__ = ["SaveConfig"]


class _SaveLayer(Observable):
    """What was set on a SaveConfig.

    plain:    settings for all modes
    partial:  settings of single modes, which override the plain ones
    complete: modes that were given as a whole; nothing else applies to them
    """

    def __init__(
        self,
        plain: dict[str, Any],
        complete: dict[ModeKeys, SaveConfigMode],
        partial: dict[ModeKeys, dict[str, Any]],
    ) -> None:
        super().__init__()
        self.plain, self.partial = plain, partial
        self.complete: dict[ModeKeys, SaveConfigMode] = {}
        self.replace(complete)

    def replace(self, complete: Mapping[ModeKeys, SaveConfigMode]) -> None:
        for mode, config in complete.items():
            self.complete[mode] = config
            self.partial.pop(mode, None)
            config.watch(self)

    def copy(self) -> _SaveLayer:
        complete = {mode: config.copy() for mode, config in self.complete.items()}
        return _SaveLayer(dict(self.plain), complete, {m: dict(v) for m, v in self.partial.items()})


class SaveConfig(LayeredConfiguration, SaveAttributes):
    """When to save, for every mode.

    `mode_save_configs` maps a mode (or its name) to a `SaveConfigMode` (or a dict of its settings).
    Such a mode is complete with its own defaults; all others follow the four plain settings.
    Assigning a plain setting later (`config.end_step = 0`) sets it for all modes. Reading one
    returns the value for mode GLOBAL.
    """

    _layer: _SaveLayer

    def __init__(
        self,
        mode_save_configs: Mapping[Any, Any] | None = None,
        save_interval: int | None = None,
        start_step: int | None = None,
        end_step: int | None = None,
        save_steps: Any = None,
    ) -> None:
        given = (save_interval, start_step, end_step, save_steps)
        plain = read_save_keys(dict(zip(SAVE_KEYS, given, strict=True)), "SaveConfig")
        super().__init__(_SaveLayer(plain, _read_modes(mode_save_configs), {}))
        # With modes and nothing else, the other modes follow the hook in a collection.
        self._is_partial = mode_save_configs is not None and not plain

    @classmethod
    def partial(
        cls,
        plain: Mapping[str, Any] | None = None,
        by_mode: Mapping[ModeKeys, Mapping[str, Any]] | None = None,
        fallback: SaveConfig | None = None,
    ) -> SaveConfig:
        """Return a configuration that reads each setting that is not given from `fallback`."""
        config = cls(**dict(plain or {}))
        config._fallback, config._is_partial = fallback, True
        for mode, values in (by_mode or {}).items():
            config._layer.partial[mode] = read_save_keys(values, f"SaveConfig of {mode.name}")
        return config

    def with_default_interval(self, save_interval: int) -> SaveConfig:
        """Return the same with a framework's default interval for the case that none is set."""
        known = self._fallback is not None or "save_interval" in self._layer.plain
        if known or save_interval == Schedule().save_interval:
            return self
        return self._over(SaveConfig(save_interval=save_interval))

    # -- resolved values ---------------------------------------------------------------------

    def schedule(self, mode: ModeKeys) -> Schedule:
        return Schedule(**ChainMap(*self._layers(mode)))

    def _layers(self, mode: ModeKeys) -> Iterator[dict[str, Any]]:
        config: SaveConfig | None = self
        while config is not None:
            layer = config._layer
            if mode in layer.complete:
                yield vars(layer.complete[mode].schedule())
                return
            yield layer.partial.get(mode, {})
            yield layer.plain
            config = config._fallback

    def should_save_step(self, mode: ModeKeys, step_num: int) -> bool:
        return self.schedule(mode).should_save(step_num)

    # -- access ------------------------------------------------------------------------------

    def _get(self, key: str) -> Any:
        return getattr(self.schedule(ModeKeys.GLOBAL), key)

    def _put(self, key: str, value: object) -> None:
        if value is not None:
            with error_context("SaveConfig"):
                value = read_save_key(key, value)
        for own in (self._layer.plain, *self._layer.partial.values()):
            assign_save_key(own, key, value)
        for config in self._layer.complete.values():
            config._put(key, value)
        self.changed()

    def get_save_config(self, mode: ModeKeys) -> SaveConfigMode:
        """Return the settings of one mode; assigning to them changes this mode only."""
        mode, layer = read_mode(mode), self._layer
        if mode in layer.complete:
            return layer.complete[mode]
        own = layer.partial.setdefault(mode, {})
        return SaveConfigMode.view(own, lambda: self.schedule(mode), layer)

    @property
    def mode_save_configs(self) -> Mapping[ModeKeys, SaveConfigMode]:
        """Return every mode with its settings; `set_save_config()` replaces them."""
        return MappingProxyType({mode: self.get_save_config(mode) for mode in ModeKeys})

    def merge_default_save_config(self, default_save_config: SaveConfig) -> None:
        """Use a copy of `default_save_config` for the modes that were not given."""
        if self._is_partial and self._fallback is None:
            self._fallback, self._is_partial = default_save_config.copy(), False
            self.changed()

    def set_save_config(self, mode: ModeKeys, save_config_mode: Any) -> None:
        self._layer.replace(_read_modes({mode: save_config_mode}))
        self.changed()

    # -- as data -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return mode name -> its four settings, resolved."""
        result: dict[str, Any] = {}
        for mode in ModeKeys:
            values = asdict(self.schedule(mode))
            result[mode.name] = {**values, "save_steps": list(values["save_steps"])}
        return result

    @classmethod
    def from_dict(
        cls, params: Mapping[Any, Any], default_values: Mapping[str, Any] | None = None
    ) -> SaveConfig:
        """Read mode -> settings, or the plain settings themselves.

        `default_values` are used for settings that are not given, but not for modes that are not.
        """
        defaults = dict(default_values or {})
        if params and set(params) <= set(SAVE_KEYS):
            return cls(**{**defaults, **params})
        return cls(mode_save_configs=_read_modes(params, defaults))

    @classmethod
    def from_save_config_mode(cls, save_config_mode: SaveConfigMode) -> SaveConfig:
        """Use the same settings object for every mode."""
        return cls(mode_save_configs=dict.fromkeys(ModeKeys, save_config_mode))

    @classmethod
    def parse(cls, obj: object) -> SaveConfig:
        """Read what a hook or a collection accepts as its `save_config`."""
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
        """Return an independent configuration that saves at the same steps."""
        if self._fallback is not None:
            return SaveConfig.from_dict(self.to_dict())
        new = SaveConfig()
        new._layer, new._is_partial = self._layer.copy(), self._is_partial
        return new


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
        mode = read_mode(key)
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
