"""Recognise Horovod's wrappers of optimizers and tapes by their attributes.

Horovod is never imported here: a script that uses it has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

__all__ = ["awaits_reduction", "is_running", "reducer_of", "reducing"]


def is_running(framework: str, modules: Mapping[str, ModuleType] = sys.modules) -> bool:
    """Check whether `horovod.<framework>` connects several processes."""
    hvd: Any = modules.get(f"horovod.{framework}")
    return hvd is not None and bool(hvd.is_initialized()) and int(hvd.size()) > 1


def awaits_reduction(optimizer: Any) -> bool:
    """Check whether gradients of a torch optimizer are still being reduced.

    Its `step` calls hooks twice: before it waits for the reduction, and right before the update.
    """
    return hasattr(optimizer, "synchronize") and bool(getattr(optimizer, "_handles", None))


def reducing(optimizer: Any) -> Any:
    """Return the Keras optimizer that reduces gradients: `optimizer` or one it wraps, or None."""
    while optimizer is not None:
        if reducer_of(optimizer) is not None and hasattr(optimizer, "_allreduce"):
            return optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)  # of one that scales the loss
    return None


def reducer_of(wrapper: Any) -> Any:
    """Return what an optimizer or tape calls to reduce gradients; None without Horovod."""
    return vars(wrapper).get("_allreduce_grads")
