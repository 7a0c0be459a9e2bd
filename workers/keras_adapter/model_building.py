"""Create the variables of a Keras model before its first captured step.

The weights of a step are those that it starts with. A model that gets its variables with its first
batch is therefore built before that batch, by tracing its forward pass: nothing is run, no counter
moves and no random number is drawn. Called on the training thread by `TracedStep`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import tensorflow as tf

from smdist.workers.hook.error_policy import ErrorPolicy

__all__ = ["build_model", "complete_model", "is_built", "is_keras_3", "is_only_marked_built"]


def is_keras_3(model: Any) -> bool:
    return hasattr(model, "stateless_call")


def is_built(model: Any) -> bool:
    """Check whether `model` has the variables that its steps start with.

    A model without `call` never reports that itself: it holds layers that its steps call.
    """
    if model.built or _can_be_called(model):
        return bool(model.built)
    return all(layer.built for layer in model._flatten_layers(include_self=False))


def is_only_marked_built(model: Any) -> bool:
    """Check whether `build()` of Keras 3 marked a model whose layers get variables when it runs."""
    if not model.built or getattr(model, "_called", True):
        return False
    return not all(layer.built for layer in model._flatten_layers())


def build_model(model: Any, batch: Any, errors: ErrorPolicy) -> None:
    """Make the variables of a model that is not built; a failure is only a warning."""
    if not _can_be_called(model):
        return
    try:
        inputs = _inputs(batch)
        try:
            _build_by_tracing(model, inputs)
        except Exception:  # noqa: BLE001 (some models can only be run)
            _run_once(model, inputs)
    except Exception as error:  # noqa: BLE001 (the step itself will raise it)
        errors.warn_once(
            f"{model.name} could not be built before its first step, whose weights are not saved: "
            f"{_summary(error)}"
        )


def complete_model(model: Any, batch: Any) -> None:
    """Make the missing variables of a Keras 3 model that `build()` only marked as built.

    Failures are ignored: the model may be one that is never called and whose layers are. They get
    their variables in its first step.
    """
    with suppress(Exception):
        if is_only_marked_built(model):
            _build_by_tracing(model, _inputs(batch))


def _can_be_called(model: Any) -> bool:
    return getattr(type(model), "call", None) is not tf.keras.Model.call


def _inputs(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple) else batch


def _build_by_tracing(model: Any, inputs: Any) -> None:
    def forward(inputs: Any) -> Any:
        return model(inputs)

    strategy = model.distribute_strategy
    specs = tf.nest.map_structure(lambda item: _replica_spec(strategy, item), inputs)
    with strategy.scope():
        function = tf.function(forward, autograph=not is_keras_3(model))
        function.get_concrete_function(specs)


def _replica_spec(strategy: Any, item: Any) -> Any:
    """Describe the part of `item` that one replica gets, for any number of samples."""
    spec = tf.type_spec_from_value(strategy.experimental_local_results(item)[0])
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


def _run_once(model: Any, inputs: Any) -> None:
    strategy = model.distribute_strategy
    one = tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0][:1], inputs
    )
    with strategy.scope():
        model(one)


def _summary(error: Exception) -> str:
    """Return one line: TensorFlow puts a page about rewritten code before the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if lines[0] == "in user code:" else lines[0]
