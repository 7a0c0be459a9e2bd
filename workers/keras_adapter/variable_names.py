"""Names of the layers, variables and optimizer variables of a Keras model.

A name is the place in the model. The names that Keras gives differ between its versions.

    dense                              a layer; one inside another: block/dense
    dense/kernel                       the path of a variable: its layer, and its own last name
    dense/weights/dense/kernel:0       its value (the outermost layer comes first)
    gradients/dense/kernelGrad         its gradient
    optimizer/dense/kernel/momentums   a variable that the optimizer keeps for it
    optimizer/iterations               another variable of the optimizer

Used by `KerasRecording` and `TapeLoops` on the training thread. Nothing is written to the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import tensorflow as tf

from smdist.workers.tf_adapter.tensor_access import is_variable, tf_variable

__all__ = [
    "LooseNames",
    "NamedVariable",
    "VariableNames",
    "all_optimizers",
    "gradient_name",
    "unique",
    "weight_name",
]

_NOT_SLOTS = ("_variables", "variables", "_trainable_variables")


class NamedVariable(NamedTuple):
    name: str  # its value is saved under it
    path: str
    variable: Any


def gradient_name(path: str) -> str:
    return f"gradients/{path}Grad"


def weight_name(path: str) -> str:
    return f"{path.partition('/')[0]}/weights/{path}:0"


class VariableNames:
    """The names of one model at the time this was made; `current` checks whether they still hold."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.checked_at: int | None = None  # the step at which `current` was last checked
        self.layers: dict[str, Any] = {}
        self.variables: list[NamedVariable] = []
        self._paths: dict[int, str] = {}
        self._layer_paths: dict[int, str] = {}
        self._walk(model, "")
        self._ids = self._key()

    @property
    def current(self) -> bool:
        return self._ids == self._key()

    def _key(self) -> tuple[tuple[int, ...], int]:
        return tuple(map(id, self.model.weights)), len(self._layers_of(self.model))

    def path_of(self, variable: Any) -> str | None:
        return self._paths.get(id(variable)) or self._paths.get(id(tf_variable(variable)))

    def layer_path(self, layer: Any) -> str | None:
        return self._layer_paths.get(id(layer))

    # -- the model ----------------------------------------------------------------------------

    def _walk(self, layer: Any, path: str) -> None:
        taken: set[str] = set()
        for child in self._layers_of(layer):
            if id(child) in self._layer_paths or child is self.model:
                continue
            name = unique(child.name, taken)
            child_path = f"{path}/{name}" if path else name
            self._layer_paths[id(child)] = child_path
            self.layers[child_path] = child
            self._walk(child, child_path)
        taken.clear()
        for variable in layer.weights:
            if id(variable) not in self._paths:
                leaf = unique(_own_name(variable), taken)
                self._add(variable, f"{path or layer.name}/{leaf}")

    def _add(self, variable: Any, path: str) -> None:
        self._paths[id(variable)] = self._paths[id(tf_variable(variable))] = path
        self.variables.append(NamedVariable(weight_name(path), path, variable))

    @staticmethod
    def _layers_of(layer: Any) -> list[Any]:
        # In Keras 2 metrics are layers too.
        kinds = tf.keras.layers.Layer, tf.keras.metrics.Metric
        found = layer._flatten_layers(recursive=False, include_self=False)
        return [
            child
            for child in found
            if isinstance(child, kinds[0]) and not isinstance(child, kinds[1])
        ]

    # -- optimizers ---------------------------------------------------------------------------

    def variables_of(self, optimizers: Iterable[Any]) -> list[NamedVariable]:
        """Return the variables of those optimizers that train this model.

        A name that two optimizers use gets a number for the second one.
        """
        taken: set[str] = set()
        return [
            named._replace(name=unique(named.name, taken))
            for optimizer in optimizers
            if self._trains_this_model(optimizer)
            for named in self.optimizer_variables(optimizer)
        ]

    def _trains_this_model(self, optimizer: Any) -> bool:
        trained = self._trained_by(getattr(optimizer, "inner_optimizer", None) or optimizer)
        return not trained or any(self.path_of(variable) is not None for variable in trained)

    def optimizer_variables(self, optimizer: Any) -> list[NamedVariable]:
        inner = getattr(optimizer, "inner_optimizer", None)
        optimizer = optimizer if inner is None else inner
        found: dict[int, NamedVariable] = {}
        for path, slot, variable in self._slots(optimizer):
            name = f"optimizer/{path}/{slot}"
            found[id(variable)] = NamedVariable(name, name, variable)
        for key in ("iterations", "learning_rate"):
            variable = getattr(optimizer, f"_{key}", None)
            if is_variable(variable):
                found.setdefault(id(variable), NamedVariable(f"optimizer/{key}", key, variable))
        taken = {named.name for named in found.values()}
        for variable in _all_variables(optimizer):
            if id(variable) not in found and self.path_of(variable) is None:
                name = unique(f"optimizer/{_own_name(variable)}", taken)
                found[id(variable)] = NamedVariable(name, name, variable)
        return list(found.values())

    def _slots(self, optimizer: Any) -> Iterator[tuple[str, str, Any]]:
        if hasattr(optimizer, "get_slot_names"):  # optimizers of before Keras 2.11
            for slot in optimizer.get_slot_names():
                for named in self.variables:
                    # A variable that was never trained has no slot; `trainable` does not show that.
                    with suppress(KeyError):
                        yield named.path, slot, optimizer.get_slot(named.variable, slot)
            return
        trained = self._trained_by(optimizer) or self.model.trainable_variables
        for attribute, value in vars(optimizer).items():
            if attribute in _NOT_SLOTS or not isinstance(value, (list, tuple)):
                continue
            if len(value) != len(trained):
                continue
            for variable, owner in zip(value, trained, strict=True):
                path = self.path_of(owner)
                if path is not None and is_variable(variable) and variable is not owner:
                    yield path, attribute.strip("_"), variable

    def _trained_by(self, optimizer: Any) -> list[Any]:
        """Return the variables that `optimizer` trains, in the order of its slots.

        They may be a part of the model only. Before the first update there are none.
        """
        trained = getattr(optimizer, "_trainable_variables", None)
        if trained:
            return list(trained)
        places = getattr(optimizer, "_index_dict", None) or {}  # the only source in Keras 2
        keys = (
            {optimizer._var_key(v.variable): v.variable for v in self.variables} if places else {}
        )
        return [keys.get(key) for key in sorted(places, key=places.__getitem__)]


