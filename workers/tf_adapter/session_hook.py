"""The hooks for `tf.compat.v1` sessions and for estimators.

    hook = SessionHook(out_dir, save_config=SaveConfig(save_interval=100))
    optimizer = hook.wrap_optimizer(tf.compat.v1.train.AdamOptimizer())
    with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
        session.run(train_op)

Every run of the session is a step. Tensors have their names of the graph. On a due step, variables
are read before the run, so that their values are those the step starts with. Other tensors are
fetched with the run, if that does not change what the run does.

The session calls `begin`, `before_run` and `after_run` on the training thread. TensorFlow 2.16 and
later have no estimators.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from smdist.config import TENSORFLOW_GRAPH
from smdist.config.collection import CollectionKeys
from smdist.errors import CaptureError, ConfigurationError
from smdist.format.dtypes import dtype_code
from smdist.identity import ModeKeys
from smdist.planning import StepPlan
from smdist.workers.hook.core import HookCore
from smdist.workers.hook.step_listener import StepListener
from smdist.workers.tf_adapter.base_hook import TensorflowHook
from smdist.workers.tf_adapter.tensor_access import Array, array_of

__all__ = ["EstimatorHook", "SessionHook"]

v1: Any = tf.compat.v1


class SessionHook(TensorflowHook, tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    _framework = TENSORFLOW_GRAPH

    def _attach(self, core: HookCore[Array]) -> StepListener:
        self._graph: Any = None
        self._variables: dict[str, Any] = {}
        # Weak: estimators make a graph and an optimizer for every call.
        self._optimizers: list[weakref.ref[Any]] = []
        self._trained: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self._held: dict[str, Any] = {}  # values of variables before the run
        self._fetched: dict[tuple[StepPlan, tuple[str, ...]], dict[str, Any]] = {}
        return _SessionStepListener(self)

    # -- called by a script --------------------------------------------------------------------

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Capture the gradients that `optimizer` computes or applies, and return it."""
        if not hasattr(optimizer, "compute_gradients"):
            raise ConfigurationError(
                f"wrap_optimizer takes a tf.compat.v1.train.Optimizer, not {optimizer!r}"
            )
        self._core.warn_if_closed()
        if self._core.active and all(known() is not optimizer for known in self._optimizers):
            self._wrap_methods(optimizer)
        return optimizer

    def _wrap_methods(self, optimizer: Any) -> None:
        computing, applying = optimizer.compute_gradients, optimizer.apply_gradients

        def compute_gradients(*args: Any, **kwargs: Any) -> Any:
            pairs = computing(*args, **kwargs)
            self._add_gradients_safely(pairs, computed=True)
            return pairs

        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            self._add_gradients_safely(pairs)
            return applying(pairs, *args, **kwargs)

        for method in (compute_gradients, apply_gradients):
            _replace_method(optimizer, self, method)
        self._optimizers = [known for known in self._optimizers if known() is not None]
        self._optimizers.append(weakref.ref(optimizer))

    def _add_gradients_safely(
        self, pairs: Iterable[tuple[Any, Any]], *, computed: bool = False
    ) -> None:
        if self._core.active:
            try:
                self._add_gradients(pairs, computed)
            except Exception as error:  # noqa: BLE001 (the policy decides)
                self._core.errors.on_exception(error, "looking at gradients")

    def _add_gradients(self, pairs: Iterable[tuple[Any, Any]], computed: bool) -> None:
        gradients = self.get_collection(CollectionKeys.GRADIENTS)
        known = self._trained.setdefault(v1.get_default_graph(), set())
        before = frozenset() if computed else frozenset(known)
        for gradient, variable in pairs:
            # Gradients that the optimizer computed itself are captured as computed, not as applied.
            if gradient is not None and variable.name not in before:
                known.add(variable.name)
                dense = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                gradients.add_tensor_name(dense.name)

    # -- called by the session ----------------------------------------------------------------

    def begin(self) -> None:
        """Sort the variables and losses of the graph, which is complete now, into collections."""
        if not self._core.active:
            return
        try:
            self._read_graph(v1.get_default_graph())
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._core.errors.on_exception(error, "reading the graph")

    def _read_graph(self, graph: Any) -> None:
        self._graph = graph
        self._fetched.clear()
        with graph.as_default():
            variables = v1.global_variables()
            trained = {variable.name for variable in v1.trainable_variables()}
            losses = v1.losses.get_losses()
        self._variables = {variable.name: variable for variable in variables}
        biases = self.get_collection(CollectionKeys.BIASES)
        weights = self.get_collection(CollectionKeys.WEIGHTS)
        rest = self.get_collection(CollectionKeys.OPTIMIZER_VARIABLES)
        owned = self._optimizer_variables(trained)
        for name in self._variables:
            if name in trained:
                (biases if "bias" in name else weights).add_tensor_name(name)
            elif name in owned:
                rest.add_tensor_name(name)
        for loss in losses:
            self.get_collection(CollectionKeys.LOSSES).add_tensor_name(loss.name)

    def _optimizer_variables(self, trained: set[str]) -> set[str]:
        """Return the names of optimizer variables: each begins with the name of a trained variable."""
        paths = tuple(f"{name.partition(':')[0]}/" for name in trained)
        return {name for name in self._variables if name not in trained and name.startswith(paths)}

    def before_run(self, run_context: Any) -> Any:
        """Read variables and choose what to fetch, if the coming step is due.

        The step begins when the run is over: a run that finds no more data is no step.
        """
        clock = self._core.clock
        self._held = {}
        if not self._core.active or clock.idle_forwards_left > 0:
            return None
        try:
            coming = clock.ref.mode_step + clock.has_step
            if self._core.planner.next_due(clock.mode, coming) != coming:
                return None
            plan = self._core.planner.at(clock.mode, coming)
            wanted = {n: v for n, v in self._variables.items() if plan.wants(n) is not None}
            if wanted:
                self._held = run_context.session.run(wanted)
            args = run_context.original_args
            fetched = self._fetches(plan, args.fetches, args.feed_dict or {})
            return v1.train.SessionRunArgs(fetched) if fetched else None
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._core.errors.on_exception(error, f"the step after {clock.step}")
            return None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        clock = self._core.clock
        if not self._core.active:
            return
        if clock.idle_forwards_left > 0:
            clock.idle_forwards_left -= 1
            return
        try:
            if clock.forward():
                self._core.on_step_start()
            if self._core.recorder.plan is not None:
                found = {**self._held, **(run_values.results or {})}
                arrays = [array_of(value) for value in found.values()]
                self._core.recorder.offer_many(tuple(found), arrays)
                self._core.recorder.incomplete_reason = ""
                self._core.recorder.close()
        except Exception as error:  # noqa: BLE001 (the policy decides)
            self._core.errors.on_exception(error, f"step {clock.step}")

    def end(self, session: Any) -> None:
        """Stay open: another session may follow."""

    # -- fetches -----------------------------------------------------------------------------

    def _fetches(self, plan: StepPlan, fetches: Any, feeds: Mapping[Any, Any]) -> dict[str, Any]:
        operations = self._operations(fetches)
        fed = [self._graph.as_graph_element(key).name for key in feeds]
        key = (plan, tuple(sorted([*fed, *(op.name for op in operations)])))
        found = self._fetched.get(key)
        if found is None:
            safe = _SafeFetches(operations, fed)
            found = self._fetched[key] = {
                tensor.name: tensor
                for op in self._graph.get_operations()
                for tensor in op.outputs
                if tensor.name not in self._variables
                and plan.wants(tensor.name) is not None
                and self._fetchable(tensor)
                and safe.include(tensor)
            }
        return found

    def _operations(self, fetches: Any) -> list[Any]:
        found = []
        for item in tf.nest.flatten(fetches):
            if isinstance(item, str):
                item = self._graph.as_graph_element(item)
            element = self._graph.as_graph_element(item)
            found.append(getattr(element, "op", element))
        return found

    def _fetchable(self, tensor: Any) -> bool:
        if not self._graph.is_fetchable(tensor) or not tensor.dtype.is_numpy_compatible:
            return False
        try:
            dtype_code(tensor.dtype.as_numpy_dtype)
        except (CaptureError, TypeError):
            return False
        # The inside of a loop cannot be fetched.
        return tensor.op._get_control_flow_context() is None

    # -- end ----------------------------------------------------------------------------------

    def _forget_fetches(self) -> None:
        self._fetched.clear()

    def _uninstall(self) -> None:
        for known in self._optimizers:
            optimizer = known()
            if optimizer is not None:
                _restore_methods(optimizer)
        self._optimizers.clear()
        self._trained.clear()
        self._fetched.clear()


