"""What is known of Horovod's wrappers, which are recognised by what they carry.

Nothing of Horovod is imported: a script that uses it has, and one that does not pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

__all__ = ["awaits_reduction", "is_running", "reducer_of", "reducing"]


def is_running(framework: str, modules: Mapping[str, ModuleType] = sys.modules) -> bool:
    """Are there several processes that `horovod.<framework>` connects?"""
    hvd: Any = modules.get(f"horovod.{framework}")
    return hvd is not None and bool(hvd.is_initialized()) and int(hvd.size()) > 1


def awaits_reduction(optimizer: Any) -> bool:
    """torch: are gradients of this optimizer still being reduced?

    Its `step` calls hooks twice: before it waits for that, and again right before the update.
    """
    return hasattr(optimizer, "synchronize") and bool(getattr(optimizer, "_handles", None))


def reducing(optimizer: Any) -> Any:
    """Keras: `optimizer` or what it wraps, whichever reduces gradients when it computes them; None:
    neither does."""
    while optimizer is not None:
        if reducer_of(optimizer) is not None and hasattr(optimizer, "_allreduce"):
            return optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)  # of one that scales the loss
    return None


def reducer_of(wrapper: Any) -> Any:
    """What an optimizer or a tape calls with gradients and variables; None without Horovod."""
    return vars(wrapper).get("_allreduce_grads")
