"""Collections of TensorFlow tensors, to which a script adds layers, variables and tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdist.config.collection import Collection
from smdist.errors import ConfigurationError
from smdist.workers.tf_adapter.tensor_access import is_layer, is_variable

__all__ = ["TensorFlowCollection"]


class TensorFlowCollection(Collection):
    """A collection that also takes variables, tensors and layers of TensorFlow."""

    def add(self, arg: Any) -> None:
        """Add a variable, a tensor, the outputs of an operation, or a list or set of those.

        A variable of a Keras model gets its name when the hook sees the model. A tensor of a graph
        has its name already. A tensor that a Keras model was built with means the outputs of its
        layer. Raise ConfigurationError for anything else.
        """
        if isinstance(arg, (list, tuple, set, frozenset)):
            for item in arg:
                self.add(item)
        elif is_variable(arg):
            self.request(arg, inputs=False, outputs=True)
            if not tf.executing_eagerly():
                self.add_tensor_name(arg.name)
        elif isinstance(arg, tf.Operation):
            for tensor in arg.outputs:
                self.add_tensor_name(tensor.name)
        elif hasattr(arg, "_keras_history"):
            layer = arg._keras_history[0]
            self.request(layer, inputs=False, outputs=True)
        elif isinstance(arg, tf.Tensor) and not hasattr(arg, "numpy"):
            self.add_tensor_name(arg.name)
        else:
            raise ConfigurationError(
                f"collection {self.name!r}: a {type(arg).__name__} has no name to be found by. Add a "
                "variable, a tensor of a graph or an operation, or call hook.save_tensor()"
            )

    def add_keras_layer(self, layer: Any, inputs: bool = False, outputs: bool = True) -> None:
        """Add the inputs and/or the outputs of a Keras layer to this collection."""
        if not is_layer(layer):
            raise ConfigurationError(
                f"collection {self.name!r}: add_keras_layer takes a layer, not {layer!r}; "
                "model.get_layer(name) gives one"
            )
        self.request(layer, inputs, outputs)
