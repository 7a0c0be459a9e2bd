"""What layers, variables and optimizer variables of a Keras model are called.

By their place in the model, not by what Keras calls them, which differs between its versions:

    dense                              a layer; one inside another: block/dense
    dense/kernel                       a variable: its layer, and the last part of its own name
    dense/weights/dense/kernel:0       its value (the first layer on the way to it comes first)
    gradients/dense/kernelGrad         its gradient
    optimizer/dense/kernel/momentums   what the optimizer keeps for it
    optimizer/iterations               what the optimizer keeps besides
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
    "Names",
    "all_optimizers",
    "gradient_name",
    "unique",
    "weight_name",
]

_NOT_SLOTS = ("_variables", "variables", "_trainable_variables")


class NamedVariable(NamedTuple):
    name: str  # of its value
    path: str
    variable: Any


def gradient_name(path: str) -> str:
    return f"gradients/{path}Grad"


def weight_name(path: str) -> str:
    return f"{path.partition('/')[0]}/weights/{path}:0"


class Names:
    """Of one model, as it is now. `current` tells whether it still is so."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.checked_at: int | None = None  # the step at which it was last found current
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
                leaf = unique(_leaf(variable), taken)
                self._add(variable, f"{path or layer.name}/{leaf}")

    def _add(self, variable: Any, path: str) -> None:
        self._paths[id(variable)] = self._paths[id(tf_variable(variable))] = path
        self.variables.append(NamedVariable(weight_name(path), path, variable))

    @staticmethod
    def _layers_of(layer: Any) -> list[Any]:
        """In Keras 2 metrics are layers too."""
        kinds = tf.keras.layers.Layer, tf.keras.metrics.Metric
        found = layer._flatten_layers(recursive=False, include_self=False)
        return [
            child
            for child in found
            if isinstance(child, kinds[0]) and not isinstance(child, kinds[1])
        ]

    # -- its optimizers -----------------------------------------------------------------------

    def variables_of(self, optimizers: Iterable[Any]) -> list[NamedVariable]:
        """What they keep, but for those that train other models; of a second one numbered where the
        name is taken."""
        taken: set[str] = set()
        return [
            named._replace(name=unique(named.name, taken))
            for optimizer in optimizers
            if self._concerns(optimizer)
            for named in self.optimizer_variables(optimizer)
        ]

    def _concerns(self, optimizer: Any) -> bool:
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
        for variable in _all_of(optimizer):
            if id(variable) not in found and self.path_of(variable) is None:
                name = unique(f"optimizer/{_leaf(variable)}", taken)
                found[id(variable)] = NamedVariable(name, name, variable)
        return list(found.values())

    def _slots(self, optimizer: Any) -> Iterator[tuple[str, str, Any]]:
        if hasattr(optimizer, "get_slot_names"):  # optimizers of before Keras 2.11
            for slot in optimizer.get_slot_names():
                for named in self.variables:
                    # There is none for what was never trained, which `trainable` does not tell.
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
        """In the order of its slots; nothing before its first update. It may be a part of the model."""
        trained = getattr(optimizer, "_trainable_variables", None)
        if trained:
            return list(trained)
        places = getattr(optimizer, "_index_dict", None) or {}  # all that one of Keras 2 tells
        keys = (
            {optimizer._var_key(v.variable): v.variable for v in self.variables} if places else {}
        )
        return [keys.get(key) for key in sorted(places, key=places.__getitem__)]


class LooseNames:
    """Paths of variables whose model nobody knows: layer and name; all of it where that is not
    enough to tell them apart; with a number where even that is the same. A name that was given
    stays."""

    def __init__(self) -> None:
        self.numbered: list[str] = []
        self._known: dict[int, tuple[Any, str]] = {}  # by `id`, which is its own while it is held
        self._taken: set[str] = set()

    def paths(self, variables: Iterable[Any], taken: Iterable[str] = ()) -> list[str]:
        """Of each of them. Names in `taken` belong to others."""
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
    """The model's own comes first: it keeps its names, whatever is wrapped besides."""
    found = [getattr(model, "optimizer", None), *wrapped]
    return list({id(o): o for o in found if o is not None}.values())


def _all_of(optimizer: Any) -> list[Any]:
    variables = optimizer.variables
    if callable(variables) and not isinstance(variables, list):
        variables = variables()
    return [variable for variable in variables if is_variable(variable)]


def _leaf(variable: Any) -> str:
    return str(variable.name).split("/")[-1].partition(":")[0]


def unique(name: str, taken: set[str]) -> str:
    """`name`, with a number if it is taken; it is from now on."""
    found, count = name, 0
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found
