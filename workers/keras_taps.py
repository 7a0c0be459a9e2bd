"""What a step of a Keras model computes on the way, caught while it is traced (or run eagerly).

Taps hang on the instances (layers, model, optimizer) only for as long as one step is being traced
or run. What they see of a traced step are symbolic tensors, which the traced function returns
beside its own result: nothing is copied inside the graph, and a function that was traced without
taps is not slowed down by them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from smdist.codec import dtype_code
from smdist.errors import CaptureError
from smdist.planning import Planner
from smdist.workers import horovod
from smdist.workers.keras_names import Names, gradient_name
from smdist.workers.mishaps import Mishaps
from smdist.workers.tf_host import flat_tensors, unconverted

__all__ = ["NOTHING", "Anywhere", "Taps", "Wants", "union", "wants_of"]

_MODEL = ("inputs", "labels", "predictions", "batch_loss")
_NUMBERS = range(16)  # how many tensors a layer gives is not known before it runs


class Wants(NamedTuple):
    inputs: frozenset[str]  # of layers
    outputs: frozenset[str]
    gradients: frozenset[str]  # of variables
    model: frozenset[str]


NOTHING = Wants(*[frozenset[str]()] * 4)


def union(wanted: Sequence[Wants]) -> Wants:
    return Wants(*(frozenset[str]().union(*parts) for parts in zip(*wanted, strict=True)))


class _Wanting(Protocol):
    def wants(self, name: str) -> object | None: ...


def wants_of(plan: _Wanting, names: Names) -> Wants:
    def wanted(name: str) -> bool:
        return plan.wants(name) is not None or any(
            plan.wants(f"{name}_{number}") is not None for number in _NUMBERS
        )

    return Wants(
        frozenset(path for path in names.layers if wanted(f"{path}/inputs")),
        frozenset(path for path in names.layers if wanted(f"{path}/outputs")),
        # Of frozen ones too: which are trained is settled when a step is traced, not before.
        frozenset(v.path for v in names.variables if plan.wants(gradient_name(v.path)) is not None),
        frozenset(name for name in _MODEL if wanted(name)),
    )


class Anywhere:
    """Stands for a step on which everything is due."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def wants(self, name: str) -> object | None:
        return name if self._planner.wanted_anywhere(name) else None


