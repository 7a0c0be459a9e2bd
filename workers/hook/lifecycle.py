"""Hooks that live in this process: closed when it ends, silent in its forks.

Processes that `multiprocessing` forked leave without what `atexit` knows; they have a registry of
their own, which is run while whatever ended the process is still being handled.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

__all__ = ["enabled", "enter", "leave", "living"]

_OFF = ("0", "false", "off", "no")


class Living(Protocol):
    def at_exit(self, reason: str) -> None: ...
    def after_fork(self) -> None: ...


_living: list[Living] = []
_watching = False
_child = 0  # the process of multiprocessing that will run `_at_child_exit`


def enabled() -> bool:
    """Not switched off by `USE_SMDIST=0`, or `USE_SMDEBUG=0` as in scripts of before."""
    names = ("USE_SMDIST", "USE_SMDEBUG")
    return all(os.environ.get(name, "").strip().lower() not in _OFF for name in names)


def enter(hook: Living) -> None:
    """Keep `hook` until it is closed: a script may let go of it long before it ends."""
    global _watching, _child
    if not _watching:
        _watching = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)
    if _child != os.getpid() and _of_multiprocessing():
        from multiprocessing.util import Finalize

        _child = os.getpid()
        Finalize(None, _at_child_exit, exitpriority=0)
    _living.append(hook)


def living() -> tuple[Living, ...]:
    return tuple(_living)


def leave(hook: Living) -> None:
    _living[:] = [other for other in _living if other is not hook]


def _of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")  # any of its children has it
    return process is not None and process.parent_process() is not None


def _at_exit() -> None:
    _close_all(_uncaught())


def _at_child_exit() -> None:
    _close_all(_reason(sys.exc_info()[1]))


def _close_all(reason: str) -> None:
    for hook in tuple(_living):
        hook.at_exit(reason)


def _after_fork() -> None:
    for hook in tuple(_living):
        hook.after_fork()
    _living.clear()


def _uncaught() -> str:
    """What ended the interpreter, empty for an orderly end."""
    # In a notebook these are of some cell, long ago.
    if hasattr(sys, "ps1"):
        return ""
    return _reason(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


def _reason(error: BaseException | None) -> str:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {error}"
