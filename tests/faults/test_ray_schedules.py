"""A job writes while its coordinator's process, node or whole Ray is killed, drawn by seed.

The coordinator finishes each run all the same, and what it has merged is what the ranks wrote. The
job never notices: nothing of it fails or waits, whether there is a coordinator or not.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer, load_view
from smdist.identity import ModeKeys
from smdist.storage import LocalStore
from smdist.storage import loop_thread as sync
from tests.servers.ray_cluster import Cluster, Driver, Node, start_cluster
from tests.support.coordinator_driver import from_scratch
from tests.support.run_builder import RankWriter, RunBuilder
from tests.support.sampling import rotating_share
from tests.support.waiting import until

pytestmark = pytest.mark.ray

ROUNDS, RUNS = 10, 3  # schedules that kill the process: 30


class Job(threading.Thread):
    """A few ranks that save steps at their own pace."""

    def __init__(self, place: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self.store, self.random = LocalStore(place), random.Random(seed)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - told by `check`
            self.error = error

    def _run(self) -> None:
        draw = self.random
        run = RunBuilder(self.store)
        world = draw.randint(2, 4)
        ranks = [run.rank(rank, world) for rank in range(world)]
        todo = {rank: draw.randint(8, 16) for rank in range(world)}
        done = dict.fromkeys(todo, 0)
        while todo:
            rank = draw.choice(list(todo))
            ranks[rank].now = time.time()
            if done[rank] == todo[rank]:
                ranks[rank].end()
                del todo[rank]
                continue
            self._step(ranks[rank], done[rank])
            done[rank] += 1
            time.sleep(draw.choice((0.0, 0.02, 0.08)))

    def _step(self, rank: RankWriter, step: int) -> None:
        draw = self.random
        mode = ModeKeys.EVAL if step % 5 == 4 else ModeKeys.TRAIN
        if draw.random() < 0.1:
            rank.drop(mode, step, "b")
        rank.step(mode, step, {"w": np.full(3, step, np.float32)})
        if draw.random() < 0.7:
            rank.flush()
        elif draw.random() < 0.5:
            rank.beat(time.time())

    def pointer(self) -> Pointer | None:
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode(
                (Path(self.store.url) / POINTER_KEY).read_bytes(), type=Pointer
            )
        return None

    def final(self) -> bool:
        pointer = self.pointer()
        return not self.is_alive() and pointer is not None and pointer.final

    def judge(self) -> None:
        """Byte for byte what is folded from the ranks' own objects."""
        pointer = self.pointer()
        assert pointer is not None
        merged = sync.run(load_view(self.store, pointer)).view
        assert merged.canonical() == from_scratch(self.store).canonical()


def actors(kind: str, nodes: Sequence[Node]) -> list[int]:
    """Their processes; Ray names one by what it runs at the moment."""
    found = []
    for pid in (pid for node in nodes for pid in node.processes()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                found.append(pid)
    return found


def kill(pids: Sequence[int]) -> int:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with start_cluster() as one:
        yield one


def start(driver: Driver, place: Path, shards: int = 1) -> dict[str, object]:
    chosen = {"interval_s": 0.1, "lost_after_s": 600.0, "lease_s": 3.0, "shards": shards}
    began: dict[str, object] = driver("start", settings={"watch": str(place), **chosen})
    return began


def judge(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.join(120)
        assert job.error is None, job.error
        until(job.final, f"{job.store.url} is finished", 150)
        job.judge()


@pytest.mark.parametrize("round_", rotating_share(range(ROUNDS), 3))
def test_process_killed(cluster: Cluster, tmp_path: Path, round_: int) -> None:
    draw, place = random.Random(round_), tmp_path / "jobs"
    with Driver(cluster.address, tmp_path / "driver.log") as driver:
        start(driver, place)
    # Nobody is there to start anything again.
    jobs = [Job(place / f"run-{i}", 100 * round_ + i) for i in range(RUNS)]
    for job in jobs:
        job.start()
    kills = 0
    for _ in range(draw.randint(1, 3)):
        time.sleep(draw.uniform(0.0, 1.2))
        kills += kill(until(lambda: actors("Coordinator", [cluster.head]), "there is one to kill"))
    judge(jobs)
    assert kills
    with Driver(cluster.address, tmp_path / "driver.log") as driver:
        driver("ask", watch=str(place), method="stop")


@pytest.mark.parametrize("seed", rotating_share(range(2), 2))
def test_shards_killed(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    """And in between the process that they read for, with which all of them end."""
    draw, place = random.Random(seed), tmp_path / "jobs"
    with Driver(cluster.address, tmp_path / "driver.log") as driver:
        start(driver, place, shards=3)
        jobs = [Job(place / f"run-{i}", 3000 * (seed + 1) + i) for i in range(2)]
        for job in jobs:
            job.start()
        for kind in ("ShardActor", "Coordinator", "ShardActor"):
            time.sleep(draw.uniform(0.0, 0.8))
            found = until(partial(actors, kind, [cluster.head]), f"there is a {kind}")
            kill([draw.choice(found)])
        judge(jobs)

        def states() -> set[str]:
            return {one["state"] for one in driver("ask", watch=str(place), method="runs").values()}

        until(lambda: states() == {"finished"}, "the coordinator itself takes them for finished")
        driver("ask", watch=str(place), method="stop")
        until(lambda: not actors("ShardActor", [cluster.head]), "the shards are gone too")


@pytest.mark.parametrize("seed", rotating_share(range(2), 2))
def test_node_killed(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with Driver(cluster.address, tmp_path / "driver.log") as driver:
        node = cluster.add_node()
        try:
            place, began = placed_on(node, driver, tmp_path)
            jobs = [Job(place / f"run-{i}", 1000 * (seed + 1) + i) for i in range(2)]
            for job in jobs:
                job.start()
            time.sleep(draw.uniform(0.0, 1.0))
        finally:
            node.kill()
        judge(jobs)
        now = driver("ask", watch=str(place), method="info")
        assert now["node"] != began["node"]
        for name in tmp_path.glob("jobs-*"):
            driver("ask", watch=str(name), method="stop")


def placed_on(node: Node, driver: Driver, tmp_path: Path) -> tuple[Path, dict[str, object]]:
    """Ray puts an actor that asks for nothing anywhere."""
    for attempt in range(30):
        place = tmp_path / f"jobs-{attempt}"
        place.mkdir()
        began = start(driver, place)
        if began["pid"] in node.processes():
            return place, began
    raise AssertionError("no actor was placed on the second node")


@pytest.mark.parametrize("seed", rotating_share(range(2), 2))
def test_whole_ray_killed(tmp_path: Path, seed: int) -> None:
    draw, place = random.Random(seed), tmp_path / "jobs"
    jobs = [Job(place / f"run-{i}", 2000 * (seed + 1) + i) for i in range(2)]
    with start_cluster() as cluster:
        with Driver(cluster.address, tmp_path / "driver.log") as driver:
            start(driver, place)
            for job in jobs:
                job.start()
            time.sleep(draw.uniform(0.2, 1.0))
            cluster.kill()
        cluster.start()
        with Driver(cluster.address, tmp_path / "driver.log") as driver:
            assert driver("names") == []
            start(driver, place)
            judge(jobs)
            driver("ask", watch=str(place), method="stop")
