"""The hook for PyTorch.

    hook = Hook(out_dir, save_config=SaveConfig(save_interval=100))
    hook.register_module(model)
    hook.register_loss(criterion)
    ...                             train as ever
    hook.close()                    or let the process end

Weights of a step are those its forward starts with, gradients are what `.grad` holds after its last
backward: with accumulation over several forwards that is the sum so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from threading import TIMEOUT_MAX
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from smdist.config import PYTORCH, HookConfig
from smdist.config.readers import read_number, read_text
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.errors import ConfigurationError
from smdist.workers.capture.tensor_access import to_little_endian
from smdist.workers.hook.base import CLOSE_TIMEOUT_S, BaseHook
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.hook.step_clock import StepOn
from smdist.workers.hook.user_values import TensorAdapter
from smdist.workers.torch_adapter.collection import Collection
from smdist.workers.torch_adapter.recording import Recording
from smdist.workers.torch_adapter.tensor_access import TorchAccess, Value, describe, readable

__all__ = ["Hook"]


class Hook(BaseHook[Value]):
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
            PYTORCH,
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
    def create_from_json_file(cls, json_file_path: str | PathLike[str] | None = None) -> Hook:
        """From `json_file_path`, else the file that SMDEBUG_CONFIG_FILE_PATH names, else the
        platform's."""
        hook = cls.__new__(cls)
        hook._build(
            HookConfig.from_file(PYTORCH, json_file_path), ProcessSettings(), CLOSE_TIMEOUT_S
        )
        return hook

    hook_from_config = create_from_json_file

    def __reduce__(self) -> tuple[Any, ...]:
        # What is loaded elsewhere (a checkpoint of a model with the hook as an attribute) is silent.
        return _silent, (type(self), self.out_dir)

    def _build(
        self,
        config: HookConfig,
        where: ProcessSettings,
        close_timeout_s: float,
        silent: bool = False,
    ) -> None:
        reading: TensorAdapter[Value] = TensorAdapter(TorchAccess(), describe, _value, _copy)
        self._set_up(config, reading, Collection, where, close_timeout_s, silent)
        self._recording = Recording(
            self._clock,
            self._planner,
            self._manager,
            self._recorder,
            self._errors,
            config.stage_gradients == "synced",
            self._on_step_start,
        )

    # -- registering --------------------------------------------------------------------------

    def get_collection(self, name: str, create: bool = True) -> Collection:
        """The collection of that name, created if it is missing; changes hold from the next step."""
        return cast("Collection", super().get_collection(name, create))

    def register_module(self, module: nn.Module, *, step_on: StepOn | None = None) -> None:
        """Capture `module`: weights, gradients, inputs and outputs, whatever is configured.

        `step_on` says what a step is: "forward" (each forward of this module; the default for the
        first), "optimizer" (all forwards up to the update of the optimizer given to
        `register_optimizer`) or "manual" (until the next `hook.step()`). Further modules take part
        in the steps of the first, unless they say "forward" themselves.
        """
        if not isinstance(module, nn.Module):
            raise ConfigurationError(f"register_module takes a torch.nn.Module, not {module!r}")
        if self._saves():
            self._recording.add_root(module, step_on)

    def register_hook(self, module: nn.Module) -> None:
        self.register_module(module)

    def register_loss(self, loss_module: nn.Module) -> None:
        """Capture the outputs of any module as losses, by its class name."""
        if not isinstance(loss_module, nn.Module):
            raise ConfigurationError(
                f"register_loss takes a torch.nn.Module, not {loss_module!r}; give the result of a "
                "function to record_tensor_value() or save_scalar()"
            )
        if self._saves():
            self._recording.add_loss(loss_module)

    def register_optimizer(self, optimizer: Optimizer) -> None:
        """Capture its variables; its update ends a step where `step_on="optimizer"` says so."""
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"register_optimizer takes a torch.optim.Optimizer, not {optimizer!r}"
            )
        if self._saves():
            self._recording.add_optimizer(optimizer)

    def record_tensor_value(self, tensor_name: str, tensor_value: torch.Tensor) -> None:
        """Treat a tensor as the output of a module of that name: `<tensor_name>_output_0`."""
        tensor_name = read_text("tensor_name", tensor_name)
        self._warn_if_closed()
        if self._active:
            self._recording.modules.record(tensor_name, "output", tensor_value)

    # -- the course of a step -----------------------------------------------------------------

    def _on_capture_step(self) -> None:
        self._recording.begin()

    def _incomplete_reason(self) -> str:
        return self._recording.under_way

    def _on_idle_step(self, next_due: int) -> None:
        self._recording.rest(next_due)

    def _awaits_gradients(self) -> bool:
        return self._recording.unfinished

    def _on_config_change(self) -> None:
        self._recording.forget()

    def _on_reported_step(self) -> None:
        self._recording.missed_calls.stop()

    def _on_close(self) -> None:
        self._recording.missed_calls.report_at_end()

    def _uninstall(self) -> None:
        self._recording.uninstall()


def _silent(kind: type[Hook], out_dir: str) -> Hook:
    hook = kind.__new__(kind)
    config = HookConfig.from_arguments(PYTORCH, out_dir=out_dir)
    hook._build(config, ProcessSettings(), CLOSE_TIMEOUT_S, silent=True)
    return hook


def _value(given: object) -> Value:
    if isinstance(given, torch.Tensor):
        return readable(given)
    return to_little_endian(np.asarray(given))


def _copy(value: Value) -> Value:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()
