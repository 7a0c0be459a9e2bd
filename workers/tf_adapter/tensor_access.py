"""Read TensorFlow tensors and variables as numpy arrays, without a copy if they are in host memory.

The capture then treats them as arrays (`NumpyAccess`). Called on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from smdist.errors import CaptureError
from smdist.format.dtypes import dtype_code
from smdist.workers.capture.tensor_access import NumpyAccess, to_little_endian
from smdist.workers.hook.user_values import TensorAdapter

__all__ = [
    "Array",
    "array_of",
    "flat_tensors",
    "is_layer",
    "is_variable",
    "non_dense_forms",
    "tensor_adapter",
    "tf_variable",
    "unconverted",
]

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

# A decorator: Keras 2 must not rewrite this code along with the model's.
unconverted = cast("Callable[[F], F]", tf.autograph.experimental.do_not_convert)


def array_of(value: Any) -> Array:
    """Return the elements of a tensor, variable or array.

    The array is valid until the next step and must not be written to. Raise CaptureError if the
    value has no elements here.
    """
    if is_variable(value):
        value = tf_variable(value).value()
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    view = getattr(value, "_numpy", None)  # `numpy()` would copy
    array: Array
    if view is not None:
        try:
            array = np.asarray(view())
        except (RuntimeError, TypeError, ValueError) as error:
            raise CaptureError(f"{type(value).__name__} has no values here: {error}") from error
    else:
        array = np.asarray(value)
    return to_little_endian(array)


def is_layer(value: Any) -> bool:
    """Check whether `value` is a layer or model of Keras, or looks like one."""
    return not isinstance(value, type) and hasattr(value, "call") and hasattr(value, "name")


def is_variable(value: Any) -> bool:
    return isinstance(value, (tf.Variable, tf.keras.Variable if _KERAS_3 else tf.Variable))


def tf_variable(variable: Any) -> Any:
    """Return the TensorFlow variable behind a variable of Keras 3; others as they are."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def flat_tensors(structure: Any) -> list[Any]:
    """Return every dense tensor in a nest, in its order."""
    kinds = (tf.Tensor, tf.IndexedSlices)
    return [leaf for leaf in tf.nest.flatten(structure) if isinstance(leaf, kinds)]


def non_dense_forms(structure: Any) -> list[str]:
    """Return "sparse" or "ragged" for each tensor in a nest that is not dense."""
    forms = {tf.SparseTensor: "sparse", tf.RaggedTensor: "ragged"}
    leaves = tf.nest.flatten(structure)
    return [form for leaf in leaves for kind, form in forms.items() if isinstance(leaf, kind)]


def _copy(value: Array) -> Array:
    return np.array(value)


def _describe(value: Array) -> tuple[str, tuple[int, ...], int]:
    return dtype_code(value.dtype), value.shape, value.nbytes


def tensor_adapter() -> TensorAdapter[Array]:
    return TensorAdapter(NumpyAccess(), _describe, array_of, _copy)


_KERAS_3 = hasattr(tf.keras, "Variable")
