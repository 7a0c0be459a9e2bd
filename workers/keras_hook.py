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

from smdist.config import HookConfig
from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys
from smdist.manifest import CollectionInfo, Collections
from smdist.workers.keras_functions import is_keras_3
from smdist.workers.keras_lanes import Lane
from smdist.workers.keras_phases import Phases, Place
from smdist.workers.keras_recording import Recording
from smdist.workers.keras_tape import Tapes
from smdist.workers.outlet import Outlet
from smdist.workers.recorder import Recorder
from smdist.workers.tf_base import TensorflowHook
from smdist.workers.tf_host import array_of, reading
from smdist.workers.whereabouts import Whereabouts

__all__ = ["KerasHook"]


class KerasHook(TensorflowHook, tf.keras.callbacks.Callback):  # type: ignore[misc]
    _supports_tf_logs = True

    def _build(self, config: HookConfig, where: Whereabouts, close_timeout_s: float) -> None:
        tf.keras.callbacks.Callback.__init__(self)
        self._supports_tf_logs = True  # Keras 2 sets it on the instance
        super()._build(config, where, close_timeout_s)
        self._recording = Recording(
            self._clock,
            self._planner,
            self._manager,
            self._recorder,
            self._mishaps,
            self._attend,
            self._enter,
            config.stage_gradients == "synced",
        )
        self._place = Place()
        self._phases = Phases(self._recording, self._clock, self._planner, self._mishaps)
        self._tapes = Tapes(self._recording, self._clock, self._recorder, self._mishaps)

    # -- what Keras calls ---------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        # Keras 2 holds on to its function for `evaluate` before it says that it begins.
        if not is_keras_3(model) and getattr(model, "_is_compiled", False):
            self._begin_phase("test")

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._begin_phase("train")

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._phases.end(self.model, "train")

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._begin_phase("test")

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._phases.end(self.model, "test")

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._begin_phase("predict")

    def on_predict_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._phases.end(self.model, "predict")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """What the epoch's validation came to belongs to its last training step, if that is due."""
        found = {name: value for name, value in (logs or {}).items() if name.startswith("val_")}
        if not found or not self._active or not self._enter(ModeKeys.TRAIN):
            return
        try:
            self._recording.know_metrics(found)
            ref = self._clock.ref
            sink = self._sink() if self._clock.has_step else None
            for name, value in found.items():
                plan = self._planner.wants(name, ref.mode, ref.mode_step)
                if sink is not None and plan is not None:
                    self._recorder.save(sink, ref, name, array_of(value), plan)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, f"the end of epoch {epoch}")

    def _begin_phase(self, kind: str) -> None:
        if not self._active:
            return
        try:
            self._settle_ranks(self.model.distribute_strategy)
            if self._outlet.probe():
                self._phases.begin(self.model, kind, self._place)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, f"beginning to {kind}")

    def _enter(self, mode: ModeKeys) -> bool:
        if self._active:
            self.set_mode(mode)
        return self._active

    # -- what a script calls ------------------------------------------------------------------

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Capture the gradients that `optimizer` applies; returns it.

        The optimizer that a model was compiled with needs no wrapping.
        """
        if not hasattr(optimizer, "apply_gradients"):
            raise ConfigurationError(f"wrap_optimizer takes an optimizer, not {optimizer!r}")
        if self._active and all(known is not optimizer for known in self._recording.optimizers):
            self._recording.optimizers.append(optimizer)
        return optimizer

    def register_model(self, model: Any) -> None:
        """Say which model a loop of the script's own trains: its layers are captured then, and its
        variables are named by their place in it."""
        if self._active:
            self._recording.register(model)

    def wrap_tape(self, tape: Any) -> Any:
        """Begin a step, and capture the gradients that `tape` computes; returns it."""
        if not hasattr(tape, "gradient"):
            raise ConfigurationError(f"wrap_tape takes a GradientTape, not {tape!r}")
        return self._tapes.wrap(tape) if self._active else tape

    # -- replicas -----------------------------------------------------------------------------

    def _settle_ranks(self, strategy: Any) -> None:
        """Each replica of this process is a worker."""
        if self._outlet.is_open or self._recording.lanes.others:
            return
        process = self._outlet.identity
        count = 1
        if strategy.num_replicas_in_sync > 1:
            count = len(strategy.extended.worker_devices)
        self._place = Place(process.world_size, count)
        if count == 1:
            return
        first, world = process.rank * count, process.world_size * count
        self._outlet.become(first, world)
        for replica in range(1, count):
            where = Whereabouts(first + replica, world, self._where.attempt, self._where.spool_dir)
            read = reading()
            outlet = Outlet(self._config, where, read.host, self._log, self._mishaps.trouble)
            if outlet.probe():
                lane = Lane(outlet, Recorder(read.describe), self._collections)
                self._recording.lanes.others.append(lane)

    def _collections(self, worker: str) -> Collections:
        infos = tuple(CollectionInfo(**facts) for facts in self._planner.description())
        return Collections(worker, infos)

    # -- the course of a step -----------------------------------------------------------------

    def _begin_step(self) -> None:
        self._recording.lanes.begin()
        self._recording.save_variables()

    def _rest(self, next_due: int) -> None:
        self._recording.lanes.finish()

    def _forget(self) -> None:
        self._recording.forget()

    def _uninstall(self) -> None:
        self._tapes.uninstall()
        self._phases.uninstall()
        self._recording.uninstall()

    def flush(self, timeout: float | None = None) -> bool:
        done = super().flush(timeout)
        limit = self._close_timeout_s if timeout is None else timeout
        for lane in self._recording.lanes.others:
            if lane.outlet.capture is not None:
                lane.outlet.capture.flush()
                done = lane.outlet.capture.drain(limit) and done
        return done

    def after_fork(self) -> None:
        self._recording.lanes.abandon()
        super().after_fork()

    def _end(self, reason: str, timeout: float | None = None) -> None:
        others = list(self._recording.lanes.others)
        limit = self._close_timeout_s if timeout is None else timeout
        super()._end(reason, timeout)
        self._recording.lanes.others.clear()
        for lane in others:
            left = lane.outlet.close(reason, limit)
            if left:
                self._mishaps.trouble(left)