class _SessionStepListener(StepListener):
    def __init__(self, hook: SessionHook) -> None:
        self._hook = hook

    def incomplete_reason(self) -> str:
        return "an exception interrupted the capture of what its run computed"

    def on_config_change(self) -> None:
        self._hook._forget_fetches()

    def uninstall(self) -> None:
        self._hook._uninstall()


class EstimatorHook(SessionHook):
    """The hook for `tf.estimator`, whose `train`, `evaluate` and `predict` set the mode."""

    _requested_mode: ModeKeys | None = None  # of the next graph, set by the script

    def set_mode(self, mode: ModeKeys) -> None:
        super().set_mode(mode)
        self._requested_mode = mode

    def begin(self) -> None:
        super().begin()
        if self._core.active and self._graph is not None:
            super().set_mode(_mode(self._graph, self._requested_mode))
            self._requested_mode = None


def _mode(graph: Any, requested: ModeKeys | None) -> ModeKeys:
    """Return the mode that an estimator made `graph` for; `requested` decides where it is unclear."""
    keys = v1.GraphKeys
    if graph.get_collection(keys.EVAL_STEP):
        return ModeKeys.EVAL
    if graph.get_collection(keys.TRAIN_OP):
        return ModeKeys.TRAIN
    # Keras optimizers leave no train_op there; estimators leave the loss that they train by.
    guess = ModeKeys.TRAIN if graph.get_collection(keys.LOSSES) else ModeKeys.PREDICT
    return guess if requested is None else requested


