"""A job of four real ranks, one of them slow, then stopped, then killed, as its coordinator sees it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from smdist.coordination.service.directory_watcher import DirectoryWatcher
from smdist.coordination.service.hint_server import INBOX_KEY
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer, load_view
from smdist.coordination.view.membership import LivenessTimeouts
from smdist.coordination.view.status import RankLine
from smdist.processes import is_stopped
from smdist.storage.local import LocalStore
from tests.faults.launcher import Launcher, Started, drained
from tests.support.coordinator_driver import from_scratch
from tests.support.waiting import until_async

pytestmark = pytest.mark.ranks

RANKS, STEPS, SLOW, VICTIM = 4, 200, 3, 2
# Ranks beat every 5 seconds.
TIMEOUTS = LivenessTimeouts(lost_after_s=15.0, lagging_after_s=1.5)
SCRIPT = """
import time
from pathlib import Path
hurry = Path(order.folder).parent / "hurry"
def pace(step):
    if not hurry.exists():
        time.sleep(order.arguments["pause_s"])
train(order, before_step=pace)
"""


def start(launcher: Launcher, folder: Path, numbers: Iterable[int]) -> list[Started]:
    return [
        launcher.start(
            folder / f"rank-{rank}",
            SCRIPT,
            rank=rank,
            world=RANKS,
            steps=STEPS,
            width=16,
            pause_s=1.0 if rank == SLOW else 0.3,
            hook={
                "out_dir": str(folder / "run"),
                "spool_dir": str(folder / "spool"),
                "linger_s": 0.1,
                "include_collections": ["losses"],
            },
        )
        for rank in numbers
    ]


def test_slow_stopped_and_killed(launcher: Launcher, tmp_path: Path) -> None:
    async def act() -> None:
        stop = asyncio.Event()
        url = str(tmp_path / "run")
        watch = DirectoryWatcher(url, interval_s=0.2, timeouts=TIMEOUTS, hint_host="127.0.0.1")
        running = asyncio.create_task(watch.run(stop))
        ranks = start(launcher, tmp_path, [0])
        # An uploader looks for its listener with its first manifest, and then not for a while.
        await until_async(
            (tmp_path / "run" / INBOX_KEY).exists, "the coordinator to see it", about=lambda: ranks
        )
        ranks += start(launcher, tmp_path, range(1, RANKS))
        await until_async(watch.runs, "the coordinator to see it", about=lambda: ranks)
        await follow(watch.watcher, ranks, lambda: (tmp_path / "hurry").touch())
        stop.set()
        await running
        await watch.close()

    asyncio.run(act())
    store = LocalStore(tmp_path / "run")
    pointer = msgspec.json.decode((tmp_path / "run" / POINTER_KEY).read_bytes(), type=Pointer)
    loaded = asyncio.run(load_view(store, pointer))
    assert loaded.view.canonical() == from_scratch(store).canonical()
    drained(tmp_path / "spool")


async def follow(
    watcher: Callable[[], RunWatcher], ranks: list[Started], hurry: Callable[[], None]
) -> None:
    def line(rank: int) -> RankLine:
        return watcher().queries.status().ranks[rank]

    def about() -> object:
        return watcher().queries.status(), ranks

    await until_async(
        lambda: len(watcher().queries.status().ranks) == RANKS,
        "the coordinator to see it",
        about=about,
    )
    await until_async(
        lambda: line(SLOW).status == "lagging" and line(SLOW).behind_steps > 2,
        "the coordinator to see it",
        about=about,
    )
    assert line(SLOW).behind_s > TIMEOUTS.lagging_after_s
    assert watcher().queries.latest_complete_step() <= line(SLOW).step
    seen = watcher().queries.latest_complete_step()
    await until_async(
        lambda: watcher().queries.latest_complete_step() > seen,
        "the coordinator to see it",
        about=about,
    )
    assert watcher().queries.status().hints > 0

    ranks[SLOW].kill(signal.SIGSTOP)
    await until_async(lambda: is_stopped(ranks[SLOW].pid), "the coordinator to see it", about=about)
    trained = max(one.step for one in ranks[SLOW].evidence())
    await until_async(lambda: line(SLOW).status == "lost", "the coordinator to see it", about=about)
    assert "lost" not in {line(rank).status for rank in range(RANKS) if rank != SLOW}
    step = line(0).step - 1
    assert watcher().queries.latest_complete_step() <= trained
    await until_async(
        lambda: watcher().queries.missing(step) == {SLOW: "lost"},
        "the coordinator to see it",
        about=about,
    )
    assert watcher().queries.step(step).standing == "partial"

    ranks[VICTIM].kill()
    await until_async(
        lambda: line(VICTIM).status == "lost", "the coordinator to see it", about=about
    )
    died = line(VICTIM).step

    ranks[SLOW].kill(signal.SIGCONT)
    hurry()
    await until_async(
        lambda: watcher().queries.step(step).complete or died < step,
        "the coordinator to see it",
        about=about,
    )
    await until_async(
        lambda: watcher().state == "finished", "the coordinator to see it", about=about
    )
    assert watcher().queries.latest_complete_step() == died
    assert watcher().queries.missing(STEPS - 1) == {VICTIM: "lost"}
    assert watcher().queries.missing(min(step, died)) == {}
