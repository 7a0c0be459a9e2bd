"""Steps that draw random numbers by operations that keep a state of their own.

Such an operation (`tf.random.normal`, Dropout of Keras 2) goes on where it stopped, but in its own
function alone: another function begins the sequence anew, and a step that runs there gets numbers
that an earlier step had. So all steps of such a model run through one function, from the first on,
and Keras goes on with it when the hook is gone. It knows the hooks that look into it only while they
do: they may be gone, and others may have come.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.keras_adapter.phase import one_by_one, steps_per_execution
from smdist.workers.keras_adapter.step_function import Outcome, StepFunction, run_or_plain
from smdist.workers.keras_adapter.taps import NOTHING, Wants, covers

__all__ = ["OneFunction", "cannot_look", "draws", "example", "note_turn", "turn_after"]

_TURN = "_smdist_turn"


class OneFunction:
    """Stands where Keras keeps the function that it calls for every execution."""

    def __init__(
        self,
        model: Any,
        kind: str,
        function: StepFunction,
        wants: Wants,
    ) -> None:
        """`wants`: what `function` tells of its inside."""
        self._model, self._kind = model, kind
        self.function, self._wants = function, wants
        self._hearers: list[ErrorPolicy] = []

    def __call__(self, source: Any) -> Any:
        steps = steps_per_execution(self._model)
        return one_by_one(self._kind, source, steps, lambda batch: self.step(batch)[0])

    def step(self, batch: Any) -> Outcome:
        found, function, error = run_or_plain(self.function, batch, self._plain)
        if error is not None:
            self.function, self._wants = function, NOTHING
            cannot_look(self._hearers, error, self._kind, self._model)
        return found

    def _plain(self) -> StepFunction:
        return StepFunction(self._model, self._kind, None, turn=turn_after(self))

    def heard_by(self, errors: list[ErrorPolicy]) -> None:
        """Of the hooks that look into it from now on."""
        self._hearers = errors
        self.function.heard_by(errors[0] if errors else None)

    def let_go(self, errors: ErrorPolicy) -> None:
        """Of a hook that looks no more."""
        self.heard_by([one for one in self._hearers if one is not errors])

    def covers(self, wants: Wants, optimizers: list[Any]) -> bool:
        """Does it tell all that, of the gradients of these?"""
        seen = {id(optimizer) for optimizer in self.function.optimizers}
        return covers(self._wants, wants) and seen.issuperset(map(id, optimizers))


def cannot_look(hearers: list[ErrorPolicy], error: Exception, kind: str, model: Any) -> None:
    for errors in hearers:
        errors.on_exception(error, f"looking into the {kind} step of {model.name}")


def example(source: Any) -> Any:
    """What the batches of a function's argument are like; None if that is not known."""
    if isinstance(source, (list, tuple)):
        return source[0] if source else None
    return getattr(source, "element_spec", None)


def draws(graph: Any) -> bool:
    """Is there an operation with a random state of its own, in the graph or a function of it?"""
    definition = graph.as_graph_def()
    functions = (function.node_def for function in definition.library.function)
    return any(map(_draws, chain(definition.node, *functions)))


def _draws(node: Any) -> bool:
    attributes = node.attr
    if "seed" not in attributes or "seed2" not in attributes:
        return False
    # Recurrent layers have them on a GPU for their dropout, which Keras does itself.
    return "dropout" not in attributes or attributes["dropout"].f != 0


def turn_after(original: Any) -> int:
    """Of how many functions the next one would repeat the numbers."""
    if isinstance(original, OneFunction):
        return original.function.turn + 1
    return getattr(original, _TURN, 0) + int(_traced(original))


def note_turn(function: Any, turn: int) -> None:
    """`function`, of Keras, is the one of that turn."""
    if turn:
        setattr(function, _TURN, turn)


def _traced(function: Any, depth: int = 3) -> bool:
    count = getattr(function, "experimental_get_tracing_count", None)
    if count is not None:
        return int(count()) > 0
    # That of Keras 3 has those that are traced in itself.
    cells = (getattr(function, "__closure__", None) or ()) if depth else ()
    return any(_traced(cell.cell_contents, depth - 1) for cell in cells)
