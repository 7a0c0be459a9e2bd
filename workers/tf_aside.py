"""Telling Python about tensors from inside a graph, without being noticed by the rest of it.

Processes of a job may find each other by the names of operations (Horovod does), and those depend
on everything before them: a second `cond` is `cond_1`, and what is unfolded of functions gets numbers
in its order. So what is added here has a scope of its own and stays a function: the other
operations are called as they would be without it, in a process that captures and in one that does
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["ask", "tell_when"]

_SCOPE = "smdist"


def ask(question: Callable[[], Any]) -> Any:
    """What `question` answers, a truth, at this place of every run."""
    answer = _aside(lambda: tf.numpy_function(question, [], tf.bool, stateful=True))
    answer.set_shape(())
    return answer


def tell_when(
    condition: Any, tensors: Callable[[], list[Any]], listener: Callable[..., Any]
) -> Any:
    """In runs where `condition` (a tensor or variable) is true, `listener` gets the arrays of
    `tensors()`, and returns a truth. Otherwise nothing is read."""

    def tell() -> Any:
        return tf.numpy_function(listener, tensors(), tf.bool)

    return _aside(lambda: tf.cond(condition, tell, lambda: tf.constant(value=False)))


def _aside(body: Callable[[], Any]) -> Any:
    with tf.name_scope(_SCOPE):
        function = tf.function(body, autograph=False, experimental_attributes={"_noinline": True})
        return function()
