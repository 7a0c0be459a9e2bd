"""`smdist coordinator` as people type it: on a Ray of their own, on a cluster, as a job of it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from smdist.coordination.ray_actor.local_head import LocalRay
from smdist.coordination.service.run_watcher import RunWatcher
from tests.integration.test_ray_coordinator import job, number, save
from tests.servers.ports import free_port
from tests.servers.ray_cluster import Cluster, environment, start_cluster
from tests.support.waiting import until

pytestmark = pytest.mark.ray

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


def smdist(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "smdist", "coordinator", *words],
        env=environment(COLUMNS="200", PYTHONWARNINGS="ignore", **more),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def well(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- a Ray of one's own --------------------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    """Where the local Ray lives; pytest's own path is too long for its sockets."""
    path = Path(tempfile.mkdtemp(prefix="sml-", dir="/tmp"))
    try:
        yield path
    finally:
        smdist("stop", SMDIST_RAY_DIR=str(path))
        shutil.rmtree(path, ignore_errors=True)


def test_local_coordinator_outlives_the_command(home: Path, tmp_path: Path) -> None:
    place, mine = tmp_path / "run", {"SMDIST_RAY_DIR": str(home)}
    writers = job(place)
    said = well(smdist("start", "--watch", str(place), "--interval", "0.1", **mine))
    assert "namespace" in said
    assert f"smdist coordinator stop --watch {place}" in said
    assert "complete up to step 2" in said
    head = record(home)
    assert listening_elsewhere(head.pid) == []

    save(writers[0], 3)
    until(lambda: number(place) >= 2, "it goes on")
    shown = well(smdist("status", **mine))
    assert all(word in shown for word in ("rank", "last step", "behind", "1 steps", "active"))
    (answer,) = json.loads(well(smdist("status", "--json", **mine)))
    (one,) = answer["runs"].values()
    assert (one["state"], [line["step"] for line in one["ranks"]]) == ("watching", [3, 2])

    again = well(smdist("start", "--watch", str(place), "--interval", "0.1", **mine))
    assert record(home) == head, "another Ray was started"
    assert "watching" in again

    ended = well(smdist("stop", **mine))
    assert "stopped the local Ray" in ended
    assert session(head.pid) == []
    gone = smdist("status", **mine)
    assert gone.returncode == 1
    assert "no coordinator runs on this machine" in gone.stderr


def test_start_waits_for_the_lease_of_a_dead_coordinator(home: Path, tmp_path: Path) -> None:
    place, mine = tmp_path / "run", {"SMDIST_RAY_DIR": str(home)}
    (tmp_path / "none").mkdir()
    well(smdist("start", "--watch", str(tmp_path / "none"), **mine))
    job(place)

    async def die() -> None:
        watcher = RunWatcher(str(place), lease_s=40.0)
        await watcher.open()
        await watcher.poll_once()

    asyncio.run(die())
    said = well(smdist("start", "--watch", str(place), "--interval", "0.1", **mine))
    assert "already has a coordinator" in said
    assert "standing by" in said
    assert "watching" in said.splitlines()[-1]


def test_local_ray_without_a_coordinator_is_stopped(home: Path, tmp_path: Path) -> None:
    mine = {"SMDIST_RAY_DIR": str(home)}
    code = "from smdist.coordination.ray_actor import local_head; print(local_head.start()[0].pid)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**mine),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert "stopped the local Ray" in well(smdist("stop", **mine))
    assert session(int(done.stdout)) == []
    assert "no coordinator runs" in smdist("stop", **mine).stderr


def test_unreachable_store_is_an_error(home: Path) -> None:
    mine = {
        "SMDIST_RAY_DIR": str(home),
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
    }
    with socket.socket() as nobody:  # bound and not listening: refused
        nobody.bind(("127.0.0.1", 0))
        place = f"s3://bucket/jobs?endpoint_url=http://127.0.0.1:{nobody.getsockname()[1]}"
        done = smdist("start", "--watch", place, **mine)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot be reached" in done.stdout.splitlines()[-1]
    assert "no run yet" not in done.stdout


def test_hanging_coordinator_is_killed(home: Path, tmp_path: Path) -> None:
    mine = {"SMDIST_RAY_DIR": str(home)}
    well(smdist("start", "--watch", str(tmp_path), **mine))
    known = record(home)
    (there,) = json.loads(well(smdist("status", "--json", **mine)))
    os.kill(there["coordinator"]["pid"], signal.SIGSTOP)
    said = well(smdist("stop", **mine))
    assert f"killed {there['coordinator']['name']}, which did not answer" in said
    assert session(known.pid) == []


def record(home: Path) -> LocalRay:
    known = json.loads((home / "head.json").read_text())
    return LocalRay(**known)


