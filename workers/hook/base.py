"""What the hooks of all frameworks have in common: construction, and what a script calls.

A framework's hook states its `_framework` and `_collection_type`, and how it reads tensors
(`_tensor_adapter`). `_attach` builds its adapter around the core, which then calls the returned listener
as steps come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from threading import TIMEOUT_MAX
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from typing_extensions import Self

from smdist.config import Framework, HookConfig
from smdist.config.collection import Collection, CollectionKeys
from smdist.config.readers import read_number, read_text, read_texts, read_timestamp
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys
from smdist.workers.hook.accessors import HookAccessors
from smdist.workers.hook.core import HookCore
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.hook.step_listener import StepListener
from smdist.workers.hook.user_values import TensorAdapter

__all__ = ["CLOSE_TIMEOUT_S", "BaseHook"]

T = TypeVar("T")

CLOSE_TIMEOUT_S = 600.0


class BaseHook(HookAccessors[T]):
    """See the framework's own class for what can be registered."""

    _framework: ClassVar[Framework]
    _collection_type: ClassVar[type[Collection]]

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
        process = ProcessSettings.read(rank, world_size, attempt, spool_dir)
        timeout_s = min(read_number("close_timeout_s", close_timeout_s, finite=False), TIMEOUT_MAX)
        self._build(config, process, timeout_s)

    @classmethod
    def create_from_json_file(cls, json_file_path: str | PathLike[str] | None = None) -> Self:
        """Build a hook from a JSON file.

        The file is `json_file_path`, else the one that SMDEBUG_CONFIG_FILE_PATH names, else the
        platform's.
        """
        hook = cls.__new__(cls)
        hook._build(HookConfig.from_file(cls._framework, json_file_path))
        return hook

    hook_from_config = create_from_json_file

    def _build(
        self,
        config: HookConfig,
        process: ProcessSettings | None = None,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        *,
        silent: bool = False,
    ) -> None:
        self._core = HookCore(
            config,
            self._tensor_adapter(),
            self._collection_type,
            process or ProcessSettings(),
            close_timeout_s,
            silent=silent,
        )
        self._core.listener = self._attach(self._core)
        self._core.start()

    def _tensor_adapter(self) -> TensorAdapter[T]:
        raise NotImplementedError

    def _attach(self, core: HookCore[T]) -> StepListener:
        raise NotImplementedError

    # -- steps --------------------------------------------------------------------------------

    def set_mode(self, mode: ModeKeys) -> None:
        """Set the mode of all steps that begin from now on."""
        if not isinstance(mode, ModeKeys):
            raise ConfigurationError(f"mode={mode!r} is not one of smdist.modes")
        self._core.set_mode(mode)

    def step(self) -> None:
        """End a step: everything since the last call belongs to it, however many forwards it had."""
        self._core.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the step counters, to be kept in a checkpoint."""
        return self._core.clock.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count where `state_dict()` was taken."""
        self._core.clock.restore(state)
        self._core.report_next_step()

    # -- values of the script's own -----------------------------------------------------------

    def save_scalar(
        self, name: str, value: Any, sm_metric: bool = False, timestamp: float | None = None
    ) -> None:
        """Store a number as `scalar/<name>` at the current step, whatever the interval.

        `timestamp`: the time of the number in seconds since 1970, stored as `timestamp/<name>`.
        """
        name = read_text("name", name)
        collections = (CollectionKeys.SM_METRICS,) if sm_metric else ()
        when = None if timestamp is None else np.float64(read_timestamp("timestamp", timestamp))
        self._save(f"scalar/{name}", value, collections, scalar=True)
        if when is not None:
            self._save(f"timestamp/{name}", when, (), scalar=True)

    def save_tensor(
        self,
        tensor_name: str,
        tensor_value: Any,
        collections_to_write: str | Iterable[str] = CollectionKeys.DEFAULT,
    ) -> None:
        """Store a tensor or array at the current step, as a member of every collection given."""
        collections = read_texts("collections_to_write", collections_to_write)
        self._save(read_text("tensor_name", tensor_name), tensor_value, collections)

    def _save(
        self, name: str, value: object, collections: Iterable[str], *, scalar: bool = False
    ) -> None:
        self._core.save_value(name, value, collections, scalar=scalar)

    # -- end ----------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything saved so far is stored; False if `timeout` seconds were too few."""
        return self._core.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything is stored (`timeout` seconds at most) and release the model.

        A signal handler that interrupts a save cannot wait for it: the hook is then closed when the
        next step begins or the process exits, whichever is first.
        """
        self._core.close("", timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._core.close("" if error is None else f"{type(error).__name__}: {error}")
