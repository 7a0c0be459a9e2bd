"""Telling Python about tensors from inside a graph, without being noticed by the rest of it.

Processes of a job may find each other by the names of operations (Horovod does), and those depend
on everything before them: a second `cond` is `cond_1`, and what is unfolded of functions gets numbers
in its order. So what is added here has a scope of its own and stays a function: the other
operations are called as they would be without it, in a process that captures and in one that does
not.

What is added to a graph runs in the order in which it was added, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["ask", "compiled", "tell", "tell_when"]

_SCOPE = "smdist"
_LATEST = "_smdist_latest"


def compiled() -> bool:
    """Is the graph that is being traced one for XLA? Nothing gets out of it: a graph that tries to
    hand something over cannot be compiled at all."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def ask(question: Callable[[], Any], answers: int) -> Any:
    """What `question` answers, so many truths, at this place of every run."""
    kinds = [tf.bool] * answers
    found = _aside(lambda: tf.numpy_function(question, [], kinds, stateful=True))
    for answer in found:
        answer.set_shape(())
    return found


def tell(tensors: list[Any], listener: Callable[..., Any]) -> None:
    """In every run `listener` gets the arrays of `tensors`, and returns a truth."""
    with tf.name_scope(_SCOPE):
        tensors = [tf.stop_gradient(tensor) for tensor in tensors]
    _aside(lambda: tf.numpy_function(listener, tensors, tf.bool))


def tell_when(
    condition: Any, tensors: Callable[[], list[Any]], listener: Callable[..., Any]
) -> Any:
    """In runs where `condition` (a tensor or variable) is true, `listener` gets the arrays of
    `tensors()`, and returns a truth. Otherwise nothing is read."""

    def told() -> Any:
        return tf.numpy_function(listener, tensors(), tf.bool)

    return _aside(lambda: tf.cond(condition, told, lambda: tf.constant(value=False)))


def _aside(body: Callable[[], Any]) -> Any:
    graph = tf.compat.v1.get_default_graph()
    before = getattr(graph, _LATEST, None)
    with tf.name_scope(_SCOPE), tf.control_dependencies([] if before is None else [before]):
        function = tf.function(body, autograph=False, experimental_attributes={"_noinline": True})
        found = function()
    setattr(graph, _LATEST, tf.nest.flatten(found)[0])
    return found