def session(leader: int) -> list[int]:
    """Processes that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def listening_elsewhere(leader: int) -> list[str]:
    """Sockets of the session that another machine could reach: whoever can, may run anything."""
    sockets = set[str]()
    for pid in session(leader):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(link))
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    found, any_ = [], 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                any_ += 1
                if fields[1].partition(":")[0] not in loopback:
                    found.append(fields[1])
    assert any_, "nothing listens: this looks at the wrong processes"
    return found


# -- a cluster -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With the job server, and a second node."""
    port = free_port()
    with start_cluster("--include-dashboard=true", f"--dashboard-port={port}") as one:
        one.jobs = f"http://127.0.0.1:{port}"
        one.add_node("--num-cpus=1")
        yield one


def test_on_a_cluster_by_address(cluster: Cluster, tmp_path: Path) -> None:
    place, where = tmp_path / "jobs", ("--address", cluster.address)
    job(place / "first")
    said = well(smdist("start", *where, "--watch", str(place), "--interval", "0.1"))
    assert f"smdist coordinator status --address {cluster.address}" in said
    job(place / "second", ranks=3)
    until(lambda: number(place / "second"), "the second run is found")
    shown = well(smdist("status", *where, "--watch", str(place)))
    assert str(place / "first") in shown
    assert str(place / "second") in shown
    only = well(smdist("status", *where, "--watch", str(place), "--run", "second"))
    assert str(place / "first") not in only
    well(smdist("stop", *where, "--watch", str(place)))
    gone = smdist("status", *where, "--watch", str(place))
    assert gone.returncode == 1
    assert f"no coordinator for {place}" in gone.stderr
    assert cluster.head.processes(), "a Ray that is not ours was stopped"


def test_python_example_of_the_cluster_page(cluster: Cluster, tmp_path: Path) -> None:
    place, where = tmp_path / "jobs", ("--address", cluster.address)
    job(place / "first", steps=5)
    well(smdist("start", *where, "--watch", str(place), "--interval", "0.1"))
    text = (ROOT / "cluster" / "README.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    block = block.replace("s3://my-bucket/jobs", str(place)).replace('"auto"', repr(where[1]))
    done = subprocess.run(
        [sys.executable, "-c", block.replace("(100,", "(4,")],
        env=environment(PYTHONWARNINGS="ignore"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert well(done).splitlines() == [f"{place / 'first'} 4 []", "complete {}"]
    well(smdist("stop", *where, "--watch", str(place)))


@pytest.fixture
def alone_on_the_machine() -> Iterator[None]:
    """Every Ray takes the ports for its clients from 23000 on, and looks if one is free long before
    it is taken: two at the same time, of two runs of these tests, want the same."""
    lock = Path(tempfile.gettempdir(), f"smdist-tests-ray-client-{os.getuid()}.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("alone_on_the_machine")
def test_start_through_the_ray_client(cluster: Cluster, tmp_path: Path) -> None:
    """From a machine that is no node."""
    job(tmp_path / "run")
    where = ("--address", f"ray://{cluster.address.partition(':')[0]}:{cluster.client_port}")

    def there(verb: str, *more: str) -> str:
        for _ in range(3):
            done = smdist(verb, *where, "--watch", str(tmp_path / "run"), *more)
            # The process that Ray gives each client may die at its start; the next one gets another port.
            if not any(s in done.stderr for s in ("Starting Ray client server", "ZombieProcess")):
                break
        return well(done)

    assert "complete up to step 2" in there("start", "--interval", "0.1")
    assert "active" in there("status")
    there("stop")


def test_start_as_a_ray_job(cluster: Cluster, tmp_path: Path) -> None:
    """The job has ended and so has its driver; the coordinator stays."""
    writers = job(tmp_path / "run")
    submit = [str(BIN / "ray"), "job", "submit", "--address", cluster.jobs, "--"]
    command = [str(BIN / "smdist"), "coordinator", "start", "--address", "auto"]
    done = subprocess.run(
        [*submit, *command, "--watch", str(tmp_path / "run"), "--interval", "0.1"],
        env=environment(PYTHONWARNINGS="ignore"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    before = number(tmp_path / "run")
    for writer in writers:
        save(writer, 3)
    until(lambda: number(tmp_path / "run") > before, "it goes on")
    where = ("--address", cluster.address, "--watch", str(tmp_path / "run"))
    assert "complete up to step 3" in well(smdist("status", *where))
    well(smdist("stop", *where))


def test_follow_ends_when_the_coordinator_stops(cluster: Cluster, tmp_path: Path) -> None:
    writers = job(tmp_path / "run")
    where = ("--address", cluster.address, "--watch", str(tmp_path / "run"))
    log = tmp_path / "follow.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [BIN / "smdist", "coordinator", "start", *where, "--interval", "0.1", "--follow"],
            env=environment(COLUMNS="200", PYTHONUNBUFFERED="1"),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
        ) as follower,
    ):
        until(lambda: "complete up to step 2" in log.read_text(), "it tells what is there")
        for writer in writers:
            save(writer, 3)
        until(lambda: "complete up to step 3" in log.read_text(), "it tells what is new")
        well(smdist("stop", *where))
        assert follower.wait(120) == 0
    assert "the coordinator was stopped" in log.read_text()
