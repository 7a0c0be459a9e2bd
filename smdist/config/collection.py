"""Groups of tensors: which names, kept how, saved when; and the manager a hook holds them in.

A collection of a hook follows the hook's `save_config` and `reduction_config` in everything that
was not set for it, at any time: what `hook.get_collection(name)` hands out is its own to change.

Framework collections add their own methods on top of one seam: `request()` records "the inputs
and outputs of this module" before anybody may know its name; whoever knows it later (the hook,
when the model is registered) looks at `unbound_requests` and answers with `bind()`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smdist.config.observable import Configuration, ListView, SetView
from smdist.config.readers import check_keys, error_context, read_boolean, read_text, read_texts
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
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


def compile_regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        place = "" if error.pos is None else f" at position {error.pos}"
        raise ConfigurationError(
            f"include_regex {pattern!r} is not a regular expression: {error.msg}{place}; "
            "escape special characters with a backslash, or with re.escape()"
        ) from error


@dataclass(eq=False)
class TensorRequest:
    """'The inputs and/or outputs of this module', until somebody knows their names.

    `patterns` is None as long as nobody does.
    """

    target: object
    inputs: bool
    outputs: bool
    patterns: tuple[str, ...] | None = field(default=None)


class Collection(Configuration):
    """A named group of tensors: those whose name any regex finds, and those named exactly.

    Without a `save_config` or a `reduction_config` of its own it follows its hook. A dict with some
    of the modes is accepted as `save_config`; the other modes then follow the hook.
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
            raise ConfigurationError("name='' of a collection must be text that is not empty")
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
        """Add a regular expression, or a list of them; text is one expression, commas and all.

        `t` is what older scripts call `regex`.
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

    # -- the seam for framework methods --------------------------------------------------------

    def request(self, target: object, inputs: bool, outputs: bool) -> TensorRequest:
        """Ask for inputs and outputs of a framework's module; asking again replaces."""
        self._requests = [r for r in self._requests if r.target is not target]
        found = TensorRequest(
            target, read_boolean("inputs", inputs), read_boolean("outputs", outputs)
        )
        self._requests.append(found)
        self._rebind()
        return found

    def bind(self, request: TensorRequest, patterns: Iterable[str]) -> None:
        """Say which tensor names a request stands for, as regular expressions."""
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

    # -- when and how ------------------------------------------------------------------------

    @property
    def save_config(self) -> SaveConfig | None:
        return self._save_config

    @save_config.setter
    def save_config(self, value: Any) -> None:
        new = None
        if value is not None:
            with error_context(f"collection {self._name!r}"):
                new = SaveConfig.parse(value)
        if self._hook is not None:
            new = (
                SaveConfig.layered(parent=self._hook[0])
                if new is None
                else new.under(self._hook[0])
            )
        if self._save_config is not None:
            self._save_config.unwatch(self)
        if new is not None:
            new.watch(self)
        self._save_config = new
        self.changed()

    @property
    def reduction_config(self) -> ReductionConfig | None:
        return self._reduction_config

    @reduction_config.setter
    def reduction_config(self, value: Any) -> None:
        new = None
        if value is not None:
            with error_context(f"collection {self._name!r}"):
                new = ReductionConfig.parse(value)
        if self._hook is not None:
            hook = self._hook[1]
            new = ReductionConfig.layered(parent=hook) if new is None else new.under(hook)
        if self._reduction_config is not None:
            self._reduction_config.unwatch(self)
        if new is not None:
            new.watch(self)
        self._reduction_config = new
        self.changed()

    @property
    def save_histogram(self) -> bool:
        return self._save_histogram

    @save_histogram.setter
    def save_histogram(self, value: bool) -> None:
        with error_context(f"collection {self._name!r}"):
            self._save_histogram = read_boolean("save_histogram", value)
        self.changed()

    def follow(self, save_config: SaveConfig, reduction_config: ReductionConfig) -> None:
        """Become a collection of a hook: what is not set here is what the hook says."""
        self._hook = (save_config, reduction_config)
        self.save_config = self._save_config
        self.reduction_config = self._reduction_config

    # -- as data -----------------------------------------------------------------------------

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

    def copy(self) -> Collection:
        """Without the requests for modules, which belong to one model of one process."""
        return self.from_dict(self.to_dict())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self.to_dict(),)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Collection):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}>"
