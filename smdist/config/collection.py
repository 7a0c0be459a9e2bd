"""Named groups of tensors: which tensors, saved when, and in which form.

A collection of a hook uses the hook's `save_config` and `reduction_config` for every setting that was
not set on the collection. Scripts may change it at any time.

Framework collections extend it in two steps. `request()` records "the inputs and outputs of this
module" while the tensor names are still unknown. When the model is registered, the hook reads
`unbound_requests` and calls `bind()` with the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from smdist.config.readers import check_keys, error_context, read_boolean, read_text, read_texts
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.config.settings import Configuration, ListView, SetView
from smdist.errors import ConfigurationError

__all__ = ["SCALAR_COLLECTIONS", "Collection", "CollectionKeys", "TensorRequest", "compile_regex"]


class CollectionKeys:
    """Names of the built-in collections."""

    DEFAULT = "default"
    ALL = "all"
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    LOSSES = "losses"
    BIASES = "biases"
    LAYERS = "layers"
    SM_METRICS = "sm_metrics"
    OPTIMIZER_VARIABLES = "optimizer_variables"
    TENSORFLOW_SUMMARIES = "tensorflow_summaries"
    METRICS = "metrics"
    HYPERPARAMETERS = "hyperparameters"
    PREDICTIONS = "predictions"
    LABELS = "labels"
    FEATURE_IMPORTANCE = "feature_importance"
    AVERAGE_SHAP = "average_shap"
    FULL_SHAP = "full_shap"
    TREES = "trees"


SCALAR_COLLECTIONS = frozenset(
    {
        CollectionKeys.LOSSES,
        CollectionKeys.METRICS,
        CollectionKeys.SM_METRICS,
        CollectionKeys.FEATURE_IMPORTANCE,
        CollectionKeys.AVERAGE_SHAP,
    }
)

_KEYS = (
    "name",
    "include_regex",
    "tensor_names",
    "reduction_config",
    "save_config",
    "save_histogram",
)


C = TypeVar("C", SaveConfig, ReductionConfig)


def compile_regex(pattern: str) -> re.Pattern[str]:
    """Compile an `include_regex`. Raises ConfigurationError that names the position of the fault."""
    try:
        return re.compile(pattern)
    except re.error as error:
        position = "" if error.pos is None else f" at position {error.pos}"
        raise ConfigurationError(
            f"include_regex {pattern!r} is not a regular expression: {error.msg}{position}; "
            "escape special characters with a backslash, or with re.escape()"
        ) from error


@dataclass(eq=False)
class TensorRequest:
    """The inputs and/or outputs of a module. `patterns` is None until their names are known."""

    target: object
    inputs: bool
    outputs: bool
    patterns: tuple[str, ...] | None = field(default=None)


class Collection(Configuration):
    """A named group of tensors, selected by regular expressions and by exact names.

    Settings that are not set on the collection are those of its hook. `save_config` may be a dict
    with some of the modes; the other modes then follow the hook.
    """

    def __init__(
        self,
        name: str,
        include_regex: Any = None,
        tensor_names: Any = None,
        reduction_config: Any = None,
        save_config: Any = None,
        save_histogram: bool = True,
    ) -> None:
        super().__init__()
        self._name = read_text("name of a collection", name)
        if not name:
            raise ConfigurationError("name='' of a collection is empty; give it a name")
        self._patterns: tuple[re.Pattern[str], ...] = ()
        self._tensor_names: dict[str, None] = {}
        self._requests: list[TensorRequest] = []
        self._bound: tuple[re.Pattern[str], ...] = ()
        self._save_config: SaveConfig | None = None
        self._reduction_config: ReductionConfig | None = None
        self._hook: tuple[SaveConfig, ReductionConfig] | None = None
        self.include_regex = include_regex
        self.tensor_names = tensor_names
        self.reduction_config = reduction_config
        self.save_config = save_config
        self.save_histogram = save_histogram

    @property
    def name(self) -> str:
        return self._name

    # -- which tensors -----------------------------------------------------------------------

    @property
    def include_regex(self) -> ListView[str]:
        return ListView(lambda: [p.pattern for p in self._patterns], self._set_regex)

    @include_regex.setter
    def include_regex(self, value: Any) -> None:
        self._set_regex(value)

    def _set_regex(self, value: Any) -> None:
        with error_context(f"collection {self._name!r}"):
            given = () if value is None or value is False else read_texts("include_regex", value)
            self._patterns = tuple(map(compile_regex, given))
        self.changed()

    def include(self, regex: Any = None, *, t: Any = None) -> None:
        """Add a regular expression or a list of them. A string is one expression, commas included.

        `t` is the name of `regex` in older scripts.
        """
        regex = t if regex is None else regex
        with error_context(f"collection {self._name!r}"):
            added = tuple(map(compile_regex, read_texts("include_regex", regex)))
        self._patterns += added
        self.changed()

    @property
    def tensor_names(self) -> SetView[str]:
        return SetView(lambda: self._tensor_names, self._set_names)

    @tensor_names.setter
    def tensor_names(self, value: Any) -> None:
        self._set_names(value)

    def _set_names(self, value: Any) -> None:
        with error_context(f"collection {self._name!r}"):
            given = () if value is None else read_texts("tensor_names", value)
        self._tensor_names = dict.fromkeys(given)
        self.changed()

    def has_tensor_name(self, tname: str) -> bool:
        return tname in self._tensor_names

    def add_tensor_name(self, tname: str) -> None:
        with error_context(f"collection {self._name!r}"):
            tname = read_text("tensor_name", tname)
        if tname not in self._tensor_names:
            self._tensor_names[tname] = None
            self.changed()

    def remove_tensor_name(self, tname: str) -> None:
        if self._tensor_names.pop(tname, self) is not self:
            self.changed()

    def matches(self, name: str) -> bool:
        return name in self._tensor_names or any(
            pattern.search(name) for pattern in (*self._patterns, *self._bound)
        )

    @property
    def selects_nothing(self) -> bool:
        return not (self._patterns or self._tensor_names or self._requests)

    # -- requests of framework collections ---------------------------------------------------

    def request(self, target: object, inputs: bool, outputs: bool) -> TensorRequest:
        """Request inputs and outputs of a module, in place of an earlier request for it."""
        self._requests = [r for r in self._requests if r.target is not target]
        found = TensorRequest(
            target, read_boolean("inputs", inputs), read_boolean("outputs", outputs)
        )
        self._requests.append(found)
        self._rebind()
        return found

    def bind(self, request: TensorRequest, patterns: Iterable[str]) -> None:
        """Set the regular expressions of the tensor names that a request stands for."""
        request.patterns = tuple(patterns)
        self._rebind()

    def _rebind(self) -> None:
        self._bound = tuple(re.compile(p) for r in self._requests for p in r.patterns or ())
        self.changed()

    @property
    def requests(self) -> tuple[TensorRequest, ...]:
        return tuple(self._requests)

    @property
    def unbound_requests(self) -> tuple[TensorRequest, ...]:
        return tuple(r for r in self._requests if r.patterns is None)

    @property
    def bound_regex(self) -> tuple[str, ...]:
        return tuple(pattern.pattern for pattern in self._bound)

    # -- when, and in which form ---------------------------------------------------------------

    @property
    def save_config(self) -> SaveConfig | None:
        return self._save_config

    @save_config.setter
    def save_config(self, value: Any) -> None:
        hook = self._hook and self._hook[0]
        self._save_config = self._replace(SaveConfig, self._save_config, value, hook)
        self.changed()

    @property
    def reduction_config(self) -> ReductionConfig | None:
        return self._reduction_config

    @reduction_config.setter
    def reduction_config(self, value: Any) -> None:
        hook = self._hook and self._hook[1]
        self._reduction_config = self._replace(ReductionConfig, self._reduction_config, value, hook)
        self.changed()

    def _replace(self, kind: type[C], old: C | None, value: Any, hook: C | None) -> C | None:
        """Return the configuration for `value` with the hook's one below it, and listen to it."""
        new = None
        if value is not None:
            with error_context(f"collection {self._name!r}"):
                new = kind.parse(value)
        if hook is not None:
            new = kind.partial(fallback=hook) if new is None else new.with_fallback(hook)
        if old is not None:
            old.unwatch(self)
        if new is not None:
            new.watch(self)
        return new

    @property
    def save_histogram(self) -> bool:
        return self._save_histogram

    @save_histogram.setter
    def save_histogram(self, value: bool) -> None:
        with error_context(f"collection {self._name!r}"):
            self._save_histogram = read_boolean("save_histogram", value)
        self.changed()

    def attach(self, save_config: SaveConfig, reduction_config: ReductionConfig) -> None:
        """Use the configuration of a hook for every setting that is not set on this collection."""
        self._hook = (save_config, reduction_config)
        self.save_config = self._save_config
        self.reduction_config = self._reduction_config

    # -- as data; without the requests, which belong to one model of one process ---------------

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "include_regex": list(self.include_regex),
            "tensor_names": sorted(self._tensor_names),
            "reduction_config": None if (r := self._reduction_config) is None else r.to_dict(),
            "save_config": None if (s := self._save_config) is None else s.to_dict(),
            "save_histogram": self._save_histogram,
        }

    @classmethod
    def from_dict(cls, params: Mapping[str, Any]) -> Collection:
        check_keys(params, _KEYS, "Collection")
        return cls(**params)

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"<Collection {self._name!r}>"
