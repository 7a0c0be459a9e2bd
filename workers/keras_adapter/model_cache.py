"""What a Keras hook finds out about the models it sees.

Each model keeps that itself, in an attribute that Keras does not look at: functions that were traced
for a model hold all of it, so whoever else kept them would keep every model there ever was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from smdist.planning import StepPlan
from smdist.workers.keras_adapter.step_function import StepFunction
from smdist.workers.keras_adapter.taps import Wants
from smdist.workers.keras_adapter.variable_names import Names

if TYPE_CHECKING:
    from smdist.workers.keras_adapter.in_graph_capture import Inline

__all__ = ["Known", "Models"]

_hooks = count()


class Known:
    """Of one model. Functions stand beside the one of Keras that they were made for."""

    def __init__(self) -> None:
        self.names: Names | None = None
        self.completed = False  # was it made to have the variables that it says it has?
        self.wants: dict[StepPlan, Wants] = {}
        # Of a kind of step: what is told of it, and the optimizers that are looked at, by `id`. It is
        # their own while the function holds them.
        self.functions: dict[
            tuple[str, Wants | None, tuple[int, ...]], tuple[Any, StepFunction]
        ] = {}
        # Functions of Keras, or in their place, and the states of the hooks that asked.
        self.examined: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self.inlines: dict[str, Inline] = {}

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # of a copy of the model nothing is known


class Models:
    """Those that a hook has seen and that are still there."""

    def __init__(self) -> None:
        self._attribute = f"_smdist_{next(_hooks)}"
        self._seen: list[weakref.ref[Any]] = []

    def known(self, model: Any) -> Known:
        kept = vars(model)
        found: Known | None = kept.get(self._attribute)
        if found is None:
            found = kept[self._attribute] = Known()
            self._seen = [*(seen for seen in self._seen if seen() is not None), weakref.ref(model)]
        return found

    def __iter__(self) -> Iterator[Known]:
        for seen in self._seen:
            model = seen()
            if model is not None:
                yield self.known(model)

    def clear(self) -> None:
        for seen in self._seen:
            model = seen()
            if model is not None:
                vars(model).pop(self._attribute, None)
        self._seen = []
