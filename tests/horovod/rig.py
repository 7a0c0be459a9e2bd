"""Jobs in the environment for Horovod, watched from this one: by a trial, and by a coordinator.

`make test-horovod` makes that environment (tests/environments/horovod.py). It has no Ray and this one
no Horovod: all they share is the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer, load_view
from smdist.coordination.view.run_view import add
from smdist.errors import SmdistError
from smdist.format.manifest import Heartbeat, Session, session_key
from smdist.storage import loop_thread as sync
from smdist.storage import open_store
from smdist.trials import create_trial
from tests.servers.ports import free_port
from tests.servers.ray_cluster import Driver, DriverError
from tests.servers.s3 import Server
from tests.support.coordinator_driver import from_scratch
from tests.support.s3_jobs import environment
from tests.support.waiting import until

__all__ = [
    "EXAMPLES",
    "Coordinated",
    "Job",
    "bucket_url",
    "ended",
    "finish",
    "horovodrun",
    "job_marks",
    "kill_rank",
    "multi_worker",
    "started",
    "stored_steps",
    "until",
]

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
PYTHON = str(REPOSITORY / ".venv-horovod" / "bin" / "python")
PATIENCE_S = 450.0

job_marks = [
    pytest.mark.horovod,
    pytest.mark.ranks,
    pytest.mark.timeout(900),
]


def _environment(**given: str) -> dict[str, str]:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment(**quiet, PYTHONUNBUFFERED="1", **given)


class Job:
    """One or several processes that are ended with the test, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **given: str) -> None:
        log = self.folder / f"job-{len(self.processes)}.log"
        with log.open("wb") as output:
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=_environment(**given),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("job-*.log")))

    def wait(self, timeout_s: float = PATIENCE_S) -> list[int]:
        deadline = time.monotonic() + timeout_s
        return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]

    def end(self) -> None:
        """horovodrun ends its ranks when it is told to end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(30.0)
                return


@contextmanager
def started(folder: Path) -> Iterator[Job]:
    job = Job(folder)
    try:
        yield job
    finally:
        job.end()


def horovodrun(job: Job, *words: str | Path, launcher: tuple[str, ...] = ()) -> None:
    """Two ranks of a script, in the environment for Horovod."""
    run = str(Path(PYTHON).with_name("horovodrun"))
    places = launcher or ("-np", "2", "-H", "localhost:2")
    job.start([PYTHON, run, "--gloo", *places, PYTHON, *map(str, words)])


def multi_worker(job: Job, *words: str | Path) -> None:
    """The same for processes that find each other by TF_CONFIG."""
    workers = [f"localhost:{free_port()}" for _ in range(2)]
    for index in (0, 1):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        job.start([PYTHON, *map(str, words)], TF_CONFIG=json.dumps(task))


def finish(job: Job) -> str:
    """Its output, once it ended well: with nothing of ours to tell."""
    codes = job.wait()
    said = job.output
    assert set(codes) == {0}, said
    assert "smdist:" not in said, said
    assert "training continues" not in said, said
    return said


# -- the store ---------------------------------------------------------------------------------------


def bucket_url(server: Server, name: str) -> str:
    return server.url(server.make_bucket(f"{name}-{uuid.uuid4().hex[:12]}"), "team/run")


def _session(url: str, worker: str) -> Session:
    store = open_store(url)
    try:
        data = sync.run(store.get(session_key(worker, 0)))
    finally:
        sync.run(store.close())
    return msgspec.json.decode(data, type=Session)


def kill_rank(url: str, rank: int) -> None:
    """By the process id that it signed up with."""
    os.kill(_session(url, f"worker_{rank}").pid, signal.SIGKILL)


def stored_steps(url: str) -> list[int]:
    """Those that every rank has stored."""
    try:
        with create_trial(url) as trial:
            return list(trial.steps()) if len(trial.workers()) == 2 else []
    except SmdistError:
        return []


def ended(url: str) -> bool:
    with create_trial(url) as trial:
        return trial.loaded_all_steps


# -- the coordinator ---------------------------------------------------------------------------------


class Coordinated:
    """A coordinator on the Ray of this environment, for one run that need not be there yet."""

    def __init__(self, driver: Driver, url: str, **settings: float) -> None:
        self._driver, self._url = driver, url
        driver("start", settings={"watch": url, "interval_s": 0.2, **settings})

    def ask(self, method: str, **arguments: Any) -> Any:
        return self._driver("ask", watch=self._url, method=method, arguments=arguments)

    def until_final(self) -> dict[str, Any]:
        """Its status, once every rank has said its last word."""

        def final() -> dict[str, Any] | None:
            try:
                status: dict[str, Any] = self.ask("status")
            except DriverError as error:
                if error.kind != "NoSuchRun":
                    raise
                return None
            return status if status["final"] else None

        found: dict[str, Any] = until(final, "the coordinator takes the run for final", PATIENCE_S)
        return found

    def check_merged(self) -> None:
        """Its view is what follows from the manifests of all ranks."""
        self.ask("stop")
        store = open_store(self._url)
        try:
            pointer = msgspec.json.decode(sync.run(store.get(POINTER_KEY)), type=Pointer)
            merged = sync.run(load_view(store, pointer)).view
            # A heartbeat is overwritten in place, and may come after a rank's last word.
            for key in sync.run(store.list("heartbeats/")):
                add(merged, msgspec.json.decode(sync.run(store.get(key)), type=Heartbeat))
            assert merged.canonical() == from_scratch(store).canonical()
        finally:
            sync.run(store.close())
