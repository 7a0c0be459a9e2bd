"""One step of a Keras model as a function of its batch: with taps, or plain.

Keras makes a function that takes its batches from an iterator. A step that is captured needs its
batch first: whether there is one at all decides whether there is a step. So these functions do what
Keras' own do (`make_train_function` and its like), for one batch: under the model's strategy,
compiled as the model is, results reduced as Keras reduces them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.keras_adapter.taps import Taps
from smdist.workers.tf_adapter.tensor_access import unconverted

__all__ = [
    "Outcome",
    "StepFunction",
    "build_by_tracing",
    "can_be_called",
    "is_built",
    "is_keras_3",
    "only_says_built",
    "run_or_plain",
    "sow",
]

# What Keras' function would return, and what taps saw: per name, one value for each replica.
Outcome = tuple[Any, dict[str, tuple[Any, ...]]]

_COUNTERS = {"train": "_train_counter", "test": "_test_counter", "predict": "_predict_counter"}


def is_keras_3(model: Any) -> bool:
    return hasattr(model, "stateless_call")


def is_built(model: Any) -> bool:
    """Has it the variables that its steps start with? One without `call` never says so itself: it
    holds layers that its steps call."""
    if model.built or can_be_called(model):
        return bool(model.built)
    return all(layer.built for layer in model._flatten_layers(include_self=False))


def can_be_called(model: Any) -> bool:
    return getattr(type(model), "call", None) is not tf.keras.Model.call


def only_says_built(model: Any) -> bool:
    """`build()` of Keras 3 marks a model as built, whose layers get their variables when it is called."""
    if not model.built or getattr(model, "_called", True):
        return False
    return not all(layer.built for layer in model._flatten_layers())


class StepFunction:
    """`phase` is "train", "test" or "predict". Called on the training thread."""

    def __init__(
        self,
        model: Any,
        phase: str,
        taps: Taps | None,
        optimizers: Sequence[Any] = (),
        turn: int = 0,
    ) -> None:
        """`optimizers`: those whose gradients are seen. `turn`: how many functions ran these
        steps before, and drew random numbers from the same seeds."""
        self.optimizers, self.turn = list(optimizers), turn
        self._model, self._phase, self._taps = model, phase, taps
        self._reduce = _reducer(model)
        self.eager, self.plain = bool(model.run_eagerly), taps is None
        self.traced = False  # has run once
        self._function: Any = self._run
        if not self.eager:
            self._function = tf.function(
                self._run, reduce_retracing=True, autograph=not is_keras_3(model)
            )

    def __call__(self, data: Any) -> Outcome:
        result: Outcome = self._function(_without_optionals(data))
        self.traced = True
        return result

    @property
    def traces(self) -> int:
        return 0 if self.eager else int(self._function.experimental_get_tracing_count())

    def heard_by(self, errors: ErrorPolicy | None) -> None:
        """Who is told what goes wrong while it is traced."""
        if self._taps is not None:
            self._taps.errors = errors

    def trace(self, like: Any) -> Any:
        """Trace the step for batches like that, or for batches that are described so, and run
        nothing; its graph."""
        return self._function.get_concrete_function(_without_optionals(like)).graph

    def _run(self, data: Any) -> Any:
        if not self.eager:
            sow(self.turn)
        model = self._model
        strategy = model.distribute_strategy
        step = self._step
        if not self.eager and model.jit_compile:
            step = tf.function(
                step, jit_compile=True, reduce_retracing=True, autograph=not is_keras_3(model)
            )
        if self._taps is None:
            outputs, seen = strategy.run(step, args=(data,))
        else:
            with self._taps.installed(self.optimizers):
                outputs, seen = strategy.run(step, args=(data,))
        return self._reduced(outputs), self._local(seen)

    def _step(self, data: Any) -> Any:
        step = getattr(self._model, f"{self._phase}_step")
        if self._taps is None:
            outputs, seen = step(data), dict[str, Any]()
        else:
            outputs, seen = self._taps.watch(data, step)
        counter = getattr(self._model, _COUNTERS[self._phase], None)
        if counter is not None:
            counter.assign_add(1)
        return outputs, seen

    @unconverted
    def _reduced(self, outputs: Any) -> Any:
        strategy = self._model.distribute_strategy
        how = "concat"
        if self._phase != "predict":
            how = getattr(self._model, "distribute_reduction_method", None) or "auto"
        return self._reduce(outputs, strategy, reduction=how)

    @unconverted
    def _local(self, seen: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        strategy = self._model.distribute_strategy
        return {name: tuple(strategy.experimental_local_results(t)) for name, t in seen.items()}


def run_or_plain(
    function: StepFunction, data: Any, plain: Callable[[], StepFunction]
) -> tuple[Outcome, StepFunction, Exception | None]:
    """The step, by `function` or, if nothing but our part in that fails, by `plain()`: what it came
    to, which one it was, and why the other could not."""
    try:
        return function(data), function, None
    except Exception as error:
        if function.traced or function.eager or function.plain:
            raise
        # It has never run. If the step itself cannot, this tells what the script would be told.
        other = plain()
        return other(data), other, error


def _reducer(model: Any) -> Callable[..., Any]:
    """Keras' own: it stands beside the class that brings `fit`."""
    for kind in type(model).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "reduce_per_replica", None)
        if found is not None:
            return unconverted(cast("Callable[..., Any]", found))
    return lambda values, strategy, reduction: values


def _without_optionals(data: Any) -> Any:
    """A part of a batch that is None comes out of a dataset as an empty Optional."""
    return tf.nest.map_structure(lambda item: None if _is_none(item) else item, data)


def _is_none(item: Any) -> bool:
    """Of a batch, or of what describes one."""
    if isinstance(item, (tf.experimental.Optional, tf.OptionalSpec)):
        return True
    return isinstance(item, tf.TypeSpec) and item.value_type is type(None)


@unconverted
def sow(turn: int) -> None:
    """Let the graph that is being traced draw other numbers than those of earlier turns."""
    if turn:
        graph = tf.compat.v1.get_default_graph()
        graph.seed = _other_seed(graph.seed, turn)


def _other_seed(seed: int | None, turn: int) -> int:
    if seed is None:  # operations may have seeds of their own
        return random.SystemRandom().randrange(2**31)
    return (seed + turn * 0x9E3779B1) % 2**31


def build_by_tracing(model: Any, like: Any) -> None:
    """Make the weights of `model`, for inputs like that or described so, and run nothing of it."""

    def forward(inputs: Any) -> Any:
        return model(inputs)

    strategy = model.distribute_strategy
    inputs = tf.nest.map_structure(lambda item: _described(strategy, item), like)
    with strategy.scope():
        function = tf.function(forward, autograph=not is_keras_3(model))
        function.get_concrete_function(inputs)


def _described(strategy: Any, item: Any) -> Any:
    """The part that one replica gets, of any number of samples."""
    if isinstance(item, tf.TypeSpec):
        spec = getattr(item, "_value_specs", (item,))[0]
    else:
        spec = tf.type_spec_from_value(strategy.experimental_local_results(item)[0])
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
