"""What to keep of a tensor: reductions, the raw values, the shape, in any combination.

One name per reduction everywhere: `mean`, `abs_std`, `l2`, `abs_l1`, `nans`, `q0.99`. Without
reductions and without `save_shape` the raw tensor is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from smdist.config.observable import Configuration, ListView
from smdist.config.readers import check_keys, error_context, read_boolean, read_names
from smdist.errors import ConfigurationError, UnknownKey
from smdist.kernel.tensor_stats import REDUCTIONS, canonical, is_reduction

__all__ = ["REDUCTION_KEYS", "ReductionConfig", "canonical_reduction"]

_NORMS: Final = ("l1", "l2")
_LISTS: Final = ("reductions", "abs_reductions", "norms", "abs_norms")
_FLAGS: Final = ("save_raw_tensor", "save_shape")
REDUCTION_KEYS: Final = (*_LISTS, *_FLAGS)


def canonical_reduction(name: object, key: str = "reductions") -> str:
    """The one name of a reduction: `L1_norm` is `l1`, `q.50` is `q0.5`."""
    text = name.strip().lower() if isinstance(name, str) else ""
    text = re.sub(r"(?<=l[12])_norm$", "", text)
    text = re.sub(r"^q(?=\.\d)", "q0", text)
    if is_reduction(text):
        return canonical(text)
    if text.startswith("q") and text[1:2].isdigit():
        raise ConfigurationError(f"{key}: {name!r} is no quantile; write one of 0 to 1 as 'q0.99'")
    near = get_close_matches(text, REDUCTIONS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(REDUCTIONS)}, q0.99"
    raise ConfigurationError(f"{key}: {name!r} is no reduction; {hint}")


def _read_list(key: str, value: object) -> tuple[str, ...]:
    """The names in a list attribute, as they stand there: without the `abs_` of the abs lists."""
    result: list[str] = []
    for item in read_names(key, value):
        name = canonical_reduction(item, key)
        if key.startswith("abs_"):
            name = canonical_reduction(f"abs_{name.removeprefix('abs_')}", key).removeprefix("abs_")
        if key.endswith("norms") and name not in _NORMS:
            raise ConfigurationError(f"{key}: {item!r} is no norm; choose 'l1' or 'l2'")
        if name not in result:
            result.append(name)
    return tuple(result)


def _sorted_out(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Canonical names in the four lists they belong to."""
    found: dict[str, list[str]] = {key: [] for key in _LISTS}
    for name in names:
        plain = name.removeprefix("abs_")
        kind = "norms" if plain in _NORMS else "reductions"
        found[kind if plain == name else f"abs_{kind}"].append(plain)
    return {key: tuple(value) for key, value in found.items()}


class ReductionConfig(Configuration):
    """Which reductions are saved instead of, or beside, the raw tensor.

    `reductions` takes any name; `abs_reductions` means the same of absolute values; `norms` and
    `abs_norms` take `l1` and `l2`. Attributes are checked when they are assigned.
    """

    def __init__(
        self,
        reductions: Any = None,
        abs_reductions: Any = None,
        norms: Any = None,
        abs_norms: Any = None,
        save_raw_tensor: Any = False,
        save_shape: Any = False,
    ) -> None:
        super().__init__()
        self._parent: ReductionConfig | None = None
        self._own: dict[str, Any] = {}
        given = (reductions, abs_reductions, norms, abs_norms, save_raw_tensor, save_shape)
        for key, value in zip(REDUCTION_KEYS, given, strict=True):
            self._own[key] = self._checked(key, value)

    @classmethod
    def layered(
        cls, own: Mapping[str, Any] | None = None, parent: ReductionConfig | None = None
    ) -> ReductionConfig:
        """Each setting by itself: if it is in `own` that, else whatever `parent` says."""
        config = cls()
        config._parent = parent
        config._own = _from_flat(own or {})
        if parent is not None:
            parent.watch(config)
        return config

    def under(self, parent: ReductionConfig) -> ReductionConfig:
        """In a collection of a hook that is configured by `parent`: itself, if it is complete."""
        if self._parent is None or parent is self._parent or parent is self:
            return self
        joined = ReductionConfig.layered(parent=parent)
        joined._own = self._own
        self.watch(joined)
        return joined

    def _checked(self, key: str, value: object) -> object:
        with error_context("ReductionConfig"):
            if key in _FLAGS:
                return read_boolean(key, value)
            return () if value is None else _read_list(key, value)

    def _get(self, key: str) -> Any:
        if key in self._own:
            return self._own[key]
        if self._parent is not None:
            return self._parent._get(key)
        return False if key in _FLAGS else ()

    def _put(self, key: str, value: object) -> None:
        self._own[key] = self._checked(key, value)
        self.changed()

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and name not in REDUCTION_KEYS:
            raise UnknownKey(name, REDUCTION_KEYS, type(self).__name__)
        super().__setattr__(name, value)

    def _list(self, key: str) -> ListView[str]:
        return ListView(lambda: self._get(key), lambda new: self._put(key, new))

    @property
    def reductions(self) -> ListView[str]:
        return self._list("reductions")

    @reductions.setter
    def reductions(self, value: Any) -> None:
        self._put("reductions", value)

    @property
    def abs_reductions(self) -> ListView[str]:
        return self._list("abs_reductions")

    @abs_reductions.setter
    def abs_reductions(self, value: Any) -> None:
        self._put("abs_reductions", value)

    @property
    def norms(self) -> ListView[str]:
        return self._list("norms")

    @norms.setter
    def norms(self, value: Any) -> None:
        self._put("norms", value)

    @property
    def abs_norms(self) -> ListView[str]:
        return self._list("abs_norms")

    @abs_norms.setter
    def abs_norms(self, value: Any) -> None:
        self._put("abs_norms", value)

    @property
    def save_raw_tensor(self) -> bool:
        return bool(self._get("save_raw_tensor"))

    @save_raw_tensor.setter
    def save_raw_tensor(self, value: bool) -> None:
        self._put("save_raw_tensor", value)

    @property
    def save_shape(self) -> bool:
        return bool(self._get("save_shape"))

    @save_shape.setter
    def save_shape(self, value: bool) -> None:
        self._put("save_shape", value)

    # -- what it comes to --------------------------------------------------------------------

    @property
    def names(self) -> frozenset[str]:
        """Canonical names of everything to compute."""
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
        """From flat settings, where `reductions` holds all names: `min,l1_norm,abs_mean`."""
        if not isinstance(params, Mapping):
            raise ConfigurationError(f"reduction_config={params!r} is not a dict of its settings")
        return cls(**_from_flat(params))

    @classmethod
    def parse(cls, value: object) -> ReductionConfig:
        """What a hook or a collection accepts as its `reduction_config`."""
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReductionConfig):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ReductionConfig({', '.join(f'{k}={self._get(k)!r}' for k in REDUCTION_KEYS)})"


def _from_flat(params: Mapping[str, Any]) -> dict[str, Any]:
    check_keys(params, REDUCTION_KEYS, "ReductionConfig")
    own: dict[str, Any] = {}
    with error_context("ReductionConfig"):
        for key, value in params.items():
            if value is None:
                continue
            if key == "reductions":
                own.update(_sorted_out(_read_list(key, value)))
            elif key in _FLAGS:
                own[key] = read_boolean(key, value)
        for key in _LISTS[1:]:
            if params.get(key) is not None:
                own[key] = (*own.get(key, ()), *_read_list(key, params[key]))
    return own
