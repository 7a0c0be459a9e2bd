"""What the hooks for TensorFlow have in common: their construction, adding to collections, and values
of the script's own, which a `tf.function` hands over when it runs.
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
from smdist.workers.tf_adapter.collection import Collection
from smdist.workers.tf_adapter.graph_callbacks import compiled, tell
from smdist.workers.tf_adapter.tensor_access import Array, array_of, tensor_adapter, unconverted

__all__ = ["TensorflowHook"]

_LOSS = re.compile("[Ll]oss_(?!input).*output")  # as for PyTorch


class TensorflowHook(BaseHook[Array]):
    _framework: ClassVar[Framework] = TENSORFLOW
    _collection_type = Collection
    # Outputs recorded so far by name, and the step that they belong to.
    _outputs: tuple[int, dict[str, int]] = (-1, {})

    def _tensor_adapter(self) -> TensorAdapter[Array]:
        return tensor_adapter()

    def get_collection(self, name: str, create: bool = True) -> Collection:
        return cast("Collection", super().get_collection(name, create))

    def add_to_collection(self, collection_name: str, variable: Any) -> None:
        """As `get_collection(collection_name).add(variable)`."""
        self.get_collection(collection_name).add(variable)

    # -- values of the script's own -----------------------------------------------------------

    @unconverted
    def record_tensor_value(self, tensor_name: str, tensor_value: Any) -> None:
        """Treat a tensor as an output of that name: `<tensor_name>_output_0`, saved when it is due.

        Names that speak of a loss are among the losses.
        """
        tensor_name = read_text("tensor_name", tensor_name)
        if not self._core.active:
            self._core.warn_if_closed()
            return
        if _in_function():
            self._hand_over(tensor_name, tensor_value, lambda v: self._record(tensor_name, v))
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
        self._hand_over(name, value, lambda array: save(name, array, given, scalar=scalar))

    @unconverted
    def _hand_over(self, name: str, value: Any, take: Callable[[Any], None]) -> None:
        """Let `take` have the value in every run of the function that is being traced."""

        def listen(array: Array) -> Any:
            if not self._told_why_not(name):
                take(array)
            return np.bool_(True)

        try:
            if not self._told_why_not(name):
                tell([tf.convert_to_tensor(value)], listen)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._core.errors.on_exception(error, f"saving {name}")

    def _told_why_not(self, name: str) -> bool:
        why = self._out_of_reach()
        if why:
            self._core.errors.warn_once(f"{name} is not saved: {why}")
        return bool(why)

    def _out_of_reach(self) -> str:
        """Why no value gets out of the function that is traced or run; empty: it does."""
        if not tf.executing_eagerly() and compiled():
            return "XLA lets nothing out of a function that it compiles; use jit_compile=False"
        return ""


def _in_function() -> bool:
    """Is a `tf.function` being traced? What is computed there has no value yet."""
    return not tf.executing_eagerly() and tf.compat.v1.get_default_graph().building_function
