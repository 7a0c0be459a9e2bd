"""The open hooks of this process: closed when it ends, abandoned in its forks.

Processes forked by `multiprocessing` do not run `atexit` functions. They run finalizers of their own,
while the exception that ended the process is still being handled.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

__all__ = ["enabled", "open_hooks", "register", "unregister"]

_OFF = ("0", "false", "off", "no")


class OpenHook(Protocol):
    @property
    def out_dir(self) -> str: ...
    def flush(self, timeout_s: float | None = None) -> bool: ...
    def at_exit(self, reason: str) -> None: ...
    def after_fork(self) -> None: ...


_open: list[OpenHook] = []
_installed = False
_child = 0  # the process of multiprocessing that will run `_at_child_exit`


def enabled() -> bool:
    """Check that neither `USE_SMDIST=0` nor smdebug's `USE_SMDEBUG=0` switches hooks off."""
    names = ("USE_SMDIST", "USE_SMDEBUG")
    return all(os.environ.get(name, "").strip().lower() not in _OFF for name in names)


def register(hook: OpenHook) -> None:
    """Keep `hook` until it is closed: a script may drop its reference long before it ends."""
    global _installed, _child
    if not _installed:
        _installed = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)
    if _child != os.getpid() and _forked_by_multiprocessing():
        from multiprocessing.util import Finalize

        _child = os.getpid()
        Finalize(None, _at_child_exit, exitpriority=0)
    _open.append(hook)


def open_hooks() -> tuple[OpenHook, ...]:
    return tuple(_open)


def unregister(hook: OpenHook) -> None:
    _open[:] = [other for other in _open if other is not hook]


def _forked_by_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")  # imported in each of its children
    return process is not None and process.parent_process() is not None


def _at_exit() -> None:
    _close_all(_uncaught())


def _at_child_exit() -> None:
    _close_all(_reason(sys.exc_info()[1]))


def _close_all(reason: str) -> None:
    for hook in tuple(_open):
        hook.at_exit(reason)


def _after_fork() -> None:
    for hook in tuple(_open):
        hook.after_fork()
    _open.clear()


def _uncaught() -> str:
    """Return what ended the interpreter; empty for an orderly end."""
    # In a notebook these belong to an earlier cell.
    if hasattr(sys, "ps1"):
        return ""
    return _reason(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


def _reason(error: BaseException | None) -> str:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {error}"
