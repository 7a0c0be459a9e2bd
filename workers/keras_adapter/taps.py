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

from smdist.errors import CaptureError
from smdist.format.dtypes import dtype_code
from smdist.planning import Planner
from smdist.workers import horovod_support as horovod
from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.keras_adapter.variable_names import Names, gradient_name
from smdist.workers.tf_adapter.tensor_access import flat_tensors, forms_beside, unconverted

__all__ = [
    "NOTHING",
    "Anywhere",
    "Taps",
    "Wants",
    "at_stage",
    "covers",
    "dense",
    "of_stage",
    "union",
    "wants_of",
]

_SYNCED = "synced:"  # before the name of a gradient, where both stages of it may be seen
_SCOPE = "smdist"  # of operations beside the model's, which keep their names
_MODEL = ("inputs", "labels", "predictions", "batch_loss")
_NUMBERS = range(16)  # how many tensors a layer gives is not known before it runs


class Wants(NamedTuple):
    inputs: frozenset[str]  # of layers
    outputs: frozenset[str]
    gradients: frozenset[str]  # of variables
    model: frozenset[str]
    synced: frozenset[str] = frozenset()  # gradients after their reduction


NOTHING = Wants(*[frozenset[str]()] * 4)


def union(wanted: Sequence[Wants]) -> Wants:
    return Wants(*(frozenset[str]().union(*parts) for parts in zip(*wanted, strict=True)))


def covers(told: Wants, asked: Wants) -> bool:
    return all(some <= of for some, of in zip(asked, told, strict=True))


def at_stage(wants: Wants, synced: bool) -> Wants:
    """The same, with the gradients of that stage."""
    return wants._replace(gradients=frozenset(), synced=wants.gradients) if synced else wants


def of_stage(seen: dict[str, Any], synced: bool) -> dict[str, Any]:
    """What taps saw, by the names that it is saved under, with the gradients of one stage."""
    found = {n: value for n, value in seen.items() if not n.startswith(_SYNCED)}
    if synced:
        rest = [n for n in seen if n not in found]
        found |= {n.removeprefix(_SYNCED): seen[n] for n in rest}
    return found


class _Scaled(NamedTuple):
    """A gradient that was multiplied with `scale`."""

    gradient: Any
    scale: Any

    @property
    def dtype(self) -> Any:
        return self.gradient.dtype


