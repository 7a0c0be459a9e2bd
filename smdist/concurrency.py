"""Run several awaitables at a time: a bounded gather, and an await that cancellation cannot cut short.

Called on any event loop, by everything that sends or reads several objects of a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

__all__ = ["await_despite_cancellation", "bounded_gather"]

A = TypeVar("A")
T = TypeVar("T")


async def bounded_gather(
    call: Callable[[A], Awaitable[T]], items: Iterable[A], limit: int
) -> list[T]:
    """Await `call(item)` for every item, at most `limit` at a time.

    Returns the results in the order of `items`. On the first error, or when the caller is cancelled,
    the other calls are cancelled; the error is raised after all of them have ended. Calls that were
    not started by then are never started.
    """
    todo = list(items)
    if len(todo) < 2:
        return [await call(item) for item in todo]
    results: dict[int, T] = {}
    queue = iter(enumerate(todo))

    async def work() -> None:
        for place, item in queue:
            results[place] = await call(item)

    # Not asyncio.gather: cancelled twice, it would interrupt the cleanup of the calls.
    tasks = [asyncio.ensure_future(work()) for _ in range(min(limit, len(todo)))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await await_despite_cancellation(asyncio.wait(tasks))
    for task in tasks:
        if not task.cancelled():
            task.result()
    if len(results) < len(todo):
        raise asyncio.CancelledError
    return [results[place] for place in range(len(todo))]


async def await_despite_cancellation(work: Awaitable[T]) -> T:
    """Await `work` to its end even if the caller is cancelled; raise the cancellation afterwards."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # noqa: PERF203
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result
