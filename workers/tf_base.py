"""What the hooks for TensorFlow have in common: their construction, and adding to collections."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from threading import TIMEOUT_MAX
from typing import Any, ClassVar, Literal, cast

from typing_extensions import Self

from smdist.config import TENSORFLOW, Framework, HookConfig
from smdist.reduction import ReductionConfig
from smdist.schedule import SaveConfig
from smdist.values import number
from smdist.workers.hook import CLOSE_TIMEOUT_S, BaseHook
from smdist.workers.tf_collection import Collection
from smdist.workers.tf_host import Array, reading
from smdist.workers.whereabouts import Whereabouts

__all__ = ["TensorflowHook"]


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
        where = Whereabouts.read(rank, world_size, attempt, spool_dir)
        timeout_s = min(number("close_timeout_s", close_timeout_s), TIMEOUT_MAX)
        self._build(config, where, timeout_s)

    @classmethod
    def create_from_json_file(cls, json_file_path: str | PathLike[str] | None = None) -> Self:
        """From `json_file_path`, else the file that SMDEBUG_CONFIG_FILE_PATH names, else the
        platform's."""
        hook = cls.__new__(cls)
        config = HookConfig.from_file(cls._framework, json_file_path)
        hook._build(config, Whereabouts(), CLOSE_TIMEOUT_S)
        return hook

    hook_from_config = create_from_json_file

    def _build(self, config: HookConfig, where: Whereabouts, close_timeout_s: float) -> None:
        self._where = where
        self._set_up(config, reading(), Collection, where, close_timeout_s)

    def get_collection(self, name: str, create: bool = True) -> Collection:
        """The collection of that name, created if it is missing; changes hold from the next step."""
        return cast("Collection", super().get_collection(name, create))

    def add_to_collection(self, collection_name: str, variable: Any) -> None:
        """As `get_collection(collection_name).add(variable)`."""
        self.get_collection(collection_name).add(variable)