def dense(value: Any) -> Any:
    """The tensor that something seen stands for. To work it out costs time and memory."""
    if isinstance(value, _Scaled):
        gradient = tf.convert_to_tensor(value.gradient)
        return gradient / tf.cast(value.scale, gradient.dtype)
    return tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value


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
    def __init__(self, names: Names, wants: Wants, errors: ErrorPolicy | None) -> None:
        """`errors` are those of the hook that looks; none: nobody does any more."""
        self._names, self._wants, self.errors = names, wants, errors
        self._seeing = threading.local()  # replicas are traced on threads of their own
        self._applied = False  # was any gradient, by an optimizer that is looked at?

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
            for optimizer in optimizers:
                for target, method, around in self._on(optimizer):
                    stack.enter_context(_replaced(target, method, around))
            yield

    def _on(self, optimizer: Any) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """Where the gradients of `optimizer` are seen: as it is given them, and before that where it
        reduces them."""
        stages = [synced for synced in (False, True) if self._of(synced)]
        reducing = horovod.reducing(optimizer)
        if reducing is not None and False in stages:
            scaling = None if reducing is optimizer else optimizer
            yield reducing, "_allreduce", self._reduction(scaling)
            stages.remove(False)
        if stages:
            # In Keras 3 everything goes through `apply`.
            keras_3 = hasattr(optimizer, "apply") and hasattr(optimizer, "stateless_apply")
            method = "apply" if keras_3 else "apply_gradients"
            yield optimizer, method, self._optimizer(optimizer, stages)

    def _of(self, synced: bool) -> frozenset[str]:
        return self._wants.synced if synced else self._wants.gradients

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

    def _reduction(self, scaling: Any) -> Callable[[Any], Any]:
        """`scaling` has scaled the loss, if anybody has, and its gradients are still so."""

        def around(original: Any) -> Any:
            def allreduce(grads: Any, variables: Any) -> Any:
                grads, variables = list(grads), list(variables)
                pairs = list(zip(grads, variables, strict=False))
                self._note_gradients(lambda: getattr(scaling, "loss_scale", None), pairs, [False])
                return original(grads, variables)

            return allreduce

        return around

    def _optimizer(self, optimizer: Any, stages: list[bool]) -> Callable[[Any], Any]:
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

    # -- what they see ------------------------------------------------------------------------

    def watch(self, data: Any, step: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
        """Run `step(data)` in a replica: its result, and every tensor seen, by name."""
        self.begin(data)
        outputs = step(data)
        return outputs, _all_dense(self.end())

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
        """What was seen, by name; `dense` gives the tensors."""
        seen, self._seeing.tensors = self._seeing.tensors, None
        found = {}
        for base, (first, tensors) in seen.items():
            for index, tensor in enumerate(tensors):
                name = base if index == 0 and first == 1 else f"{base}_{index}"
                if self._storable(name, tensor):
                    found[name] = tensor
        for base in self._seeing.hidden.keys() - seen.keys():
            self._trouble(
                f"{base.removeprefix(_SYNCED)} is computed inside a function or loop of its own "
                "and cannot be seen"
            )
        self._seeing.hidden = self._seeing.graph = None
        self._check_applied()
        return found

    def _check_applied(self) -> None:
        if self._applied or not (self._wants.gradients or self._wants.synced):
            return
        model = self._names.model
        try:
            if model.trainable_variables:
                self._trouble(
                    f"in a step of {model.name} no gradient was seen: give the optimizers that its "
                    "train_step applies to hook.wrap_optimizer(...)"
                )
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._handle(error, "looking for gradients")

    def _trouble(self, message: str) -> None:
        if self.errors is not None:
            self.errors.warn_once(message)

    def _handle(self, error: Exception, doing: str) -> None:
        if self.errors is not None:
            self.errors.on_exception(error, doing)

    def _storable(self, name: str, tensor: Any) -> bool:
        try:
            dtype_code(tensor.dtype.as_numpy_dtype)
        except CaptureError:
            self._trouble(
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
            tensors = flat_tensors(value)
            for form in forms_beside(value):
                what = f"a part of {base}" if tensors else base
                self._trouble(f"{what} is left out: it is {form}")
            if not self._in_sight(base, tensors):
                return
            known = None if again else seen.get(base)
            if known is not None:
                known[1].extend(tensors)
            elif tensors:
                seen[base] = (len(tensors), tensors)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._handle(error, f"looking at {base}")

    def _in_sight(self, base: str, tensors: list[Any]) -> bool:
        graph = self._seeing.graph
        if all(getattr(tensor, "graph", None) is graph for tensor in tensors):
            return True
        # Also where Keras 2 runs a layer once more, to find out shapes.
        self._seeing.hidden[base] = True
        return False

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
    def _note_gradients(
        self, scale: Callable[[], Any], pairs: list[tuple[Any, Any]], stages: list[bool]
    ) -> None:
        """`scale`: what they were multiplied with, if with anything. `stages`: are they synced?"""
        seen = getattr(self._seeing, "tensors", None)
        if seen is None:
            return
        self._applied = True
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
            self._handle(error, "looking at gradients")

    def _note_gradient(
        self, seen: dict[str, Any], path: str, gradient: Any, factor: Any, synced: bool
    ) -> None:
        if path not in self._of(synced):
            return
        name = f"{_SYNCED}{gradient_name(path)}" if synced else gradient_name(path)
        if self._in_sight(name, [gradient]):
            seen[name] = (1, [gradient if factor is None else _Scaled(gradient, factor)])


@unconverted
def _all_dense(seen: dict[str, Any]) -> dict[str, Any]:
    return {name: dense(value) for name, value in seen.items()}


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
