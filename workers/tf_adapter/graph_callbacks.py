"""Callbacks from inside a TensorFlow graph into Python, invisible to the rest of the graph.

Processes of a job may match operations by name (Horovod does), and names depend on everything
added before: a second `cond` is `cond_1`, and inlined functions get numbers in their order. So each
callback has a scope of its own and stays a function that is not inlined. All other operations keep
the names they have without it, in a process that captures and in one that does not.

Called while a function is traced. The callbacks of one graph run in the order they were added, on
a thread of TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["call", "call_for_flags", "call_if", "in_xla_graph"]

_SCOPE = "smdist"
_LATEST = "_smdist_latest"


def in_xla_graph() -> bool:
    """Check whether the graph being traced is one for XLA, which cannot compile a callback."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def call_for_flags(question: Callable[[], Any], count: int) -> Any:
    """Call `question` at this place of every run; return the `count` booleans it answers."""
    kinds = [tf.bool] * count
    found = _in_own_function(lambda: tf.numpy_function(question, [], kinds, stateful=True))
    for answer in found:
        answer.set_shape(())
    return found


def call(tensors: list[Any], callback: Callable[..., Any]) -> None:
    """Call `callback` with the arrays of `tensors` in every run; it returns a boolean."""
    with tf.name_scope(_SCOPE):
        tensors = [tf.stop_gradient(tensor) for tensor in tensors]
    _in_own_function(lambda: tf.numpy_function(callback, tensors, tf.bool))


def call_if(condition: Any, tensors: Callable[[], list[Any]], callback: Callable[..., Any]) -> Any:
    """Call `callback` with the arrays of `tensors()` in runs where `condition` is true.

    `condition` is a tensor or a variable. In other runs nothing is read. `callback` returns a boolean.
    """

    def branch() -> Any:
        return tf.numpy_function(callback, tensors(), tf.bool)

    return _in_own_function(lambda: tf.cond(condition, branch, lambda: tf.constant(value=False)))


def _in_own_function(body: Callable[[], Any]) -> Any:
    graph = tf.compat.v1.get_default_graph()
    before = getattr(graph, _LATEST, None)
    with tf.name_scope(_SCOPE), tf.control_dependencies([] if before is None else [before]):
        function = tf.function(body, autograph=False, experimental_attributes={"_noinline": True})
        found = function()
    setattr(graph, _LATEST, tf.nest.flatten(found)[0])
    return found
