"""The hook for Keras.

    hook = KerasHook(out_dir, save_config=SaveConfig(save_interval=100))
    model.fit(x, y, callbacks=[hook])
    model.evaluate(x, y, callbacks=[hook])
    hook.close()                    or let the process end

A step is a batch; `fit`, `evaluate` and `predict` set the mode. Weights and optimizer variables of
a step are those it starts with, gradients are what each replica computed, before any clipping.
Losses and metrics are what Keras reports for the batch: means since the epoch began.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys
from smdist.workers.hook.capture_session import CaptureSession
from smdist.workers.hook.core import HookCore
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.hook.recorder import Recorder
from smdist.workers.hook.step_listener import StepListener
from smdist.workers.join.enrol import saves
from smdist.workers.keras_adapter.phases import Phases, Place
from smdist.workers.keras_adapter.recording import Recording
from smdist.workers.keras_adapter.replicas import Lane
from smdist.workers.keras_adapter.step_function import is_keras_3
from smdist.workers.keras_adapter.step_listener import KerasStepListener
from smdist.workers.keras_adapter.tape_loops import Tapes
from smdist.workers.tf_adapter.base_hook import TensorflowHook
from smdist.workers.tf_adapter.tensor_access import (
    Array,
    array_of,
    is_layer,
    tensor_adapter,
    unconverted,
)

__all__ = ["KerasHook"]


class KerasHook(TensorflowHook, tf.keras.callbacks.Callback):  # type: ignore[misc]
    _supports_tf_logs = True

    def _attach(self, core: HookCore[Array]) -> StepListener:
        tf.keras.callbacks.Callback.__init__(self)
        self._supports_tf_logs = True  # Keras 2 sets it on the instance
        self._recording = Recording(
            core.clock,
            core.planner,
            core.manager,
            core.recorder,
            core.errors,
            core.on_step_start,
            self._enter,
            core.config.stage_gradients == "synced",
        )
        self._place = Place()
        self._phases = Phases(self._recording, core.clock, core.planner, core.errors)
        self._tapes = Tapes(
            self._recording,
            core.clock,
            core.recorder,
            core.manager,
            core.errors,
            lambda: self._phases.running,
        )
        return KerasStepListener(core, self._recording, self._phases, self._tapes)

    # -- what Keras calls ---------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._core.warn_if_closed()  # here: `fit` that goes on after the end begins to validate, too
        # Keras 2 holds on to its function for `evaluate` before it says that it begins.
        if not is_keras_3(model) and getattr(model, "_is_compiled", False):
            self._begin_phase("test", early=True)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._begin_phase("train")

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._end_phase("train")

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._begin_phase("test")

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._end_phase("test")

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._begin_phase("predict")

    def on_predict_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._end_phase("predict")

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._phases.expect(self.model, "test")

    def on_predict_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._phases.expect(self.model, "predict")

    # Keras 2 takes its time to say so, and need not for our sake.
    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """What the epoch's validation came to belongs to its last training step, if that is due."""
        found = {name: value for name, value in (logs or {}).items() if name.startswith("val_")}
        if not found or not self._core.active or not self._enter(ModeKeys.TRAIN):
            return
        try:
            self._recording.know_metrics(found)
            ref = self._core.clock.ref
            sink = self._core.sink() if self._core.clock.has_step else None
            for name, value in found.items():
                plan = self._core.planner.wants(name, ref.mode, ref.mode_step)
                if sink is not None and plan is not None:
                    self._core.recorder.save(sink, ref, name, array_of(value), plan)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._core.errors.on_exception(error, f"the end of epoch {epoch}")

    def _begin_phase(self, kind: str, *, early: bool = False) -> None:
        if not self._core.active:
            return
        try:
            self._settle_ranks(self.model.distribute_strategy)
            if self._core.session.saves_on_this_rank():
                self._phases.begin(self.model, kind, self._place, early=early)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._core.errors.on_exception(error, f"beginning to {kind}")

    def _end_phase(self, kind: str) -> None:
        outer = self._phases.end(self.model, kind)
        if outer is not None and outer is not self.model:
            super().set_model(outer)  # what follows is of that one, and Keras does not say so

    def _enter(self, mode: ModeKeys) -> bool:
        if self._core.active:
            self.set_mode(mode)
        return self._core.active

    # -- what a script calls ------------------------------------------------------------------

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Capture the gradients that `optimizer` applies in `fit`, and in any loop what it keeps for a
        registered model; returns it. The gradients of a loop are those of its tape: `wrap_tape`.

        The optimizer that a model was compiled with needs no wrapping.
        """
        if not hasattr(optimizer, "apply_gradients"):
            raise ConfigurationError(f"wrap_optimizer takes an optimizer, not {optimizer!r}")
        self._core.warn_if_closed()
        if self._core.active:
            self._recording.wrap(optimizer)
        return optimizer

    def register_model(self, model: Any) -> None:
        """Say which model a loop of the script's own trains: its layers are captured then, and its
        variables are named by their place in it."""
        if not is_layer(model):
            raise ConfigurationError(f"register_model takes a Keras model, not {model!r}")
        self._core.warn_if_closed()
        if self._core.active:
            self._recording.register(model)

    @unconverted
    def wrap_tape(self, tape: Any) -> Any:
        """Begin a step, and capture the gradients that `tape` computes; returns it.

        While another wrapped tape is open, and within `fit`, no step begins: theirs goes on.
        """
        if not hasattr(tape, "gradient"):
            raise ConfigurationError(f"wrap_tape takes a GradientTape, not {tape!r}")
        if not self._core.active:
            self._core.warn_if_closed()
            return tape
        return self._tapes.wrap(tape)

    # -- replicas -----------------------------------------------------------------------------

    def _settle_ranks(self, strategy: Any) -> None:
        """Each replica of this process is a worker; the hook itself is the first one that saves."""
        if self._place.replicas > 1:  # the process has become one of them
            return
        process = self._core.session.identity
        count = 1
        if strategy.num_replicas_in_sync > 1:
            count = len(strategy.extended.worker_devices)
        self._place = Place(process.world_size, count)
        if count == 1 or self._core.session.is_open:
            return
        first, world = process.rank * count, process.world_size * count
        wanted = self._core.config.include_workers
        own, *others = [r for r in range(count) if saves(first + r, wanted)] or [0]
        self._core.session.assign_rank(first + own, world)
        lanes = self._recording.lanes
        lanes.replica = own
        for replica in others:
            where = ProcessSettings(
                first + replica, world, self._core.process.attempt, self._core.process.spool_dir
            )
            read = tensor_adapter()
            session = CaptureSession(
                self._core.config, where, read.access, self._core.log, self._core.errors.warn_once
            )
            recorder = Recorder(read.describe)
            self._core.replica_sessions.append(session)
            lanes.others.append(Lane(replica, session, recorder, self._core.describe_collections))

    def _out_of_reach(self) -> str:
        if self._phases.running:
            return (
                "a function that fit runs for a batch does not know its step; save in "
                "on_train_batch_end of a callback, or compile the model with run_eagerly=True"
            )
        return super()._out_of_reach()
