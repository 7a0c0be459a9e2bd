"""One event loop on one daemon thread, for callers that are not asynchronous.

`run` may be called from any thread except the loop's own. After a fork the child starts a loop of its
own at its first `run` and leaves the parent's alone. At exit everything registered by `close_with` is
closed, then the loop is stopped and closed.
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
                self.loop.run_until_complete(asyncio.wait_for(_close_all(), _CLOSE_TIMEOUT_S))
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks))
            # Not shutdown_default_executor: it starts a thread, which an exiting interpreter refuses.
            # The executor's threads have been joined already.
            self.loop.close()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed already
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=5.0)


_CLOSE_TIMEOUT_S = 2.0
_closers: dict[weakref.finalize[..., Any], Callable[[], Coroutine[Any, Any, None]]] = {}
_lock = threading.Lock()
_current: _Loop | None = None
# Closing a forked copy would unregister the parent's descriptors from the epoll they share, and
# collecting it would warn of an unclosed loop: it is kept, untouched, until the process ends.
_inherited: list[_Loop] = []


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` on the loop and return its result. An interrupt (Ctrl-C) cancels it."""
    try:
        background = _background()
    except RuntimeError:
        return _run_here(coroutine)
    if threading.current_thread() is background.thread:
        coroutine.close()
        raise RuntimeError(
            "run() was called on the event loop that it would wait for; await instead"
        )
    return _Call(coroutine, background.loop).wait()


class _Call(Generic[T]):
    """A coroutine that runs on the loop. An interrupt of the waiting thread always cancels it.

    `asyncio.run_coroutine_threadsafe` does not: it returns its future after the coroutine may have
    begun, and an interrupt may come in between.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine, self._loop = coroutine, loop
        self._done: Future[T] = Future()
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False

    def wait(self) -> T:
        try:
            self._loop.call_soon_threadsafe(self._begin)
            return self._done.result()
        except BaseException:
            self._cancelled = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._cancel)
            raise

    def _begin(self) -> None:
        if self._cancelled:
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
    """Run `close` on the loop when `owner` is garbage-collected, or at exit."""

    def begin() -> None:
        # Any thread may collect, in the middle of anything: take no lock, do not wait.
        if _closers.pop(ending, None) is not None and _current is not None:
            work = close()
            try:
                asyncio.run_coroutine_threadsafe(work, _current.loop)
            except RuntimeError:  # the loop has ended
                work.close()

    ending = weakref.finalize(owner, begin)
    ending.atexit = False  # the loop runs `_closers` itself before it ends
    _closers[ending] = close


async def _close_all() -> None:
    closers = [_closers.pop(ending) for ending in tuple(_closers)]
    await asyncio.gather(*(close() for close in closers), return_exceptions=True)


def _run_here(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run on a new loop in this thread: an exiting interpreter starts no threads."""
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
    _closers.clear()
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