def _replace_method(optimizer: Any, hook: SessionHook, method: Any) -> None:
    """Replace the method of that name on this optimizer only."""
    own = vars(optimizer)
    method.hook, method.below = hook, own.get(method.__name__)
    own[method.__name__] = method


def _restore_methods(optimizer: Any) -> None:
    """Remove the methods of closed hooks, as far as no open hook has put its own on top."""
    own = vars(optimizer)
    for name in ("compute_gradients", "apply_gradients"):
        while (hook := getattr(own.get(name), "hook", None)) is not None and not hook._core.active:
            below = own.pop(name).below
            if below is not None:
                own[name] = below


class _SafeFetches:
    """Which tensors can be fetched with a run without changing what it does.

    These are all that it computes, and what follows from that alone (such as a loss that was only
    needed for its gradients).
    """

    def __init__(self, operations: Iterable[Any], fed: Iterable[str]) -> None:
        self._fed = set(fed)
        self._known: dict[str, bool] = {}
        pending = list(operations)
        while pending:
            op = pending.pop()
            if op.name not in self._known:
                self._known[op.name] = True
                pending.extend(_predecessors(op))

    def include(self, tensor: Any) -> bool:
        pending = [tensor.op]
        while pending:
            op = pending[-1]
            if op.name in self._known:
                pending.pop()
                continue
            if any(output.name in self._fed for output in op.outputs):
                self._known[op.name] = True
                continue
            # It has a side effect, a state, or no value.
            if op.op_def is None or op.op_def.is_stateful or op.type.startswith("Placeholder"):
                self._known[op.name] = False
                continue
            unknown = [b for b in _predecessors(op) if b.name not in self._known]
            if unknown:
                pending.extend(unknown)
                continue
            self._known[op.name] = all(self._known[b.name] for b in _predecessors(op))
        return self._known[tensor.op.name]


def _predecessors(op: Any) -> list[Any]:
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]
