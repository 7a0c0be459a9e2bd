"""The common part of the hooks for TensorFlow: collections, and values that the script saves.

Inside a `tf.function` a value is saved by a callback in every run. The script calls all methods on
its own thread; callbacks come from a thread of TensorFlow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import numpy as np
import tensorflow as tf

from smdist.config import TENSORFLOW, Framework
from smdist.config.collection import CollectionKeys
from smdist.config.readers import read_text
from smdist.workers.hook.base import BaseHook
from smdist.workers.hook.user_values import TensorAdapter
from smdist.workers.tf_adapter.collection import TensorFlowCollection
from smdist.workers.tf_adapter.graph_callbacks import call, in_xla_graph
from smdist.workers.tf_adapter.tensor_access import Array, array_of, tensor_adapter, unconverted

__all__ = ["TensorflowHook"]

_LOSS = re.compile("[Ll]oss_(?!input).*output")  # as for PyTorch


class TensorflowHook(BaseHook[Array]):
    """A hook whose values are TensorFlow tensors."""

    _framework: ClassVar[Framework] = TENSORFLOW
    _collection_type = TensorFlowCollection
    # Outputs recorded so far by name, and the step that they belong to.
    _outputs: tuple[int, dict[str, int]] = (-1, {})

    def _tensor_adapter(self) -> TensorAdapter[Array]:
        return tensor_adapter()

    def get_collection(self, name: str, create: bool = True) -> TensorFlowCollection:
        return cast("TensorFlowCollection", super().get_collection(name, create))

    def add_to_collection(self, collection_name: str, variable: Any) -> None:
        """Add `variable` to a collection, as `get_collection(collection_name).add(variable)` does."""
        self.get_collection(collection_name).add(variable)

    # -- values given by the script -----------------------------------------------------------

    @unconverted
    def record_tensor_value(self, tensor_name: str, tensor_value: Any) -> None:
        """Save a tensor as an output, named `<tensor_name>_output_0`, on due steps.

        A name that contains "loss" makes it a member of the losses.
        """
        tensor_name = read_text("tensor_name", tensor_name)
        if not self._core.active:
            self._core.warn_if_closed()
            return
        if _in_function():
            self._save_from_graph(tensor_name, tensor_value, lambda v: self._record(tensor_name, v))
        else:
            self._record(tensor_name, tensor_value)

    def _record(self, base: str, value: Any) -> None:
        plan = self._core.recorder.plan
        if plan is None:
            return
        try:
            if self._outputs[0] != self._core.clock.step:
                self._outputs = (self._core.clock.step, {})
            count = self._outputs[1].get(base, 0)
            self._outputs[1][base] = count + 1
            name = f"{base}_output_{count}"
            losses = self.get_collection(CollectionKeys.LOSSES)
            if _LOSS.search(name) and not losses.has_tensor_name(name):
                losses.add_tensor_name(name)
            if plan.wants(name) is not None:
                self._core.recorder.offer(name, array_of(value))
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._core.errors.on_exception(error, f"recording {base}")

    @unconverted
    def _save(
        self, name: str, value: object, collections: Iterable[str], *, scalar: bool = False
    ) -> None:
        if not self._core.active or not _in_function():
            super()._save(name, value, collections, scalar=scalar)
            return
        save, given = super()._save, tuple(collections)
        self._save_from_graph(name, value, lambda array: save(name, array, given, scalar=scalar))

    @unconverted
    def _save_from_graph(self, name: str, value: Any, take: Callable[[Any], None]) -> None:
        """Pass the value to `take` in every run of the function that is being traced."""

        def callback(array: Array) -> Any:
            if not self._warn_if_unreachable(name):
                take(array)
            return np.bool_(True)

        try:
            if not self._warn_if_unreachable(name):
                call([tf.convert_to_tensor(value)], callback)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._core.errors.on_exception(error, f"saving {name}")

    def _warn_if_unreachable(self, name: str) -> bool:
        why = self._unreachable_reason()
        if why:
            self._core.errors.warn_once(f"{name} is not saved: {why}")
        return bool(why)

    def _unreachable_reason(self) -> str:
        """Return why no value gets out of the function that is traced or run; empty if it does."""
        if not tf.executing_eagerly() and in_xla_graph():
            return "nothing gets out of a function compiled by XLA; use jit_compile=False"
        return ""


def _in_function() -> bool:
    """Check whether a `tf.function` is being traced: its tensors have no values yet."""
    return not tf.executing_eagerly() and tf.compat.v1.get_default_graph().building_function
