"""Observe what a `tf.GradientTape` computes, on one tape, including the tapes of Horovod.

`observe_tape` is called by `TapeLoops` while a step is traced or run, on the training thread. Errors
of the script's own calls pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smdist.workers import horovod_support as horovod
from smdist.workers.tf_adapter.tensor_access import unconverted

__all__ = ["SaveGradients", "observe_tape"]

SaveGradients = Callable[[Any, Any, Any], None]  # takes a target, variables and their gradients


def observe_tape(
    tape: Any, before: Callable[[], None], save: SaveGradients, *, synced: bool
) -> None:
    """Call `before` and `save` around each `tape.gradient(...)` of the script.

    `synced`: save gradients as they are after a reduction, if there is one.
    """
    if horovod.reducer_of(tape) is not None:  # such a tape has no Jacobians
        vars(tape)["gradient"] = unconverted(_around_reduction(tape, before, save, synced))
        return
    kind = type(tape)
    within: list[Any] = []  # running methods that call `gradient` for each row of their result

    def gradient(own: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if within:
            return kind.gradient(own, target, sources, *args, **kwargs)
        before()
        result = kind.gradient(own, target, sources, *args, **kwargs)
        if synced and horovod.reducer_of(own) is not None:
            _save_after_reduction(own, lambda variables, found: save(target, variables, found))
        else:
            save(target, sources, result)
        return result

    methods = {"gradient": unconverted(gradient)}
    for name in ("jacobian", "batch_jacobian"):
        if hasattr(kind, name):
            methods[name] = unconverted(_around_jacobian(getattr(kind, name), before, within))
    # Not set on the instance: Horovod makes another tape, whose class is derived from this one's.
    tape.__class__ = type(kind.__name__, (kind,), methods)


def _around_jacobian(original: Any, before: Callable[[], None], within: list[Any]) -> Any:
    """Wrap a method whose own calls of `gradient` are not losses of the script."""

    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if not within:
            before()
        within.append(original)
        try:
            return original(*args, **kwargs)
        finally:
            within.pop()

    return jacobian


def _around_reduction(
    tape: Any, before: Callable[[], None], save: SaveGradients, synced: bool
) -> Any:
    """Wrap `gradient` of a Horovod tape, and see gradients before its reduction as well."""
    original, reducer = tape.gradient, horovod.reducer_of(tape)

    def gradient(target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        local: dict[int, Any] = {}

        def reduce(gradients: Any, variables: Any, *more: Any) -> Any:
            local.update(zip(map(id, variables), gradients, strict=True))
            return reducer(gradients, variables, *more)

        before()
        vars(tape)["_allreduce_grads"] = reduce
        try:
            result = original(target, sources, *args, **kwargs)
        finally:
            vars(tape)["_allreduce_grads"] = reducer
        pairs = zip(sources, result, strict=True)
        save(target, sources, result if synced else [local.get(id(v), g) for v, g in pairs])
        return result

    return gradient


def _save_after_reduction(tape: Any, save: Callable[[Any, Any], None]) -> None:
    """Pass to `save` what the next reduction of `tape` returns."""
    reducer = horovod.reducer_of(tape)

    def reduce(gradients: Any, variables: Any, *more: Any) -> Any:
        vars(tape)["_allreduce_grads"] = reducer
        found = reducer(gradients, variables, *more)
        save(variables, found)
        return found

    vars(tape)["_allreduce_grads"] = unconverted(reduce)
