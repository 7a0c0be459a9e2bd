"""Probes on the layers, the model and the optimizers of one step.

Probes replace methods of single instances, and only while one step is traced or run eagerly. What
they see of a traced step are symbolic tensors. The traced function returns them beside its own
result, so nothing is copied inside the graph. A function that was traced without probes is not
slowed down.

Order of calls, on the training thread or on the thread of a replica that is traced:

    with probes.installed(optimizers):
        probes.watch(data, step)        or begin(data), the step itself, end()

An error of a probe goes to the error policy of the hook and never reaches the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from smdist.errors import CaptureError
from smdist.format.dtypes import dtype_code
from smdist.workers import horovod_support as horovod
from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.keras_adapter.capture_set import SYNCED_PREFIX, CaptureSet
from smdist.workers.keras_adapter.variable_names import VariableNames, gradient_name
from smdist.workers.tf_adapter.tensor_access import flat_tensors, non_dense_forms, unconverted

__all__ = ["StepProbes", "dense"]

_Around = Callable[[Any], Any]  # takes the original method, returns its replacement

_SCOPE = "smdist"  # of added operations, so that those of the model keep their names


class _ScaledGradient(NamedTuple):
    """A gradient that was multiplied by `scale`."""

    gradient: Any
    scale: Any

    @property
    def dtype(self) -> Any:
        return self.gradient.dtype


def dense(value: Any) -> Any:
    """Compute the dense, unscaled tensor of something that a probe saw."""
    if isinstance(value, _ScaledGradient):
        gradient = tf.convert_to_tensor(value.gradient)
        return gradient / tf.cast(value.scale, gradient.dtype)
    return tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value


class StepProbes:
    """The probes for one set of wanted tensors of one model."""

    def __init__(self, names: VariableNames, wanted: CaptureSet, errors: ErrorPolicy) -> None:
        self._names, self._wanted, self._errors = names, wanted, errors
        self._step = threading.local()  # replicas are traced on threads of their own
        self._gradients_seen = False

    # -- installing ---------------------------------------------------------------------------

    @contextmanager
    def installed(self, optimizers: list[Any]) -> Iterator[None]:
        """Replace methods of the model, its layers and `optimizers` while the context is open."""
        wanted, model = self._wanted, self._names.model
        with ExitStack() as stack:

            def replace(target: Any, method: str, around: _Around) -> None:
                stack.enter_context(_replaced_method(target, method, around))

            for path in wanted.inputs | wanted.outputs:
                layer = self._names.layers[path]
                replace(layer, "call", _observed(partial(self._note_layer, path)))
            if wanted.model & {"inputs", "predictions"}:
                replace(model, "call", _observed(self._note_model))
            if "batch_loss" in wanted.model:
                replace(model, "compute_loss", _observed(self._note_loss))
            for optimizer in optimizers:
                for target, method, around in self._gradient_probes(optimizer):
                    replace(target, method, around)
            yield

    def _gradient_probes(self, optimizer: Any) -> Iterator[tuple[Any, str, _Around]]:
        """Yield the methods through which the wanted gradients of `optimizer` pass.

        Local gradients that Horovod reduces are seen before the reduction, all others when the
        optimizer applies them.
        """
        stages = [synced for synced in (False, True) if self._gradients_of(synced)]
        reducing = horovod.reducing(optimizer)
        if reducing is not None and False in stages:
            scaling = None if reducing is optimizer else optimizer
            yield reducing, "_allreduce", self._around_allreduce(scaling)
            stages.remove(False)
        if stages:
            # In Keras 3 everything goes through `apply`.
            keras_3 = hasattr(optimizer, "apply") and hasattr(optimizer, "stateless_apply")
            method = "apply" if keras_3 else "apply_gradients"
            yield optimizer, method, self._around_apply(optimizer, stages)

    def _gradients_of(self, synced: bool) -> frozenset[str]:
        return self._wanted.synced if synced else self._wanted.gradients

    def _around_allreduce(self, scaling: Any) -> _Around:
        """Wrap the reduction of gradients that are still scaled if `scaling` scaled the loss."""

        def around(original: Any) -> Any:
            def allreduce(grads: Any, variables: Any) -> Any:
                grads, variables = list(grads), list(variables)
                pairs = list(zip(grads, variables, strict=False))
                self._note_gradients(lambda: getattr(scaling, "loss_scale", None), pairs, [False])
                return original(grads, variables)

            return allreduce

        return around

    def _around_apply(self, optimizer: Any, stages: list[bool]) -> _Around:
        def around(original: Any) -> Any:
            def apply(grads: Any, trainable_variables: Any = None, **kwargs: Any) -> Any:
                grads = list(grads)
                variables = trainable_variables
                if variables is None:
                    variables = optimizer._trainable_variables
                pairs = list(zip(grads, variables, strict=False))
                self._note_gradients(lambda: _loss_scale(optimizer), pairs, stages)
                return original(grads, trainable_variables, **kwargs)

            def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
                grads_and_vars = list(grads_and_vars)
                self._note_gradients(lambda: None, grads_and_vars, stages)
                return original(grads_and_vars, *args, **kwargs)

            return apply if original.__name__ == "apply" else apply_gradients

        return around

    # -- one step -----------------------------------------------------------------------------

    def watch(self, data: Any, step: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
        """Run `step(data)` in one replica. Return its result and every tensor seen, by name."""
        self.begin(data)
        outputs = step(data)
        return outputs, _dense_values(self.end())

    @unconverted
    def begin(self, data: Any) -> None:
        """Start collecting on this thread; `data` is the batch, None where it is not known."""
        self._step.tensors, self._step.unreachable = {}, set()
        self._step.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if not self._wanted.model:
            return
        parts = data if isinstance(data, tuple) else (data,)
        for name, part in zip(("inputs", "labels"), parts, strict=False):
            if name in self._wanted.model:
                self._note(name, part)

    @unconverted
    def end(self) -> dict[str, Any]:
        """Stop collecting. Return what was seen, by name; `dense` computes each tensor."""
        seen, self._step.tensors = self._step.tensors, None
        found = {}
        for base, (first, tensors) in seen.items():
            for index, tensor in enumerate(tensors):
                name = base if index == 0 and first == 1 else f"{base}_{index}"
                if self._storable(name, tensor):
                    found[name] = tensor
        for base in self._step.unreachable - seen.keys():
            self._errors.warn_once(
                f"{base.removeprefix(SYNCED_PREFIX)} is not captured: it is computed inside a "
                "tf.function or loop of its own"
            )
        self._step.unreachable = self._step.graph = None
        self._warn_without_gradients()
        return found

    def _warn_without_gradients(self) -> None:
        if self._gradients_seen or not (self._wanted.gradients or self._wanted.synced):
            return
        model = self._names.model
        try:
            if model.trainable_variables:
                self._errors.warn_once(
                    f"no gradient was seen in a step of {model.name}: pass the optimizers that its "
                    "train_step applies to hook.wrap_optimizer(...)"
                )
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "looking for gradients")

    def _storable(self, name: str, tensor: Any) -> bool:
        try:
            dtype_code(tensor.dtype.as_numpy_dtype)
        except CaptureError:
            self._errors.warn_once(
                f"{name} is left out: elements of type {tensor.dtype.name} cannot be stored"
            )
            return False
        return True

    # -- observations -------------------------------------------------------------------------

    @unconverted
    def _note(self, base: str, value: Any, replace: bool = False) -> None:
        """Collect the dense tensors of `value` under `base`, after or instead of earlier ones."""
        seen = getattr(self._step, "tensors", None)
        if seen is None:
            return
        try:
            tensors = flat_tensors(value)
            for form in non_dense_forms(value):
                what = f"a part of {base}" if tensors else base
                self._errors.warn_once(f"{what} is left out: it is {form}")
            if not self._is_reachable(base, tensors):
                return
            known = None if replace else seen.get(base)
            if known is not None:
                known[1].extend(tensors)
            elif tensors:
                seen[base] = (len(tensors), tensors)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, f"looking at {base}")

    def _is_reachable(self, base: str, tensors: list[Any]) -> bool:
        """Check that `tensors` are in the graph of the step, and remember `base` if not."""
        graph = self._step.graph
        if all(getattr(tensor, "graph", None) is graph for tensor in tensors):
            return True
        # Keras 2 may run a layer once more in another graph, to find out shapes.
        self._step.unreachable.add(base)
        return False

    @unconverted
    def _note_layer(self, path: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if path in self._wanted.inputs:
            self._note(f"{path}/inputs", _inputs(args, kwargs))
        if path in self._wanted.outputs:
            self._note(f"{path}/outputs", result)

    @unconverted
    def _note_model(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        seen = getattr(self._step, "tensors", None) or {}
        if "inputs" in self._wanted.model and "inputs" not in seen:  # the batch was not known
            self._note("inputs", _inputs(args, kwargs))
        if "predictions" in self._wanted.model:
            self._note("predictions", result, replace=True)

    @unconverted
    def _note_loss(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        self._note("batch_loss", result)

    @unconverted
    def _note_gradients(
        self, scale: Callable[[], Any], pairs: list[tuple[Any, Any]], stages: list[bool]
    ) -> None:
        """Collect gradients for each of `stages` (True: synced).

        `scale` returns the factor of the loss, or None.
        """
        seen = getattr(self._step, "tensors", None)
        if seen is None:
            return
        self._gradients_seen = True
        try:
            with tf.name_scope(_SCOPE):
                factor = scale()
                factor = None if factor is None else tf.convert_to_tensor(factor)
            for gradient, variable in pairs:
                path = self._names.path_of(variable)
                if gradient is not None and path is not None:
                    for synced in stages:
                        self._note_gradient(seen, path, gradient, factor, synced)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, "looking at gradients")

    def _note_gradient(
        self, seen: dict[str, Any], path: str, gradient: Any, factor: Any, synced: bool
    ) -> None:
        if path not in self._gradients_of(synced):
            return
        name = f"{SYNCED_PREFIX}{gradient_name(path)}" if synced else gradient_name(path)
        if self._is_reachable(name, [gradient]):
            seen[name] = (1, [gradient if factor is None else _ScaledGradient(gradient, factor)])


@unconverted
def _dense_values(seen: dict[str, Any]) -> dict[str, Any]:
    return {name: dense(value) for name, value in seen.items()}


def _inputs(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    return [list(args), {k: v for k, v in kwargs.items() if k not in ("training", "mask")}]


def _loss_scale(optimizer: Any) -> Any:
    """Return the factor of the loss in this step, None if it is not scaled."""
    initial = getattr(optimizer, "initial_scale", None)
    if initial is not None and not getattr(optimizer, "built", True):
        return initial  # its variable is made by the first update
    return getattr(optimizer, "dynamic_scale", None)


def _observed(note: Callable[[Any, dict[str, Any], Any], None]) -> _Around:
    """Return a wrapper that passes arguments and result of each call to `note`."""

    def around(original: Any) -> Any:
        # Keras 2 converts the code of a layer's `call`, and through it that of the original.
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            note(args, kwargs, result)
            return result

        return call

    return around


@contextmanager
def _replaced_method(target: Any, method: str, around: _Around) -> Iterator[None]:
    """Replace `target.method` by `around(target.method)`, on this instance only."""
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
