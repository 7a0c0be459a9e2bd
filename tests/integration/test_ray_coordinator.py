"""The coordinator on a real Ray: drivers come and go, it stays, answers, and is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import msgspec
import numpy as np
import pytest

from smdist.coordination.ray_actor.code_package import copy_package
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer, load_view
from smdist.errors import AlreadyCoordinated
from smdist.identity import ModeKeys
from smdist.storage import LocalStore, Store, open_store
from smdist.storage import loop_thread as sync
from tests.servers.ray_cluster import (
    Cluster,
    Driver,
    DriverError,
    environment,
    ray_cluster,
    start_cluster,
)
from tests.servers.s3 import Server, aws, rclone
from tests.support.coordinator_driver import from_scratch
from tests.support.run_builder import RankWriter, RunBuilder
from tests.support.waiting import until

__all__ = ["aws", "ray_cluster", "rclone"]  # fixtures

pytestmark = pytest.mark.ray

TRAIN = ModeKeys.TRAIN


@pytest.fixture
def driver(ray_cluster: Cluster, tmp_path: Path) -> Iterator[Driver]:
    with Driver(ray_cluster.address, tmp_path / "driver.log") as one:
        yield one


def job(place: Path, ranks: int = 2, steps: int = 3) -> list[RankWriter]:
    """A run of which every rank has closed some steps."""
    run = RunBuilder(LocalStore(place))
    writers = [run.rank(rank, world=ranks) for rank in range(ranks)]
    for step in range(steps):
        for writer in writers:
            save(writer, step)
    return writers


def save(writer: RankWriter, step: int) -> None:
    writer.now = time.time()
    writer.step(TRAIN, step, {"w": np.full(2, step, np.float32)}).flush()


def settings(watch: Path, **more: object) -> dict[str, object]:
    return {"watch": str(watch), "interval_s": 0.1, **more}


def ask(driver: Driver, watch: Path, method: str, **arguments: object) -> object:
    return driver("ask", watch=str(watch), method=method, arguments=arguments)


def latest(driver: Driver, watch: Path) -> object:
    return ask(driver, watch, "latest_complete_step")


def test_client_answers_queries(driver: Driver, tmp_path: Path) -> None:
    slow, _ = job(tmp_path / "run", ranks=2, steps=3)
    save(slow, 3)
    driver("start", settings=settings(tmp_path / "run"))
    until(lambda: latest(driver, tmp_path / "run") == 2, "three steps are complete")
    status = driver("ask", watch=str(tmp_path / "run"), method="status")
    assert (status["state"], status["last_step"], status["latest_complete"]["TRAIN"]) == (
        "watching",
        3,
        2,
    )
    assert [(line["rank"], line["step"]) for line in status["ranks"]] == [(0, 3), (1, 2)]
    assert ask(driver, tmp_path / "run", "missing", step=3) == {"1": "lagging"}
    assert ask(driver, tmp_path / "run", "missing", step=1, mode="TRAIN") == {}
    report = ask(driver, tmp_path / "run", "wait_for_step", step=2, timeout_s=5.0)
    assert report == {
        "step": 2,
        "mode": "GLOBAL",
        "standing": "complete",
        "attempt": 0,
        "missing": {},
    }
    runs = driver("ask", watch=str(tmp_path / "run"), method="runs")
    assert {url: one["run_id"] for url, one in runs.items()} == {status["url"]: "run"}


def test_errors_are_those_of_smdist(driver: Driver, tmp_path: Path) -> None:
    job(tmp_path / "run")
    driver("start", settings=settings(tmp_path / "run"))
    until(lambda: latest(driver, tmp_path / "run") == 2, "the run is read")
    for kind, method, arguments in (
        ("StepNotYetAvailable", "missing", {"step": 99}),
        ("WaitTimeout", "wait_for_step", {"step": 99, "timeout_s": 0.2}),
        ("NoSuchRun", "status", {"run": "another"}),
    ):
        with pytest.raises(DriverError) as failed:
            ask(driver, tmp_path / "run", method, **arguments)
        assert failed.value.kind == kind


def test_coordinator_outlives_its_driver(ray_cluster: Cluster, tmp_path: Path) -> None:
    place = tmp_path / "run"
    writers = job(place)
    with Driver(ray_cluster.address, tmp_path / "first.log") as first:
        began = first("start", settings=settings(place))
    until(lambda: number(place), "its first snapshot")
    for writer in writers:  # nobody is there to ask for it
        save(writer, 3)
    until(lambda: number(place) >= 2, "it writes snapshots")
    with Driver(ray_cluster.address, tmp_path / "second.log") as second:
        until(lambda: latest(second, place) == 3, "it went on")
        assert second("ask", watch=str(place), method="info")["pid"] == began["pid"]
        ask(second, place, "stop")


def number(place: Path) -> int:
    return len(list((place / "merged" / "heads").glob("*.json")))


def test_second_start_finds_the_coordinator(driver: Driver, tmp_path: Path) -> None:
    job(tmp_path / "run")
    once = driver("start", settings=settings(tmp_path / "run"))
    again = driver("start", settings=settings(tmp_path / "run"))
    passing = {"looked": None, "trouble": None}
    assert {**again, **passing} == {**once, **passing}
    with pytest.raises(DriverError, match=r"other settings \(lost_after_s=60.0\)"):
        driver("start", settings=settings(tmp_path / "run", lost_after_s=5.0))


def test_stop_releases_the_lease(driver: Driver, tmp_path: Path) -> None:
    place = tmp_path / "run"
    job(place)
    name = driver("start", settings=settings(place))["name"]
    until(lambda: latest(driver, place) == 2, "the run is read")
    ask(driver, place, "stop")
    until(lambda: name not in driver("names"), "the actor is gone")

    async def next_one() -> None:
        watcher = RunWatcher(str(place))
        await watcher.open()  # AlreadyCoordinated, if the lease was left
        assert watcher.queries.latest_complete_step() == 2
        await watcher.close()

    asyncio.run(next_one())


def test_process_that_is_connected_already(ray_cluster: Cluster, tmp_path: Path) -> None:
    """Its connection is used, and left as it was; paths are meant as it means them."""
    job(tmp_path / "run")
    code = (
        "import ray, sys\n"
        "from smdist.coordinator import Settings, attach, find, start\n"
        "ray.init(sys.argv[1], namespace='another', log_to_driver=False)\n"
        "with attach('auto') as attached:\n"
        "    began = start(attached, Settings('run', interval_s=0.1))\n"
        "    print(began.wait_for_step(2, timeout_s=100.0).standing)\n"
        "    find(attached, 'run').stop()\n"
        "print(ray.is_initialized(), began.__class__.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ray_cluster.address],
        env=environment(PYTHONWARNINGS="ignore"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.splitlines() == ["complete", "True CoordinatorClient"], done.stderr


def test_failed_runtime_environment_is_reported(ray_cluster: Cluster, tmp_path: Path) -> None:
    code = (
        "import msgspec, signal, sys\n"
        "from smdist.coordination.ray_actor.client import CoordinatorClient\n"
        "from smdist.coordination.ray_actor.coordinator import Coordinator, Settings\n"
        "from smdist.coordination.ray_actor.launcher import attach\n"
        "from smdist.errors import CoordinationError\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "with attach(sys.argv[1]) as attached:\n"
        "    print(signal.getsignal(signal.SIGTERM) is signal.default_int_handler)\n"
        "    options = {'num_cpus': 0, 'runtime_env': {'conda': 'nowhere'}}\n"
        "    made = attached.ray.remote(Coordinator).options(**options)\n"
        "    client = CoordinatorClient(attached.ray, made.remote(msgspec.json.encode(Settings('x'))))\n"
        "    try:\n"
        "        client.info(timeout_s=100.0)\n"
        "    except CoordinationError as error:\n"
        "        print(str(error).startswith('Ray could not install what the coordinator needs'))\n"
        "    print(client.stop(timeout_s=20.0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ray_cluster.address],
        env=environment(PYTHONWARNINGS="ignore"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.splitlines() == ["True", "True", "False"], done.stdout + done.stderr


def test_many_runs_below_one_place(driver: Driver, tmp_path: Path) -> None:
    place = tmp_path / "jobs"
    job(place / "first", steps=2)
    driver("start", settings=settings(place))
    until(lambda: latest(driver, place) == 1, "the first is read")
    job(place / "second", steps=5)
    until(lambda: len(driver("ask", watch=str(place), method="runs")) == 2, "both are found")
    until(
        lambda: ask(driver, place, "latest_complete_step", run="second") == 4, "the second is read"
    )
    assert ask(driver, place, "latest_complete_step", run="first") == 1


def test_given_wheel_is_what_runs(driver: Driver, tmp_path: Path) -> None:
    """Unlike what the cluster's own interpreter has."""
    job(tmp_path / "run")
    named = tmp_path / "smdist-9.9-py3-none-any.whl"
    package = copy_package(tmp_path)
    with (package / "__init__.py").open("a") as file:
        file.write('\n__version__ = "9.9"\n')
    with ZipFile(named, "w") as archive:
        for path in package.rglob("*"):
            archive.write(path, path.relative_to(tmp_path))
    began = driver("start", settings=settings(tmp_path / "run"), wheel=str(named))
    assert began["version"] == "9.9"
    until(lambda: latest(driver, tmp_path / "run") == 2, "it works")
    ask(driver, tmp_path / "run", "stop")


