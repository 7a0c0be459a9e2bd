"""One event loop on one daemon thread, for callers that are not asynchronous.

`run` may be called from any thread but the loop's own. After a fork the child gets a loop of its
own at its first `run`; the parent's is left alone. At exit the loop is stopped and closed, after
what was given to `close_with` has been.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

__all__ = ["close_with", "run"]

T = TypeVar("T")


class _Loop:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._work, name="smdist-loop", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            self.loop.close()
            raise

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            with contextlib.suppress(asyncio.TimeoutError):
                self.loop.run_until_complete(asyncio.wait_for(_close_kept(), _FAREWELL_S))
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks))
            # Not shutdown_default_executor: it starts a thread, which an exiting interpreter refuses,
            # and the executor's threads have been joined before this.
            self.loop.close()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed already
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=5.0)


_FAREWELL_S = 2.0
_kept: dict[weakref.finalize[..., Any], Callable[[], Coroutine[Any, Any, None]]] = {}
_lock = threading.Lock()
_current: _Loop | None = None
# Closing a forked copy would unregister the parent's descriptors from the epoll they share, and
# collecting it would warn of an unclosed loop: it is kept, untouched, until the process ends.
_inherited: list[_Loop] = []


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of `coroutine`. An interrupt (Ctrl-C) cancels it."""
    try:
        background = _background()
    except RuntimeError:
        return _run_here(coroutine)
    if threading.current_thread() is background.thread:
        coroutine.close()
        raise RuntimeError("run() was called from the loop that it would wait for")
    return _Call(coroutine, background.loop).wait()


class _Call(Generic[T]):
    """A coroutine on its way. An interrupt at any moment after it was begun cancels it.

    `asyncio.run_coroutine_threadsafe` hands out its future only after the coroutine may have begun.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine, self._loop = coroutine, loop
        self._done: Future[T] = Future()
        self._task: asyncio.Task[T] | None = None
        self._given_up = False

    def wait(self) -> T:
        try:
            self._loop.call_soon_threadsafe(self._begin)
            return self._done.result()
        except BaseException:
            self._given_up = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._cancel)
            raise

    def _begin(self) -> None:
        if self._given_up:
            self._coroutine.close()
            return
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._done.cancel()
        elif error := task.exception():
            self._done.set_exception(error)
        else:
            self._done.set_result(task.result())


def close_with(owner: object, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `close` on the loop when `owner` is collected, or at exit."""

    def begin() -> None:
        # From whatever thread collects, in the middle of anything: no lock, no waiting.
        if _kept.pop(ending, None) is not None and _current is not None:
            work = close()
            try:
                asyncio.run_coroutine_threadsafe(work, _current.loop)
            except RuntimeError:  # it has ended
                work.close()

    ending = weakref.finalize(owner, begin)
    ending.atexit = False  # the loop may be gone by then; it sees to `_kept` before it ends
    _kept[ending] = close


async def _close_kept() -> None:
    closers = [_kept.pop(ending) for ending in tuple(_kept)]
    await asyncio.gather(*(close() for close in closers), return_exceptions=True)


def _run_here(coroutine: Coroutine[Any, Any, T]) -> T:
    """The interpreter is going down and starts no more threads; asyncio.run would want one."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def _background() -> _Loop:
    global _current
    with _lock:
        if _current is None or not _current.thread.is_alive():
            _current = _Loop()
        return _current


def _after_fork() -> None:
    global _current, _lock
    _lock = threading.Lock()
    _kept.clear()
    if _current is not None:
        _inherited.append(_current)
        _current = None


def _at_exit() -> None:
    global _current
    with _lock:
        background, _current = _current, None
    if background is not None:
        background.stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
