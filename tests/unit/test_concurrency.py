"""bounded_gather: order, limit, and that nothing runs on after an error or a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from smdist.concurrency import await_despite_cancellation, bounded_gather


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_results_come_in_order_and_the_limit_holds(count: int) -> None:
    running = most = 0

    async def call(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(count - item):  # later items end first
            await asyncio.sleep(0)
        running -= 1
        return 10 * item

    assert asyncio.run(bounded_gather(call, range(count), 3)) == [10 * i for i in range(count)]
    assert most == min(count, 3)


def test_the_first_error_cancels_the_rest_and_starts_no_more() -> None:
    started: list[int] = []
    cleaned: list[int] = []

    async def call(item: int) -> None:
        started.append(item)
        if item == 1:
            raise ValueError("no")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up may take a moment
            cleaned.append(item)

    with pytest.raises(ValueError, match="no"):
        asyncio.run(bounded_gather(call, range(5), 2))
    assert started == [0, 1]
    assert cleaned == [0]


def test_a_second_cancellation_waits_for_the_cleanup() -> None:
    started = asyncio.Event()
    cleaned: list[str] = []

    async def call(item: str) -> None:
        if item == "b":
            started.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            cleaned.append(item)

    async def main() -> None:
        task = asyncio.ensure_future(bounded_gather(call, "ab", 2))
        await started.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(cleaned) == ["a", "b"]

    asyncio.run(main())


def test_uncancellable_work_ends_before_its_cancellation_is_raised() -> None:
    ended: list[bool] = []

    async def work() -> None:
        await asyncio.sleep(0)
        ended.append(True)

    async def main() -> None:
        task = asyncio.ensure_future(await_despite_cancellation(work()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [True]