def test_query_survives_a_restart_of_the_actor(driver: Driver, tmp_path: Path) -> None:
    """Ray asks again; the next process finds the run, reads it, and waits as the first one did."""
    place = tmp_path / "run"
    writers = job(place)
    began = driver("start", settings=settings(place))
    until(lambda: latest(driver, place) == 2, "the run is read")
    writer = driver("ask", watch=str(place), method="status")["writer"]
    write = threading.Thread(target=kill_and_write, args=(began["pid"], writers))
    write.start()
    report = driver(
        "ask",
        watch=str(place),
        method="wait_for_step",
        arguments={"step": 3, "timeout_s": 100.0},
    )
    write.join()
    assert report["standing"] == "complete"
    assert driver("ask", watch=str(place), method="info")["pid"] != began["pid"]
    # It comes back under its name, and waits for no lease of its own.
    again = driver("ask", watch=str(place), method="status")["writer"]
    assert again != writer
    assert again.rpartition("-")[0] == writer.rpartition("-")[0]


def kill_and_write(pid: int, writers: list[RankWriter]) -> None:
    time.sleep(0.3)  # by then the question is there, most likely; if not, nothing is wrong
    os.kill(pid, signal.SIGKILL)
    for writer in writers:
        save(writer, 3)


def test_runs_on_s3_with_shards(aws: pytest.MonkeyPatch, rclone: Server, tmp_path: Path) -> None:
    """With the credentials that Ray was started with."""
    url = rclone.url(rclone.make_bucket(f"ray-{tmp_path.name[-20:].replace('_', '-').lower()}"))
    with contextlib.ExitStack() as at_end:
        store = open_store(url)
        at_end.callback(lambda: sync.run(store.close()))
        follow_on_s3(store, url, tmp_path)


