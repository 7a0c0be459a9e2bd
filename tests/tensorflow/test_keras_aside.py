"""What capture adds to a graph leaves the names of everything else as they are.

Horovod, for one, finds out by such names which tensors of which ranks belong together: a name that
is another one on the rank that saves makes the whole job wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from smdist.workers.tf_adapter.graph_callbacks import call, call_for_flags, call_if, in_xla_graph


def reduction(tensor: Any) -> Any:
    """As Horovod nests its operations: in a function, each in a condition of its own."""

    def inner(value: Any) -> Any:
        with tf.name_scope("Reduce"):
            big = tf.reduce_sum(value) > 0
            pair = [
                tf.cond(big, lambda: tf.raw_ops.Sin(x=value, name="wanted"), lambda: value),
                tf.cond(big, lambda: tf.raw_ops.Cos(x=value, name="wanted"), lambda: value),
            ]
            return pair[0] ** 2 + pair[1] ** 2

    return tf.function(inner)(tensor)


def executed(step: Callable[[Any], Any], data: Any) -> set[str]:
    """Names of the operations that run in the end, after functions and conditions are unfolded."""
    context.enable_run_metadata()  # tells of functions when they run for the first time
    try:
        tf.function(step)(data)
        graphs = context.export_run_metadata().partition_graphs
    finally:
        context.disable_run_metadata()
    return {node.name for graph in graphs for node in graph.node if "wanted" in node.name}


def test_names_of_the_others() -> None:
    seen: list[float] = []
    flag = tf.Variable(True)
    weight = tf.Variable(2.0)

    def listen(value: Any) -> bool:
        seen.append(float(value))
        return True

    def plain(data: Any) -> Any:
        return reduction(data * weight)

    def watched(data: Any) -> Any:
        (due,) = call_for_flags(lambda: True, 1)
        with tf.control_dependencies([data]):
            call_if(flag, lambda: [weight.read_value()], listen)
        result = reduction(data * weight)
        call_if(due, lambda: [tf.reduce_sum(result)], listen)
        return result

    data = tf.constant([1.0, 2.0])
    expected = executed(plain, data)
    assert len(expected) >= 2
    assert executed(watched, data) == expected
    assert seen == [2.0, pytest.approx(2.0)]


def test_nothing_is_told_unless_it_is_due() -> None:
    flag = tf.Variable(False)
    told: list[float] = []

    def listen(value: Any) -> bool:
        told.append(float(value))
        return True

    def step(data: Any) -> Any:
        call_if(flag, lambda: [data], listen)
        return data + 1

    function = tf.function(step)
    function(tf.constant(1.0))
    flag.assign(value=True)
    function(tf.constant(2.0))
    flag.assign(value=False)
    function(tf.constant(3.0))
    assert told == [2.0]


def _reading(variable: Any) -> list[Any]:
    return [variable.read_value()]


def test_one_after_the_other() -> None:
    """Whether they read variables or not: what they tell is recorded by one hand."""
    told: list[str] = []
    weights = [tf.Variable(float(number)) for number in range(8)]

    def listener(name: str) -> Callable[..., bool]:
        def listen(*_: Any) -> bool:
            told.append(name)
            return True

        return listen

    def step(data: Any) -> Any:
        (due,) = call_for_flags(listener("begin"), 1)
        for number, weight in enumerate(weights):
            reading = partial(_reading, weight)
            call_if(due, reading, listener(f"when {number}"))
            call([data], listener(f"always {number}"))
        return data + 1

    tf.function(step, autograph=False)(tf.constant(1.0))
    expected = [f"{kind} {number}" for number in range(8) for kind in ("when", "always")]
    assert told == ["begin", *expected]


def test_several_answers() -> None:
    answers = tf.function(lambda: call_for_flags(lambda: (True, False), 2))()
    assert [bool(answer) for answer in answers] == [True, False]


def test_what_xla_compiles() -> None:
    found: dict[str, bool] = {}

    def look(name: str) -> None:
        found[name] = in_xla_graph()

    def branch() -> Any:
        look("branch")
        return tf.constant(1.0)

    def inside() -> Any:
        look("itself")
        plain("within")
        return tf.cond(tf.constant(value=True), branch, lambda: tf.constant(0.0))

    def outside() -> Any:
        look("around")
        return whole()

    plain = tf.function(look)
    whole = tf.function(inside, jit_compile=True)
    look("eager")
    plain("plain")
    tf.function(outside)()
    look("after")
    assert found == {
        "eager": False,
        "plain": False,
        "around": False,
        "itself": True,
        "within": True,
        "branch": True,
        "after": False,
    }
