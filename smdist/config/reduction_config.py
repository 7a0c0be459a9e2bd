"""What to save of a tensor: reductions, raw values, shape, in any combination.

Each reduction has one name: `mean`, `abs_std`, `l2`, `abs_l1`, `nans`, `q0.99`. Without reductions
and without `save_shape` the raw tensor is saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from smdist.config.readers import check_keys, error_context, read_boolean, read_names
from smdist.config.settings import LayeredConfiguration, ListView, Observable, Setting
from smdist.errors import ConfigurationError, UnknownKey
from smdist.kernel.tensor_stats import REDUCTIONS, canonical, is_reduction

__all__ = ["REDUCTION_KEYS", "ReductionConfig", "canonical_reduction"]

_NORMS: Final = ("l1", "l2")
_LISTS: Final = ("reductions", "abs_reductions", "norms", "abs_norms")
_FLAGS: Final = ("save_raw_tensor", "save_shape")
REDUCTION_KEYS: Final = (*_LISTS, *_FLAGS)


def canonical_reduction(name: object, key: str = "reductions") -> str:
    """Return the canonical name of a reduction: `L1_norm` is `l1`, `q.50` is `q0.5`."""
    text = name.strip().lower() if isinstance(name, str) else ""
    text = re.sub(r"(?<=l[12])_norm$", "", text)
    text = re.sub(r"^q(?=\.\d)", "q0", text)
    if is_reduction(text):
        return canonical(text)
    if text.startswith("q") and text[1:2].isdigit():
        raise ConfigurationError(
            f"{key}: {name!r} is not a quantile; write one from 0 to 1 as 'q0.99'"
        )
    near = get_close_matches(text, REDUCTIONS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(REDUCTIONS)}, q0.99"
    raise ConfigurationError(f"{key}: {name!r} is not a reduction; {hint}")


def _read_list(key: str, value: object) -> tuple[str, ...]:
    """Read the names of a list attribute. Names in the abs lists have no `abs_` prefix."""
    result: list[str] = []
    for item in read_names(key, value):
        name = canonical_reduction(item, key)
        if key.startswith("abs_"):
            name = canonical_reduction(f"abs_{name.removeprefix('abs_')}", key).removeprefix("abs_")
        if key.endswith("norms") and name not in _NORMS:
            raise ConfigurationError(f"{key}: {item!r} is not a norm; choose 'l1' or 'l2'")
        if name not in result:
            result.append(name)
    return tuple(result)


def _read_key(key: str, value: object) -> object:
    with error_context("ReductionConfig"):
        if key in _FLAGS:
            return read_boolean(key, value)
        return () if value is None else _read_list(key, value)


def _by_list(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Distribute canonical names to the four lists."""
    found: dict[str, list[str]] = {key: [] for key in _LISTS}
    for name in names:
        plain = name.removeprefix("abs_")
        kind = "norms" if plain in _NORMS else "reductions"
        found[kind if plain == name else f"abs_{kind}"].append(plain)
    return {key: tuple(value) for key, value in found.items()}


class _ReductionLayer(Observable):
    """What was set on a ReductionConfig."""

    def __init__(self, own: dict[str, Any]) -> None:
        super().__init__()
        self.own = own


class ReductionConfig(LayeredConfiguration):
    """Which reductions are saved instead of, or in addition to, the raw tensor.

    `reductions` takes any name; `abs_reductions` means the same of absolute values; `norms` and
    `abs_norms` take `l1` and `l2`. Attributes are checked when they are assigned.
    """

    _layer: _ReductionLayer

    reductions: Setting[ListView[str]] = Setting()
    abs_reductions: Setting[ListView[str]] = Setting()
    norms: Setting[ListView[str]] = Setting()
    abs_norms: Setting[ListView[str]] = Setting()
    save_raw_tensor: Setting[bool] = Setting()
    save_shape: Setting[bool] = Setting()

    def __init__(
        self,
        reductions: Any = None,
        abs_reductions: Any = None,
        norms: Any = None,
        abs_norms: Any = None,
        save_raw_tensor: Any = False,
        save_shape: Any = False,
    ) -> None:
        given = (reductions, abs_reductions, norms, abs_norms, save_raw_tensor, save_shape)
        pairs = zip(REDUCTION_KEYS, given, strict=True)
        super().__init__(_ReductionLayer({key: _read_key(key, value) for key, value in pairs}))

    @classmethod
    def partial(
        cls, own: Mapping[str, Any] | None = None, fallback: ReductionConfig | None = None
    ) -> ReductionConfig:
        """Return a configuration that reads each setting that is not in `own` from `fallback`."""
        config = cls()
        config._layer = _ReductionLayer(_from_flat(own or {}))
        config._fallback, config._is_partial = fallback, fallback is not None
        return config

    def _get(self, key: str) -> Any:
        config: ReductionConfig | None = self
        while config is not None:
            if key in config._layer.own:
                return config._layer.own[key]
            config = config._fallback
        return False if key in _FLAGS else ()

    def _put(self, key: str, value: object) -> None:
        self._layer.own[key] = _read_key(key, value)
        self.changed()

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name not in REDUCTION_KEYS:
            raise UnknownKey(name, REDUCTION_KEYS, type(self).__name__)
        super().__setattr__(name, value)

    # -- resolved values ---------------------------------------------------------------------

    @property
    def names(self) -> frozenset[str]:
        """Return the canonical names of all reductions to compute."""
        plain = {*self._get("reductions"), *self._get("norms")}
        absolute = {*self._get("abs_reductions"), *self._get("abs_norms")}
        return frozenset(plain | {f"abs_{name}" for name in absolute})

    @property
    def keeps_raw(self) -> bool:
        return self.save_raw_tensor or not (self.names or self.save_shape)

    # -- as data -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return {
            "reductions": sorted(self.names),
            "save_raw_tensor": self.save_raw_tensor,
            "save_shape": self.save_shape,
        }

    @classmethod
    def from_dict(cls, params: Mapping[str, Any]) -> ReductionConfig:
        """Read flat settings, where `reductions` holds all names: `min,l1_norm,abs_mean`."""
        if not isinstance(params, Mapping):
            raise ConfigurationError(f"reduction_config={params!r} is not a dict of settings")
        return cls(**_from_flat(params))

    @classmethod
    def parse(cls, value: object) -> ReductionConfig:
        """Read what a hook or a collection accepts as its `reduction_config`."""
        if value is None:
            return cls()
        if isinstance(value, ReductionConfig):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise ConfigurationError(
            f"reduction_config={value!r} is not a ReductionConfig; write "
            "ReductionConfig(reductions=['mean'])"
        )

    def copy(self) -> ReductionConfig:
        return ReductionConfig(**{key: self._get(key) for key in REDUCTION_KEYS})

    def __reduce__(self) -> tuple[Any, ...]:
        return ReductionConfig, tuple(self._get(key) for key in REDUCTION_KEYS)


def _from_flat(params: Mapping[str, Any]) -> dict[str, Any]:
    check_keys(params, REDUCTION_KEYS, "ReductionConfig")
    own: dict[str, Any] = {}
    with error_context("ReductionConfig"):
        for key, value in params.items():
            if value is None:
                continue
            if key == "reductions":
                own.update(_by_list(_read_list(key, value)))
            elif key in _FLAGS:
                own[key] = read_boolean(key, value)
        for key in _LISTS[1:]:
            if params.get(key) is not None:
                own[key] = (*own.get(key, ()), *_read_list(key, params[key]))
    return own