def follow_on_s3(store: Store, url: str, tmp_path: Path) -> None:
    run = RunBuilder(store)
    writers = [run.rank(rank, world=5) for rank in range(5)]
    with (
        start_cluster() as cluster,
        Driver(cluster.address, tmp_path / "driver.log") as driver,
    ):
        chosen = {"watch": url, "interval_s": 0.1, "shards": 3}
        driver("start", settings=chosen)
        for step in range(3):
            for writer in writers:
                save(writer, step)
        until(
            lambda: driver("ask", watch=url, method="latest_complete_step") == 2, "it is followed"
        )
        for writer in writers:
            writer.end()
        until(
            lambda: driver("ask", watch=url, method="status")["state"] == "finished", "it has ended"
        )
        driver("ask", watch=url, method="stop")
    pointer = msgspec.json.decode(sync.run(store.get(POINTER_KEY)), type=Pointer)
    merged = sync.run(load_view(store, pointer)).view
    assert merged.canonical() == from_scratch(store).canonical()


# -- two for one run -----------------------------------------------------------------------------


def test_second_coordinator_is_refused(ray_cluster: Cluster, tmp_path: Path) -> None:
    """On another Ray, where nothing of the first is known: the store tells."""
    place = tmp_path / "run"
    writers = job(place)
    with (
        start_cluster() as another,
        Driver(ray_cluster.address, tmp_path / "mine.log") as mine,
        Driver(another.address, tmp_path / "theirs.log") as theirs,
    ):
        first = mine("start", settings=settings(place))
        until(lambda: latest(mine, place) == 2, "the first one watches")
        theirs("start", settings=settings(place))
        status = until(lambda: state(theirs, place, "refused"), "the second one is refused")
        assert f"process {first['pid']}" in status["detail"]
        assert "--take-over" in status["detail"]
        with pytest.raises(DriverError, match="Ask that one, or open a trial"):
            latest(theirs, place)
        with pytest.raises(AlreadyCoordinated):
            asyncio.run(RunWatcher(str(place)).open())  # a third, without any Ray

        theirs("start", settings=settings(place, take_over=True))
        until(lambda: state(theirs, place, "watching"), "the second one has taken over")
        until(lambda: state(mine, place, "superseded"), "the first one has noticed")
        for writer in writers:
            save(writer, 3)
        until(lambda: latest(theirs, place) == 3, "nothing is lost")
        with pytest.raises(DriverError, match="Ask that one, or open a trial"):
            ask(mine, place, "missing", step=3)
        ask(theirs, place, "stop")
        ask(mine, place, "stop")


def state(driver: Driver, place: Path, wanted: str) -> dict[str, str] | None:
    runs = driver("ask", watch=str(place), method="runs")
    return next((one for one in runs.values() if one["state"] == wanted), None)
