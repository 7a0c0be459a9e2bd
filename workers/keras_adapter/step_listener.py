"""What the Keras adapter does as steps come and go; `HookCore` calls it on the training thread."""

from __future__ import annotations

from typing import Any

from smdist.workers.hook.core import HookCore
from smdist.workers.hook.step_listener import StepListener
from smdist.workers.keras_adapter.phases import Phases
from smdist.workers.keras_adapter.recording import Recording
from smdist.workers.keras_adapter.tape_loops import Tapes
from smdist.workers.keras_adapter.variable_names import Names
from smdist.workers.tf_adapter.tensor_access import Array, is_variable

__all__ = ["KerasStepListener"]


class KerasStepListener(StepListener):
    def __init__(
        self, core: HookCore[Array], recording: Recording, phases: Phases, tapes: Tapes
    ) -> None:
        self._core, self._recording, self._phases, self._tapes = core, recording, phases, tapes

    def on_capture_step(self) -> None:
        self._recording.lanes.begin()
        self._recording.save_variables()
        for lane in self._recording.lanes.others:
            lane.recorder.incomplete_reason = self.incomplete_reason()

    def incomplete_reason(self) -> str:
        return "an exception ended its batch" if self._phases.running else ""

    def on_idle_step(self, next_due: int) -> None:
        self._recording.lanes.finish()

    def on_config_change(self) -> None:
        self._recording.forget()

    def on_close(self) -> None:
        core = self._core
        if not core.session.saves_on_this_rank():
            return
        if self._recording.optimizers and core.clock.step < 0:
            core.errors.warn_once(
                "an optimizer was wrapped, but no step was seen, and no gradient saved: pass the hook "
                "to fit(callbacks=[hook]), or wrap the tape of each step of a loop: "
                "with hook.wrap_tape(tf.GradientTape()) as tape"
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
        seen = [Names(k.names.model) for k in self._recording.models if k.names is not None]
        for collection, target in asked:
            if seen and not any(n.path_of(target) or n.layer_path(target) for n in seen):
                kind = "variable" if is_variable(target) else "layer"
                self._core.errors.warn_once(
                    f"collection {collection} asked for {kind} {target.name}, which no model had"
                )

    def uninstall(self) -> None:
        self._tapes.uninstall()
        self._phases.uninstall()
        self._recording.uninstall()
