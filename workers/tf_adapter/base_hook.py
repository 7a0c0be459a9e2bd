"""What the hooks for TensorFlow have in common: their construction, adding to collections, and values
of the script's own, which a `tf.function` hands over when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from threading import TIMEOUT_MAX
from typing import Any, ClassVar, Literal, cast

import numpy as np
import tensorflow as tf
from typing_extensions import Self

from smdist.config import TENSORFLOW, Framework, HookConfig
from smdist.config.collection import CollectionKeys
from smdist.config.readers import read_number, read_text
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.workers.hook.base import CLOSE_TIMEOUT_S, BaseHook
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.tf_adapter.collection import Collection
from smdist.workers.tf_adapter.graph_callbacks import compiled, tell
from smdist.workers.tf_adapter.tensor_access import Array, array_of, tensor_adapter, unconverted

__all__ = ["TensorflowHook"]

_LOSS = re.compile("[Ll]oss_(?!input).*output")  # as for PyTorch


class TensorflowHook(BaseHook[Array]):
    _framework: ClassVar[Framework] = TENSORFLOW

    def __init__(
        self,
        out_dir: str | PathLike[str],
        export_tensorboard: bool = False,
        tensorboard_dir: str | PathLike[str] | None = None,
        dry_run: bool = False,
        reduction_config: ReductionConfig | None = None,
        save_config: SaveConfig | dict[Any, Any] | None = None,
        include_regex: str | Sequence[str] | None = None,
        include_collections: Sequence[str] | None = None,
        save_all: bool = False,
        include_workers: str | Sequence[int] = "one",
        *,
        buffer_bytes: int | None = None,
        segment_bytes: int | None = None,
        linger_s: float | None = None,
        drain_deadline_s: float | None = None,
        on_full: Literal["block", "drop"] = "block",
        on_error: Literal["warn", "raise"] = "warn",
        overhead_budget: float | None = None,
        resume: bool = False,
        stage_gradients: Literal["local", "synced"] = "local",
        rank: int | None = None,
        world_size: int | None = None,
        attempt: int | None = None,
        spool_dir: str | PathLike[str] | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        config = HookConfig.from_arguments(
            self._framework,
            out_dir=out_dir,
            export_tensorboard=export_tensorboard,
            tensorboard_dir=tensorboard_dir,
            dry_run=dry_run,
            reduction_config=reduction_config,
            save_config=save_config,
            include_regex=include_regex,
            include_collections=include_collections,
            save_all=save_all,
            include_workers=include_workers,
            buffer_bytes=buffer_bytes,
            segment_bytes=segment_bytes,
            linger_s=linger_s,
            drain_deadline_s=drain_deadline_s,
            on_full=on_full,
            on_error=on_error,
            overhead_budget=overhead_budget,
            resume=resume,
            stage_gradients=stage_gradients,
        )
        where = ProcessSettings.read(rank, world_size, attempt, spool_dir)
        timeout_s = min(read_number("close_timeout_s", close_timeout_s, finite=False), TIMEOUT_MAX)
        self._build(config, where, timeout_s)

    @classmethod
    def create_from_json_file(cls, json_file_path: str | PathLike[str] | None = None) -> Self:
        """From `json_file_path`, else the file that SMDEBUG_CONFIG_FILE_PATH names, else the
        platform's."""
        hook = cls.__new__(cls)
        config = HookConfig.from_file(cls._framework, json_file_path)
        hook._build(config, ProcessSettings(), CLOSE_TIMEOUT_S)
        return hook

    hook_from_config = create_from_json_file

    def _build(self, config: HookConfig, where: ProcessSettings, close_timeout_s: float) -> None:
        self._where = where
        self._outputs: tuple[int, dict[str, int]] = (-1, {})  # recorded by name, of a step
        self._set_up(config, tensor_adapter(), Collection, where, close_timeout_s)

    def get_collection(self, name: str, create: bool = True) -> Collection:
        """The collection of that name, created if it is missing; changes hold from the next step."""
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
        if not self._active:
            self._warn_if_closed()
            return
        if _in_function():
            self._hand_over(tensor_name, tensor_value, lambda v: self._record(tensor_name, v))
        else:
            self._record(tensor_name, tensor_value)

    def _record(self, base: str, value: Any) -> None:
        plan = self._recorder.plan
        if plan is None:
            return
        try:
            if self._outputs[0] != self._clock.step:
                self._outputs = (self._clock.step, {})
            count = self._outputs[1].get(base, 0)
            self._outputs[1][base] = count + 1
            name = f"{base}_output_{count}"
            losses = self.get_collection(CollectionKeys.LOSSES)
            if _LOSS.search(name) and not losses.has_tensor_name(name):
                losses.add_tensor_name(name)
            if plan.wants(name) is not None:
                self._recorder.offer(name, array_of(value))
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._errors.on_exception(error, f"recording {base}")

    @unconverted
    def _save(
        self, name: str, value: object, collections: Iterable[str], *, scalar: bool = False
    ) -> None:
        if not self._active or not _in_function():
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
            self._errors.on_exception(error, f"saving {name}")

    def _told_why_not(self, name: str) -> bool:
        why = self._out_of_reach()
        if why:
            self._errors.warn_once(f"{name} is not saved: {why}")
        return bool(why)

    def _out_of_reach(self) -> str:
        """Why no value gets out of the function that is traced or run; empty: it does."""
        if not tf.executing_eagerly() and compiled():
            return "XLA lets nothing out of a function that it compiles; use jit_compile=False"
        return ""


def _in_function() -> bool:
    """Is a `tf.function` being traced? What is computed there has no value yet."""
    return not tf.executing_eagerly() and tf.compat.v1.get_default_graph().building_function