class LooseNames:
    """Paths of variables of models that are not registered.

    A path is the layer and the variable's name, or the full name where that is ambiguous, or the
    full name with a number where even that is. A path that was given once stays.
    """

    def __init__(self) -> None:
        self.numbered: list[str] = []
        self._known: dict[
            int, tuple[Any, str]
        ] = {}  # by `id`, which stays unique while the variable is held
        self._taken: set[str] = set()

    def paths(self, variables: Iterable[Any], taken: Iterable[str] = ()) -> list[str]:
        """Return a path for each of `variables`; none of `taken`."""
        variables = list(variables)
        self._taken.update(taken)
        fresh = list({id(v): v for v in variables if id(v) not in self._known}.values())
        paths = [str(getattr(v, "path", v.name)).partition(":")[0] for v in fresh]
        short = ["/".join(path.split("/")[-2:]) for path in paths]
        times = Counter(short)
        for variable, path, brief in zip(fresh, paths, short, strict=True):
            clear = times[brief] == 1 and brief not in self._taken
            asked = brief if clear else path
            found = unique(asked, self._taken)
            if found != asked:
                self.numbered.append(found)
            self._known[id(variable)] = variable, found
        return [self._known[id(variable)][1] for variable in variables]


def all_optimizers(model: Any, wrapped: Iterable[Any]) -> list[Any]:
    """Return the optimizer of `model`, first so that it keeps its names, and the wrapped ones."""
    found = [getattr(model, "optimizer", None), *wrapped]
    return list({id(o): o for o in found if o is not None}.values())


def _all_variables(optimizer: Any) -> list[Any]:
    variables = optimizer.variables
    if callable(variables) and not isinstance(variables, list):
        variables = variables()
    return [variable for variable in variables if is_variable(variable)]


def _own_name(variable: Any) -> str:
    return str(variable.name).split("/")[-1].partition(":")[0]


def unique(name: str, taken: set[str]) -> str:
    """Return `name`, with a number if it is in `taken`, and add it to `taken`."""
    found, count = name, 0
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found