class Taps:
    def __init__(self, names: Names, wants: Wants, mishaps: Mishaps, synced: bool = False) -> None:
        """`synced`: gradients after their reduction, of optimizers that reduce them in sight."""
        self._names, self._wants, self._mishaps = names, wants, mishaps
        self._synced = synced
        self._seeing = threading.local()  # replicas are traced on threads of their own

    # -- on the instances ---------------------------------------------------------------------

    @contextmanager
    def installed(self, optimizers: list[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            wants, layers = self._wants, self._names.layers
            for path in wants.inputs | wants.outputs:
                stack.enter_context(_replaced(layers[path], "call", self._layer(path)))
            model = self._names.model
            if wants.model & {"inputs", "predictions"}:
                stack.enter_context(_replaced(model, "call", self._root))
            if "batch_loss" in wants.model:
                stack.enter_context(_replaced(model, "compute_loss", self._loss))
            if wants.gradients:
                for optimizer in optimizers:
                    method, around = self._gradients_of(optimizer)
                    stack.enter_context(_replaced(optimizer, method, around))
            yield

    def _gradients_of(self, optimizer: Any) -> tuple[str, Callable[[Any], Any]]:
        if horovod.reduces(optimizer) and not self._synced:
            return "_allreduce", self._reduction
        # In Keras 3 everything goes through `apply`.
        keras_3 = hasattr(optimizer, "apply") and hasattr(optimizer, "stateless_apply")
        return "apply" if keras_3 else "apply_gradients", self._optimizer(optimizer)

    def _layer(self, path: str) -> Callable[[Any], Any]:
        def around(original: Any) -> Any:
            # Keras 2 converts the code of a layer's `call`, and through it that of the original.
            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                self._note_layer(path, args, kwargs, result)
                return result

            return call

        return around

    def _root(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._note_root(args, kwargs, result)
            return result

        return call

    def _loss(self, original: Any) -> Any:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._note("batch_loss", result)
            return result

        return compute_loss

    def _reduction(self, original: Any) -> Any:
        def allreduce(grads: Any, variables: Any) -> Any:
            grads, variables = list(grads), list(variables)
            self._note_gradients(None, list(zip(grads, variables, strict=False)))
            return original(grads, variables)

        return allreduce

    def _optimizer(self, optimizer: Any) -> Callable[[Any], Any]:
        def around(original: Any) -> Any:
            def apply(grads: Any, trainable_variables: Any = None, **kwargs: Any) -> Any:
                grads = list(grads)
                variables = trainable_variables
                if variables is None:
                    variables = optimizer._trainable_variables
                self._note_gradients(optimizer, list(zip(grads, variables, strict=False)))
                return original(grads, trainable_variables, **kwargs)

            def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
                grads_and_vars = list(grads_and_vars)
                self._note_gradients(None, grads_and_vars)
                return original(grads_and_vars, *args, **kwargs)

            return apply if original.__name__ == "apply" else apply_gradients

        return around

    # -- what they see ------------------------------------------------------------------------

    def watch(self, data: Any, step: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
        """Run `step(data)` in a replica: its result, and every tensor seen, by name."""
        self.begin(data)
        outputs = step(data)
        return outputs, self.end()

    @unconverted
    def begin(self, data: Any) -> None:
        self._seeing.tensors, self._seeing.hidden = {}, {}
        self._seeing.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if not self._wants.model:
            return
        parts = data if isinstance(data, tuple) else (data,)
        for name, part in zip(("inputs", "labels"), parts, strict=False):
            if name in self._wants.model:
                self._note(name, part)

    @unconverted
    def end(self) -> dict[str, Any]:
        seen, self._seeing.tensors = self._seeing.tensors, None
        found = {}
        for base, (first, tensors) in seen.items():
            for index, tensor in enumerate(tensors):
                name = base if index == 0 and first == 1 else f"{base}_{index}"
                if self._storable(name, tensor):
                    found[name] = tensor
        for base in self._seeing.hidden.keys() - seen.keys():
            self._mishaps.trouble(
                f"{base} is computed inside a function or loop of its own and cannot be seen"
            )
        self._seeing.hidden = self._seeing.graph = None
        return found

    def _storable(self, name: str, tensor: Any) -> bool:
        try:
            dtype_code(tensor.dtype.as_numpy_dtype)
        except CaptureError:
            self._mishaps.trouble(
                f"{name} is left out: its elements are of type {tensor.dtype.name}, "
                "which cannot be stored"
            )
            return False
        return True

    @unconverted
    def _note(self, base: str, value: Any, again: bool = False) -> None:
        """`again`: what was seen before is not it."""
        seen = getattr(self._seeing, "tensors", None)
        if seen is None:
            return
        try:
            tensors = [
                tf.convert_to_tensor(t) if isinstance(t, tf.IndexedSlices) else t
                for t in flat_tensors(value)
            ]
            graph = self._seeing.graph
            if any(getattr(t, "graph", None) is not graph for t in tensors):
                # Also where Keras 2 runs a layer once more, to find out shapes.
                self._seeing.hidden[base] = True
                return
            known = None if again else seen.get(base)
            if known is not None:
                known[1].extend(tensors)
            elif tensors:
                seen[base] = (len(tensors), tensors)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, f"looking at {base}")

    @unconverted
    def _note_layer(self, path: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if path in self._wants.inputs:
            named = {k: v for k, v in kwargs.items() if k not in ("training", "mask")}
            self._note(f"{path}/inputs", [list(args), named])
        if path in self._wants.outputs:
            self._note(f"{path}/outputs", result)

    @unconverted
    def _note_root(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        seen = getattr(self._seeing, "tensors", None) or {}
        if "inputs" in self._wants.model and "inputs" not in seen:  # no batch told them
            named = {k: v for k, v in kwargs.items() if k not in ("training", "mask")}
            self._note("inputs", [list(args), named])
        if "predictions" in self._wants.model:
            self._note("predictions", result, again=True)

    @unconverted
    def _note_gradients(self, scaling: Any, pairs: list[tuple[Any, Any]]) -> None:
        scale = _loss_scale(scaling)
        for gradient, variable in pairs:
            path = self._names.path_of(variable)
            if gradient is None or path not in self._wants.gradients:
                continue
            if scale is not None:
                dense = tf.convert_to_tensor(gradient)
                gradient = dense / tf.cast(tf.convert_to_tensor(scale), dense.dtype)
            self._note(gradient_name(path), gradient, again=True)


def _loss_scale(optimizer: Any) -> Any:
    """What the loss of this step was multiplied with, if anything."""
    initial = getattr(optimizer, "initial_scale", None)
    if initial is not None and not getattr(optimizer, "built", True):
        return initial  # its variable comes with the first update
    return getattr(optimizer, "dynamic_scale", None)


@contextmanager
def _replaced(target: Any, method: str, around: Callable[[Any], Any]) -> Iterator[None]:
    """`target.method` is `around(target.method)` for a while, on this instance alone."""
    own = vars(target)
    before = own.get(method)
    own[method] = around(getattr(target, method))
    try:
        yield
    finally:
        if before is None:
            own.pop(method, None)
        else:
            own[method] = before
