"""`SaveConfigMode`: the settings of one mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from smdist.config.observable import Configuration, ListView
from smdist.config.readers import check_keys, error_context
from smdist.config.schedule import SAVE_KEYS, Schedule, read_save_key, read_save_keys
from smdist.errors import ConfigurationError, UnknownKey
from smdist.identity import ModeKeys

if TYPE_CHECKING:
    from smdist.config.save_config import SaveConfig

__all__ = ["SaveConfigMode", "SaveKeys"]


class SaveKeys(Configuration):
    """The four settings as attributes; checked when they are assigned."""

    def _get(self, key: str) -> Any:
        raise NotImplementedError

    def _put(self, key: str, value: object) -> None:
        raise NotImplementedError

    @property
    def save_interval(self) -> int:
        return int(self._get("save_interval"))

    @save_interval.setter
    def save_interval(self, value: int | None) -> None:
        self._put("save_interval", value)

    @property
    def start_step(self) -> int:
        return int(self._get("start_step"))

    @start_step.setter
    def start_step(self, value: int | None) -> None:
        self._put("start_step", value)

    @property
    def end_step(self) -> int | None:
        found = self._get("end_step")
        return None if found is None else int(found)

    @end_step.setter
    def end_step(self, value: int | None) -> None:
        self._put("end_step", value)

    @property
    def save_steps(self) -> ListView[int]:
        return ListView(lambda: self._get("save_steps"), lambda new: self._put("save_steps", new))

    @save_steps.setter
    def save_steps(self, value: Any) -> None:
        self._put("save_steps", value)

    def __setattr__(self, name: str, value: object) -> None:
        # A misspelt setting must not become a new attribute that nobody reads.
        if not name.startswith("_") and name not in SAVE_KEYS:
            raise UnknownKey(name, SAVE_KEYS, type(self).__name__)
        super().__setattr__(name, value)


class SaveConfigMode(SaveKeys):
    """When to save in one mode. What is not given has its default: interval 500 from step 0 on."""

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
        # Set for the modes of a layered SaveConfig: what is not set here is asked for there.
        self._below: tuple[SaveConfig, ModeKeys] | None = None

    def schedule(self) -> Schedule:
        if self._below is None:
            return Schedule(**self._own)
        config, mode = self._below
        return replace(config.schedule_below(mode), **self._own)

    def should_save_step(self, step_num: int) -> bool:
        return self.schedule().should_save(step_num)

    def next_due(self, step: int) -> int:
        return self.schedule().next_due(step)

    def _get(self, key: str) -> Any:
        return getattr(self.schedule(), key)

    def _put(self, key: str, value: object) -> None:
        if value is None:
            # "No end" is a value; for the others None means what holds below.
            if key == "end_step":
                self._own[key] = None
            else:
                self._own.pop(key, None)
        else:
            with error_context(type(self).__name__):
                self._own[key] = read_save_key(key, value)
        self.changed()

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if k == "save_steps" else v for k, v in asdict(self.schedule()).items()}

    @classmethod
    def from_dict(
        cls, params: Mapping[str, Any], default_values: Mapping[str, Any] | None = None
    ) -> SaveConfigMode:
        if not isinstance(params, Mapping):
            raise ConfigurationError(f"{cls.__name__}: {params!r} is not a dict of its settings")
        settings = {**(default_values or {}), **params}
        check_keys(settings, SAVE_KEYS, cls.__name__)
        return cls(**settings)

    def copy(self) -> SaveConfigMode:
        new = SaveConfigMode()
        new._own = asdict(self.schedule()) if self._below else dict(self._own)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return SaveConfigMode, tuple(self.copy()._own.get(key) for key in SAVE_KEYS)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SaveConfigMode):
            return NotImplemented
        return self.schedule() == other.schedule()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SaveConfigMode({', '.join(f'{k}={v!r}' for k, v in self.to_dict().items())})"
