"""Coordinator processes are killed at random moments while a job writes into a real store."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer, load_view
from smdist.errors import ObjectNotFound
from smdist.identity import ModeKeys
from smdist.storage import loop_thread as sync
from smdist.storage import open_store
from smdist.storage.store import Store
from tests.faults.launcher import Launcher, Started, launching
from tests.servers.s3 import KEY, SECRET, Server, aws, moto, rclone
from tests.support.coordinator_driver import from_scratch
from tests.support.run_builder import RunBuilder
from tests.support.sampling import at_most, generator
from tests.support.waiting import until

__all__ = ["aws", "moto", "rclone"]  # fixtures

TRAIN = ModeKeys.TRAIN
pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("aws")]


@pytest.fixture(scope="module")
def coordinators() -> Iterator[Launcher]:
    with launching("coordinator_processes.py") as launcher:
        yield launcher


class Job:
    """Ranks that write in a thread of the test, and start again once with another world."""

    def __init__(self, store: Store, draw: random.Random) -> None:
        self.store, self.draw = store, draw

    def run(self) -> None:
        job, first = RunBuilder(self.store), 0
        for attempt, world in enumerate((self.draw.randint(1, 4), self.draw.randint(1, 4))):
            ranks = [job.rank(r, world, attempt=attempt, now=time.time()) for r in range(world)]
            last = first + self.draw.randint(2, 6)
            for step in range(first, last):
                for rank in self.draw.sample(ranks, world):
                    rank.now = time.time()
                    rank.step(TRAIN, step, {"w": np.full(2, step, np.float32)})
                    if self.draw.random() < 0.8:
                        rank.flush()
                    else:
                        rank.beat(time.time())
                    time.sleep(self.draw.random() * 0.02)
            for rank in ranks:
                rank.now = time.time()
                rank.flush("ended" if attempt else "lost")
            first = last - 1


def pointer(store: Store) -> Pointer | None:
    try:
        return msgspec.json.decode(sync.run(store.get(POINTER_KEY)), type=Pointer)
    except ObjectNotFound:
        return None


def environ(folder: Path) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(folder / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "no-credentials"),
    }


def carry_out(url: str, folder: Path, launcher: Launcher, seed: int) -> int:
    """How many coordinators were killed."""
    draw, store = random.Random(seed), open_store(url)
    folder.mkdir(parents=True)
    lives: list[Started] = []

    def live() -> Started:
        name = folder / str(len(lives))
        started = launcher.start(name, "coordinate(order)", environ(folder), url=url, writer="me")
        lives.append(started)
        return started

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(Job(store, draw).run)
        while not working.done() or len(lives) < 4:
            life = live()
            time.sleep(draw.random() ** 2 * 0.6)  # it is killed at any moment, whatever it does
            life.kill()
            life.wait()
            if len(lives) > 200:
                break
        working.result()
    last = live()
    until(
        lambda: (last.folder / "finished").exists() or last.code is not None,
        "the last coordinator to finish",
        120,
        lambda: (last, pointer(store)),
    )
    assert last.wait() == 0, last
    newest = pointer(store)
    assert newest is not None
    assert newest.final
    view = sync.run(load_view(store, newest)).view
    assert view.canonical() == from_scratch(store).canonical(), f"seed {seed}"
    sync.run(store.close())
    return len(lives) - 1


@pytest.mark.parametrize("place", ["local", "rclone", "moto"])
def test_schedules(
    place: str, coordinators: Launcher, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server: Server | None = None if place == "local" else request.getfixturevalue(place)
    killed = 0
    count = at_most(6, 2) if place == "moto" else at_most(12, 3)  # moto is slow
    for number in range(count):
        seed = generator(place, number).randrange(1 << 32)
        url = str(tmp_path / "run" / str(number))
        if server is not None:
            url = server.url(server.make_bucket(f"killed-{uuid.uuid4().hex[:12]}"))
        killed += carry_out(url, tmp_path / str(number), coordinators, seed)
    assert killed >= 3 * count
