"""Capture from inside Keras' own function, for jobs of several processes.

There, the processes meet in the collective operations of their steps. A process that ran a function
of its own for a step that is captured would call collectives that the others do not know, and wait
for ever. So the function stays Keras': while it is traced, its step gets two questions to a variable
beside it, one before and one after, that are false on all steps but those to be captured. On such a
step the graph hands over its tensors. No collective is added, taken away or put in another order,
whether the other processes capture or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from smdist.planning import Planner
from smdist.workers.keras_names import Names
from smdist.workers.keras_taps import Taps, dense, of_stage
from smdist.workers.mishaps import Mishaps
from smdist.workers.tf_aside import tell_when
from smdist.workers.tf_host import Array, array_of, flat_tensors, tf_variable, unconverted

if TYPE_CHECKING:
    from smdist.workers.keras_recording import Recording

__all__ = ["Inline"]


class Inline:
    """One of the functions of one model, and the step that is traced into it."""

    def __init__(
        self, recording: Recording, planner: Planner, mishaps: Mishaps, model: Any, kind: str
    ) -> None:
        self._recording, self._planner, self._mishaps = recording, planner, mishaps
        self._model, self._kind = model, kind
        # Within the scope of a strategy a new variable is a matter of all processes. The scope is
        # this thread's.
        with ThreadPoolExecutor(1) as elsewhere:
            self._armed = elsewhere.submit(_flag).result()
        self.seen = 0  # steps that told of themselves since `arm`
        self._blind = False  # was it traced without telling anything?
        self._step: Any = None  # as installed

    # -- around a call of the function --------------------------------------------------------

    def arm(self) -> None:
        self.seen = 0
        self._armed.assign(value=True)

    def disarm(self) -> None:
        self._armed.assign(value=False)

    def missed(self) -> None:
        """A step that was due did not tell of itself."""
        if self._blind:
            self._mishaps.trouble(
                f"{self._model.name} got its variables in its first step, too late for its steps to "
                "be captured: build the model before it is trained (give it an input shape)"
            )

    # -- while it is traced -------------------------------------------------------------------

    def install(self) -> None:
        name, own = f"{self._kind}_step", vars(self._model)
        step: Any = self._around(getattr(self._model, name))
        step.before, step.gone = own.get(name), False
        self._step = own[name] = step

    def remove(self) -> None:
        """Another hook may have put its own around it: then this one goes when that does."""
        name, own = f"{self._kind}_step", vars(self._model)
        if self._step is not None:
            self._step.gone = True
        while getattr(own.get(name), "gone", False):
            before = own[name].before
            if before is None:
                del own[name]
            else:
                own[name] = before

    def _around(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            taps, begun = self._before(data)
            if taps is None:
                return original(data)
            with taps.installed(self._recording.optimizers_of(self._model)):
                taps.begin(data)
                result = original(data)
            self._after(of_stage(taps.end(), self._recording.synced), begun)
            return result

        return step

    @unconverted
    def _before(self, data: Any) -> tuple[Taps | None, Any]:
        if not self._model.built:
            # Where this makes variables of the model, it is traced once more before it runs.
            self._blind = True
            return None, None
        self._blind = False
        names = self._recording.names(self._model)
        wants = self._recording.wants_anywhere(names, self._kind)
        variables = self._variables(names)

        described = [name for name, _ in variables]
        with tf.control_dependencies(flat_tensors(data)):  # without a batch there is no step
            begun = tell_when(
                self._armed,
                lambda: [tf_variable(variable).read_value() for _, variable in variables],
                _weakly(self._begin, described),
            )
        return Taps(names, wants, self._mishaps), begun

    @unconverted
    def _after(self, seen: dict[str, Any], begun: Any) -> None:
        described = list(seen)
        if seen:
            with tf.control_dependencies([begun]):
                tell_when(
                    self._armed,
                    lambda: [dense(value) for value in seen.values()],
                    _weakly(self._save, described),
                )

    def _variables(self, names: Names) -> list[tuple[str, Any]]:
        found = [*names.variables, *self._recording.optimizer_variables(names, self._kind)]
        wanted = self._planner.wanted_anywhere
        return [(named.name, named.variable) for named in found if wanted(named.name)]

    # -- while it runs, on a thread of TensorFlow's -------------------------------------------

    def _begin(self, names: list[str], arrays: tuple[Array, ...]) -> Any:
        try:
            self.seen += 1
            with self._recording.without_variables():
                self._recording.begin()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, "beginning a step")
        return self._save(names, arrays)

    def _save(self, names: list[str], arrays: tuple[Array, ...]) -> Any:
        try:
            values = [(array,) for array in arrays]
            self._recording.lanes.offer(tuple(names), values, array_of)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._mishaps.handle(error, "capturing a step")
        return np.bool_(True)


def _weakly(method: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """TensorFlow keeps a function that a graph calls for as long as the process lives, and all that it
    holds: it must not be the model."""
    found = weakref.WeakMethod(method)

    def listen(*arrays: Array) -> Any:
        held = found()
        return np.bool_(True) if held is None else held(names, arrays)

    return listen


def _flag() -> Any:
    with tf.device("CPU:0"):
        return tf.Variable(False, trainable=False, name="smdist_armed")
