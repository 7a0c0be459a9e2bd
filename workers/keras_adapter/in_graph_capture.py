"""Capture from inside Keras' own function, for jobs of several processes.

There, the processes meet in the collective operations of their steps. A process that ran a function
of its own for a step that is captured would call collectives that the others do not know, and wait
for ever. So the function stays Keras': while it is traced, its step gets two questions to a variable
beside it, one before and one after, that are false on all steps but those to be captured. On such a
step the graph hands over its tensors. No collective is added, taken away or put in another order,
whether the other processes capture or not.

What the graph can hand over is settled when it is traced. Where more comes to be wanted, Keras makes
its function anew: to trace is no matter of the other processes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from smdist.planning import Planner, StepPlan
from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.keras_adapter.step_function import is_built, sow
from smdist.workers.keras_adapter.taps import Taps, Wants, covers, dense, of_stage
from smdist.workers.keras_adapter.variable_names import Names, all_optimizers
from smdist.workers.tf_adapter.graph_callbacks import tell_when
from smdist.workers.tf_adapter.tensor_access import (
    Array,
    array_of,
    flat_tensors,
    tf_variable,
    unconverted,
)

if TYPE_CHECKING:
    from smdist.workers.keras_adapter.recording import Recording

__all__ = ["Inline", "Owner"]

_SOWN = "_smdist_sown"
_PLANS = 16


class Owner(NamedTuple):
    """The parts of the hook that asks."""

    recording: Recording
    planner: Planner
    errors: ErrorPolicy
    renew: Callable[[], None]  # has Keras make its function anew


class Inline:
    """One of the functions of one model, and the step that is traced into it."""

    def __init__(self, owner: Owner, model: Any, kind: str) -> None:
        self._owner: Owner | None = owner  # None: it is closed
        self._model, self._kind = model, kind
        # Within the scope of a strategy a new variable is a matter of all processes. The scope is
        # this thread's.
        with ThreadPoolExecutor(1) as elsewhere:
            self._armed = elsewhere.submit(_flag).result()
        self.seen = 0  # steps that told of themselves since `arm`
        self.armed = False
        self._blind = False  # was it traced without telling anything?
        self._step: Any = None  # as installed
        self._checked: deque[StepPlan] = deque(maxlen=_PLANS)  # nothing is missing for these
        self.stands_in(None, 0)

    def stands_in(self, function: Any, turn: int) -> None:
        """That is Keras' function from now on, the one of that turn, and not traced yet."""
        self.function, self._turn = function, turn
        self._wants: Wants | None = None  # what every trace of it tells
        self._untold: set[str] = set()  # variables that a trace of it leaves out
        self._optimizers: list[Any] = []  # that its last trace looked at

    # -- around a call of the function --------------------------------------------------------

    def arm(self) -> None:
        self.seen = 0
        owner = self._owner
        if owner is not None and self._wants is not None:
            try:
                self._check(owner, self._wants)
            except Exception as error:  # noqa: BLE001 (the policy decides)
                owner.errors.on_exception(error, f"looking at {self._model.name}")
        self.armed = True
        self._armed.assign(value=True)

    def disarm(self) -> None:
        self._armed.assign(value=False)
        self.armed = False

    def _check(self, owner: Owner, told: Wants) -> None:
        """Can the function tell what is wanted of the coming step? A plan is another one when the
        configuration has changed."""
        optimizers = self._looked_at(owner)
        if list(map(id, optimizers)) != list(map(id, self._optimizers)):
            owner.renew()
            return
        plan = owner.recording.coming_plan
        if plan in self._checked:
            return
        self._checked.append(plan)
        asked = owner.recording.wants(plan, owner.recording.names(self._model))
        if not covers(told, asked) or any(plan.wants(n) is not None for n in self._untold):
            owner.renew()

    def _looked_at(self, owner: Owner) -> list[Any]:
        wrapped = owner.recording.optimizers
        return all_optimizers(self._model, wrapped) if self._kind == "train" else []

    def missed(self) -> None:
        """A step that was due did not tell of itself."""
        if self._blind and self._owner is not None:
            self._owner.errors.warn_once(
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

    def let_go(self) -> None:
        """The hook is closed. Keras' function asks on, and holds what it asks, but not the hook."""
        self._owner = None
        self._checked.clear()
        self._optimizers = []

    def _around(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            taps, optimizers, begun = self._before(data)
            if taps is None:
                return original(data)
            with taps.installed(optimizers):
                taps.begin(data)
                result = original(data)
            self._after(taps, begun)
            return result

        return step

    @unconverted
    def _before(self, data: Any) -> tuple[Taps | None, list[Any], Any]:
        self._sow()
        owner = self._owner
        # Where this makes variables of the model, it is traced once more before it runs.
        self._blind = not is_built(self._model)
        if self._blind or owner is None:
            return None, [], None
        try:
            recording = owner.recording
            # The last trace, of the same step, may have made variables.
            names = recording.names(self._model, anew=True)
            wants = recording.wants_anywhere(names, self._kind)
            optimizers = self._looked_at(owner)
            begun = self._ask(owner, names, data)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            owner.errors.on_exception(error, f"tracing the {self._kind} step of {self._model.name}")
            return None, [], None
        self._wants = wants if self._wants is None else _common(wants, self._wants)
        self._optimizers = optimizers
        return Taps(names, wants, owner.errors), optimizers, begun

    def _ask(self, owner: Owner, names: Names, data: Any) -> Any:
        found = owner.recording.variables(names, self._kind)
        variables = [named for named in found if owner.planner.wanted_anywhere(named.name)]
        described = [named.name for named in variables]
        self._untold |= {named.name for named in found} - set(described)
        with tf.control_dependencies(flat_tensors(data)):  # without a batch there is no step
            return tell_when(
                self._armed,
                lambda: [tf_variable(named.variable).read_value() for named in variables],
                _weakly(self._begin, described),
            )

    @unconverted
    def _after(self, taps: Taps, begun: Any) -> None:
        owner = self._owner
        if owner is None:
            return
        try:
            found = of_stage(taps.end(), owner.recording.synced)
            described = list(found)
            if found:
                with tf.control_dependencies([begun]):
                    tell_when(
                        self._armed,
                        lambda: [dense(value) for value in found.values()],
                        _weakly(self._save, described),
                    )
        except Exception as error:  # noqa: BLE001 (the policy decides)
            owner.errors.on_exception(error, f"tracing the {self._kind} step of {self._model.name}")

    def _sow(self) -> None:
        """The steps of several hooks are traced into one graph."""
        graph = tf.compat.v1.get_default_graph()
        if not getattr(graph, _SOWN, False):
            setattr(graph, _SOWN, True)
            sow(self._turn)

    # -- while it runs, on a thread of TensorFlow's -------------------------------------------

    def _begin(self, names: list[str], arrays: tuple[Array, ...]) -> Any:
        owner = self._owner
        if owner is None:
            return np.bool_(True)
        try:
            self.seen += 1
            owner.recording.begin()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            owner.errors.on_exception(error, "beginning a step")
        return self._save(names, arrays)

    def _save(self, names: list[str], arrays: tuple[Array, ...]) -> Any:
        owner = self._owner
        if owner is None:
            return np.bool_(True)
        try:
            values = [(array,) for array in arrays]
            owner.recording.lanes.offer(tuple(names), values, array_of)
        except Exception as error:  # noqa: BLE001 (the policy decides)
            owner.errors.on_exception(error, "capturing a step")
        return np.bool_(True)


def _common(one: Wants, other: Wants) -> Wants:
    return Wants(*(mine & its for mine, its in zip(one, other, strict=True)))


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
