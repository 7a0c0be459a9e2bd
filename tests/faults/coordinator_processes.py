"""A coordinator as a process of its own, without Ray: to be killed.

Run as a program it imports all that is needed once, and then forks a process for each order, like
`job.py`.
"""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

from smdist.coordination.service.directory_watcher import DirectoryWatcher
from smdist.coordination.view.membership import LivenessTimeouts
from smdist.errors import StoreError
from smdist.storage import open_store
from tests.faults.job import Order, _become, _serve


def coordinate(order: Order) -> None:
    """Watches until the run has finished; says so in a file."""
    asyncio.run(_coordinate(order))


async def _coordinate(order: Order) -> None:
    stop = asyncio.Event()
    timeouts = LivenessTimeouts(
        lost_after_s=order.arguments.get("lost_after_s", 1.0), lagging_after_s=0.5
    )
    watch = DirectoryWatcher(
        order.arguments["url"],
        interval_s=0.05,
        timeouts=timeouts,
        writer=order.arguments.get("writer"),
        take_over=order.arguments.get("take_over", False),
        hint_host="127.0.0.1",
    )
    running = asyncio.create_task(watch.run(stop))
    told = ""
    while not stop.is_set():
        states = [status.state for status in watch.runs().values()]
        if states and states[0] != told:
            told = states[0]
            (Path(order.folder) / told).touch()
        if told in ("finished", "superseded"):
            stop.set()
        await asyncio.sleep(0.01)
    await running
    await watch.close()


def _warm() -> None:
    async def ask() -> None:
        store = open_store("s3://warm/x?endpoint_url=http://127.0.0.1:9", deadline_s=0.0)
        try:
            await store.put("x", (b"x",))
        except StoreError:
            pass
        finally:
            await store.close()

    os.environ.update(AWS_ACCESS_KEY_ID="warm", AWS_SECRET_ACCESS_KEY="warm")
    asyncio.run(ask())


def _main() -> None:
    _warm()
    gc.collect()
    gc.freeze()
    os.write(1, b"0\n")
    order = _serve()
    exec(compile(order.script, "script", "exec"), {**globals(), **_become(order)})  # noqa: S102


if __name__ == "__main__":
    _main()
