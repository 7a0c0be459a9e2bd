"""The hook for Keras, a callback of `fit`, `evaluate` and `predict`.

    hook = KerasHook(out_dir, save_config=SaveConfig(save_interval=100))
    model.fit(x, y, callbacks=[hook])
    model.evaluate(x, y, callbacks=[hook])
    hook.close()                    # optional: it is closed when the process ends

A step is a batch; `fit`, `evaluate` and `predict` set the mode. Weights and optimizer variables are
those that the step starts with. Gradients are what each replica computed, before any clipping.
Losses and metrics are what Keras reports for the batch: means since the epoch began.

Keras and the script call it on the training thread. The package describes the parts of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from smdist.errors import ConfigurationError
from smdist.format.manifest import rank_saves
from smdist.identity import ModeKeys
from smdist.workers.hook.capture_session import CaptureSession
from smdist.workers.hook.core import HookCore
from smdist.workers.hook.process_settings import ProcessSettings
from smdist.workers.hook.recorder import Recorder
from smdist.workers.hook.step_listener import StepListener
from smdist.workers.keras_adapter.model_building import is_keras_3
from smdist.workers.keras_adapter.phases import Phases
from smdist.workers.keras_adapter.recording import KerasRecording
from smdist.workers.keras_adapter.replicas import Replica, ReplicaLayout
from smdist.workers.keras_adapter.tape_loops import TapeLoops
from smdist.workers.keras_adapter.variable_names import VariableNames
from smdist.workers.tf_adapter.base_hook import TensorflowHook
from smdist.workers.tf_adapter.tensor_access import (
    Array,
    array_of,
    is_layer,
    is_variable,
    tensor_adapter,
    unconverted,
)

__all__ = ["KerasHook"]


class KerasHook(TensorflowHook, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Captures from the models that Keras runs with it, and from loops with wrapped tapes."""

    _supports_tf_logs = True

    def _attach(self, core: HookCore[Array]) -> StepListener:
        tf.keras.callbacks.Callback.__init__(self)
        self._supports_tf_logs = True  # Keras 2 sets it on the instance
        self._recording = KerasRecording(core)
        self._layout = ReplicaLayout()
        self._phases = Phases(self._recording)
        self._tapes = TapeLoops(self._recording, lambda: self._phases.running)
        return _KerasStepListener(core, self._recording, self._phases, self._tapes)

    # -- callbacks of Keras -------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._core.warn_if_closed()
        # Keras 2 takes its function for `evaluate` before it calls `on_test_begin`.
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
        self._phases.expect_call(self.model, "test")

    def on_predict_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._phases.expect_call(self.model, "predict")

    # Batch callbacks cost time in Keras 2, which does not need them here.
    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save the results of the epoch's validation at its last training step, if that is due."""
        found = {name: value for name, value in (logs or {}).items() if name.startswith("val_")}
        if not found or not self._recording.enter(ModeKeys.TRAIN):
            return
        try:
            self._recording.add_metrics(found)
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
            self._assign_ranks(self.model.distribute_strategy)
            if self._core.session.saves_on_this_rank():
                self._phases.begin(self.model, kind, self._layout, early=early)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._core.errors.on_exception(error, f"beginning to {kind}")

    def _end_phase(self, kind: str) -> None:
        outer = self._phases.end(self.model, kind)
        if outer is not None and outer is not self.model:
            super().set_model(outer)  # Keras does not report that `fit` of `outer` goes on

    # -- called by a script --------------------------------------------------------------------

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Capture the gradients that `optimizer` applies in `fit`, and return it.

        The optimizer that a model was compiled with needs no wrapping. In a loop of the script, the
        variables of `optimizer` for a registered model are captured; gradients come from
        `wrap_tape`.
        """
        if not hasattr(optimizer, "apply_gradients"):
            raise ConfigurationError(f"wrap_optimizer takes an optimizer, not {optimizer!r}")
        self._core.warn_if_closed()
        if self._core.active:
            self._recording.wrap(optimizer)
        return optimizer

    def register_model(self, model: Any) -> None:
        """Capture the layers of a model that a loop of the script trains.

        Its variables are then named by their place in the model.
        """
        if not is_layer(model):
            raise ConfigurationError(f"register_model takes a Keras model, not {model!r}")
        self._core.warn_if_closed()
        if self._core.active:
            self._recording.register(model)

    @unconverted
    def wrap_tape(self, tape: Any) -> Any:
        """Begin a step, capture the gradients that `tape` computes, and return it.

        No step begins within `fit` or while another wrapped tape is open: the current one goes on.
        """
        if not hasattr(tape, "gradient"):
            raise ConfigurationError(f"wrap_tape takes a GradientTape, not {tape!r}")
        if not self._core.active:
            self._core.warn_if_closed()
            return tape
        return self._tapes.wrap(tape)

    # -- replicas -----------------------------------------------------------------------------

    def _assign_ranks(self, strategy: Any) -> None:
        """Make each replica of this process a worker; the hook itself is the first that saves."""
        if self._layout.replicas > 1:  # already done: the process has the rank of a replica
            return
        core = self._core
        process = core.session.identity
        count = 1
        if strategy.num_replicas_in_sync > 1:
            count = len(strategy.extended.worker_devices)
        self._layout = ReplicaLayout(process.world_size, count)
        if count == 1 or core.session.is_open:
            return
        first, world = process.rank * count, process.world_size * count
        wanted = core.config.include_workers
        own, *others = [r for r in range(count) if rank_saves(first + r, wanted)] or [0]
        core.session.assign_rank(first + own, world)
        replicas = self._recording.replicas
        replicas.first_index = own
        for index in others:
            where = ProcessSettings(
                first + index, world, core.process.attempt, core.process.spool_dir
            )
            read = tensor_adapter()
            session = CaptureSession(
                core.config, where, read.access, core.log, core.errors.warn_once
            )
            core.replica_sessions.append(session)
            recorder = Recorder(read.describe)
            replicas.others.append(Replica(index, session, recorder, core.describe_collections))

    def _unreachable_reason(self) -> str:
        if self._phases.running:
            return (
                "a function that fit runs has no step number. Save in on_train_batch_end of a "
                "callback, or compile the model with run_eagerly=True"
            )
        return super()._unreachable_reason()


class _KerasStepListener(StepListener):
    """What the Keras adapter does as steps come and go; called on the training thread."""

    def __init__(
        self, core: HookCore[Array], recording: KerasRecording, phases: Phases, tapes: TapeLoops
    ) -> None:
        self._core, self._recording, self._phases, self._tapes = core, recording, phases, tapes

    def on_capture_step(self) -> None:
        self._recording.replicas.begin()
        self._recording.save_variables()
        for replica in self._recording.replicas.others:
            replica.recorder.incomplete_reason = self.incomplete_reason()

    def incomplete_reason(self) -> str:
        return "an exception ended its batch" if self._phases.running else ""

    def on_idle_step(self, next_due: int) -> None:
        self._recording.replicas.finish()

    def on_config_change(self) -> None:
        self._recording.on_config_change()

    def on_close(self) -> None:
        core = self._core
        if not core.session.saves_on_this_rank():
            return
        if self._recording.optimizers and core.clock.step < 0:
            core.errors.warn_once(
                "no gradient was saved: an optimizer was wrapped, but no step was seen. Pass the hook "
                "to fit(callbacks=[hook]), or use hook.wrap_tape(tf.GradientTape()) in each step"
            )
        self._warn_of_unknown_targets()

    def _warn_of_unknown_targets(self) -> None:
        """Warn of variables and layers that a collection asked for and no model had."""
        asked: list[tuple[str, Any]] = [
            (collection.name, request.target)
            for collection in self._core.planner.active().values()
            for request in collection.unbound_requests
        ]
        if not asked:
            return
        # Read again: a model may have changed since its names were last needed.
        models = [VariableNames(names.model) for names in self._recording.all_names()]
        for collection, target in asked:
            if models and not any(n.path_of(target) or n.layer_path(target) for n in models):
                kind = "variable" if is_variable(target) else "layer"
                self._core.errors.warn_once(
                    f"collection {collection} asked for {kind} {target.name}, but no model had it"
                )

    def uninstall(self) -> None:
        self._tapes.uninstall()
        self._phases.uninstall()
        self._recording.uninstall()
