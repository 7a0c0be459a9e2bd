"""One step of a Keras model as a function of its batch, with probes or without.

Keras makes a function that takes its batches from an iterator. A captured step needs its batch
first: whether there is one decides whether there is a step. `StepFunction` does what Keras' own
functions do (`make_train_function` and its like), for one batch: under the model's strategy,
compiled as the model is, with results reduced as Keras reduces them.

Random numbers: an operation with a state of its own (`tf.random.normal`, Dropout of Keras 2)
continues its sequence within one traced function only. A second function with the same seed would
draw the same numbers again. So each function that smdist adds is traced with a seed of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

import tensorflow as tf

from smdist.workers.keras_adapter.model_building import is_keras_3
from smdist.workers.keras_adapter.step_probes import StepProbes
from smdist.workers.tf_adapter.tensor_access import unconverted

__all__ = ["Outcome", "StepFunction", "next_seed_offset", "reseed", "set_seed_offset"]

# What Keras' function would return, and what probes saw: per name, one value for each replica.
Outcome = tuple[Any, dict[str, tuple[Any, ...]]]

_COUNTERS = {"train": "_train_counter", "test": "_test_counter", "predict": "_predict_counter"}
_SEED_OFFSET = "_smdist_seed_offset"
_seed_offsets = count(1)  # no two functions of this process share one


class StepFunction:
    """Runs one step of `kind` "train", "test" or "predict". Called on the training thread."""

    def __init__(
        self, model: Any, kind: str, probes: StepProbes | None, optimizers: Sequence[Any] = ()
    ) -> None:
        """Prepare the step; `optimizers` are those whose gradients `probes` are to see."""
        self._model, self._kind, self._probes = model, kind, probes
        self._optimizers = list(optimizers)
        self._seed_offset = next(_seed_offsets)
        self._reduce = _reducer(model)
        self._eager = bool(model.run_eagerly)
        self._has_run = False
        self._function: Any = self._run
        if not self._eager:
            self._function = tf.function(
                self._run, reduce_retracing=True, autograph=not is_keras_3(model)
            )

    def __call__(self, data: Any) -> Outcome:
        result: Outcome = self._function(_without_optionals(data))
        self._has_run = True
        return result

    @property
    def may_fail_to_trace(self) -> bool:
        """Whether an error may come from tracing with probes, before anything of the step ran."""
        return not (self._has_run or self._eager or self._probes is None)

    def _run(self, data: Any) -> Any:
        if not self._eager:
            reseed(self._seed_offset)
        model = self._model
        strategy = model.distribute_strategy
        step = self._step
        if not self._eager and model.jit_compile:
            step = tf.function(
                step, jit_compile=True, reduce_retracing=True, autograph=not is_keras_3(model)
            )
        if self._probes is None:
            outputs, seen = strategy.run(step, args=(data,))
        else:
            with self._probes.installed(self._optimizers):
                outputs, seen = strategy.run(step, args=(data,))
        return self._reduced(outputs), self._local(seen)

    def _step(self, data: Any) -> Any:
        step = getattr(self._model, f"{self._kind}_step")
        if self._probes is None:
            outputs, seen = step(data), dict[str, Any]()
        else:
            outputs, seen = self._probes.watch(data, step)
        counter = getattr(self._model, _COUNTERS[self._kind], None)
        if counter is not None:
            counter.assign_add(1)
        return outputs, seen

    @unconverted
    def _reduced(self, outputs: Any) -> Any:
        strategy = self._model.distribute_strategy
        how = "concat"
        if self._kind != "predict":
            how = getattr(self._model, "distribute_reduction_method", None) or "auto"
        return self._reduce(outputs, strategy, reduction=how)

    @unconverted
    def _local(self, seen: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        strategy = self._model.distribute_strategy
        return {name: tuple(strategy.experimental_local_results(t)) for name, t in seen.items()}


def _reducer(model: Any) -> Callable[..., Any]:
    """Return Keras' own `reduce_per_replica`, from the module that defines `fit` of this model."""
    for kind in type(model).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "reduce_per_replica", None)
        if found is not None:
            return unconverted(cast("Callable[..., Any]", found))
    return lambda values, strategy, reduction: values


def _without_optionals(data: Any) -> Any:
    """Replace empty Optionals by None: a dataset returns a part of a batch that is None as one."""
    return tf.nest.map_structure(
        lambda item: None if isinstance(item, tf.experimental.Optional) else item, data
    )


# -- seeds ------------------------------------------------------------------------------------


@unconverted
def reseed(seed_offset: int) -> None:
    """Change the seed of the graph that is being traced, unless `seed_offset` is 0."""
    if seed_offset:
        graph = tf.compat.v1.get_default_graph()
        if graph.seed is None:  # operations may have seeds of their own
            graph.seed = random.SystemRandom().randrange(2**31)
        else:
            graph.seed = (graph.seed + seed_offset * 0x9E3779B1) % 2**31


def next_seed_offset(function: Any) -> int:
    """Return the seed offset of the function that Keras makes to replace `function`.

    It stays the same while `function` was never traced, and so never drew a number.
    """
    return next(_seed_offsets) if _is_traced(function) else getattr(function, _SEED_OFFSET, 0)


def set_seed_offset(function: Any, seed_offset: int) -> None:
    if seed_offset:
        setattr(function, _SEED_OFFSET, seed_offset)


def _is_traced(function: Any, depth: int = 3) -> bool:
    traces = getattr(function, "experimental_get_tracing_count", None)
    if traces is not None:
        return int(traces()) > 0
    # The function of Keras 3 is a closure over those that are traced.
    cells = (getattr(function, "__closure__", None) or ()) if depth else ()
    return any(_is_traced(cell.cell_contents, depth - 1) for cell in cells)
