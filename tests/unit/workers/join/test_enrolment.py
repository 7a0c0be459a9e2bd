"""Ranks enter a run: together, again, or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdist.errors import ConfigurationError, CorruptObject, ObjectExists, RunExists
from smdist.format.manifest import Run, Session, rank_saves, session_key
from smdist.format.stored_json import encode
from smdist.storage.in_memory import MemoryStore
from smdist.storage.store import Buffer, Store
from smdist.workers.join.attempt import StartingRank
from smdist.workers.join.enrolment import JoinedRun, join_run, new_session, sessions_to_read
from smdist.workers.join.rank import Identity
from smdist.workers.spool.spool import UNKNOWN_ATTEMPT, Entry


class Shelf(MemoryStore):
    """A store that answers as late as told."""

    def __init__(self, *, pauses: Sequence[int] = (0,)) -> None:
        super().__init__("shelf")
        self.pauses = pauses
        self.calls = 0

    async def _pause(self) -> None:
        self.calls += 1
        for _ in range(self.pauses[self.calls % len(self.pauses)]):
            await asyncio.sleep(0)

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        await self._pause()
        await super().put(key, data, if_absent=if_absent)
        await self._pause()

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        await self._pause()
        return await super().get(key, start, stop)

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        await self._pause()
        return await super().list(prefix, after=after)


def me(rank: int = 0, **facts: object) -> StartingRank:
    # Hosts that are not this machine: the processes named here do not exist on it.
    values: dict[str, object] = {
        "rank": rank,
        "world_size": 4,
        "host": f"host-{rank}.invalid",
        "pid": 7,
        "launch": "given:first",
    }
    return StartingRank(**(values | facts))  # type: ignore[arg-type]


def enter(
    store: Store,
    newcomer: StartingRank,
    *,
    resume: bool = False,
    attempt: int | None = None,
    now: Callable[[], float] = lambda: 1000.0,
) -> Coroutine[Any, Any, JoinedRun]:
    session = Session(
        session=uuid.uuid4().hex,
        rank=newcomer.rank,
        world_size=newcomer.world_size,
        attempt=UNKNOWN_ATTEMPT,
        include_workers="all",
        started=now(),
        host=newcomer.host,
        pid=newcomer.pid,
        launch=newcomer.launch,
        restart=newcomer.restart,
    )
    return join_run(store, session, Entry(newcomer.began, resume, "pytorch", attempt), now)


def stored_run(shelf: Shelf) -> str:
    run_id = json.loads(shelf.objects["run.json"])["run_id"]
    assert isinstance(run_id, str)
    return run_id


def test_first_rank_makes_the_run_beside_foreign_files() -> None:
    shelf = Shelf()
    shelf.objects |= {"notes.txt": b"mine", "sessions/readme": b"", "manifests/app.yaml": b""}
    made = asyncio.run(enter(shelf, me()))
    assert (made.session.attempt, made.session.rank, made.run.framework) == (0, 0, "pytorch")
    assert stored_run(shelf) == made.run.run_id
    stored = json.loads(shelf.objects[session_key("worker_0", 0)])
    assert (stored["session"], stored["launch"]) == (made.session.session, "given:first")
    assert shelf.objects["notes.txt"] == b"mine"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=7), st.permutations(range(4)))
def test_ranks_that_arrive_together_share_one_run(pauses: list[int], order: list[int]) -> None:
    shelf = Shelf(pauses=pauses)

    async def together() -> list[JoinedRun]:
        return await asyncio.gather(*(enter(shelf, me(rank)) for rank in order))

    made = asyncio.run(together())
    assert {e.run.run_id for e in made} == {stored_run(shelf)}
    assert {e.session.attempt for e in made} == {0}
    assert len([key for key in shelf.objects if key.startswith("sessions/")]) == 4


def test_two_processes_of_one_rank_do_not_both_enter() -> None:
    shelf = Shelf(pauses=(1,))

    async def together() -> list[JoinedRun | BaseException]:
        both = (enter(shelf, me(0, pid=pid, launch="")) for pid in (7, 8))
        return await asyncio.gather(*both, return_exceptions=True)

    results = asyncio.run(together())
    assert sorted(type(r).__name__ for r in results) == ["JoinedRun", "RunExists"]


def test_an_answer_that_was_lost_is_no_other_process() -> None:
    class Forgetful(Shelf):
        async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
            await super().put(key, data, if_absent=if_absent)
            raise ObjectExists(self.url, key, "put")  # of the retry, whose first try had worked

    shelf = Forgetful()
    made = asyncio.run(enter(shelf, me()))
    assert stored_run(shelf) == made.run.run_id
    assert made.session.attempt == 0


def test_a_second_start_is_refused_and_told_what_to_do() -> None:
    shelf = Shelf()
    asyncio.run(enter(shelf, me()))
    before = dict(shelf.objects)
    with pytest.raises(RunExists, match=r"worker_0: memory://shelf .*resume=True"):
        asyncio.run(enter(shelf, me(launch="given:second")))
    assert shelf.objects == before


def test_resume_and_restart_open_a_new_attempt_of_the_same_run() -> None:
    shelf = Shelf()
    first = asyncio.run(enter(shelf, me()))
    restarted = asyncio.run(enter(shelf, me(pid=8, restart=1)))
    resumed = asyncio.run(enter(shelf, me(launch="given:second"), resume=True))
    assert [e.session.attempt for e in (first, restarted, resumed)] == [0, 1, 2]
    assert {e.run.run_id for e in (first, restarted, resumed)} == {first.run.run_id}


def test_explicit_attempt() -> None:
    shelf = Shelf()
    asyncio.run(enter(shelf, me(), attempt=3))
    with pytest.raises(ConfigurationError, match=r"attempt 3 .* attempt=4"):
        asyncio.run(enter(shelf, me(), attempt=3))
    assert asyncio.run(enter(shelf, me(), attempt=5)).session.attempt == 5


@pytest.mark.parametrize(
    ("key", "data", "error", "words"),
    [
        ("run.json", b"{}", ConfigurationError, "did not write"),
        ("run.json", b"epochs: 3", ConfigurationError, "did not write"),
        (
            "run.json",
            encode(Run("x", 0.0, "pytorch", format=99), "run.json"),
            ConfigurationError,
            "format 99",
        ),
        ("manifests/worker_0/000000-00000000.json", b"{}", ConfigurationError, "are gone"),
        ("sessions/worker_1/000000.json", b"{", CorruptObject, "sessions/worker_1/000000.json"),
    ],
)
def test_what_is_not_a_sound_run_is_left_alone(
    key: str, data: bytes, error: type[Exception], words: str
) -> None:
    shelf = Shelf()
    shelf.objects[key] = data
    with pytest.raises(error, match=words):
        asyncio.run(enter(shelf, me(), resume=True))
    assert shelf.objects == {key: data}


def test_a_manifest_of_a_rank_that_enters_meanwhile_is_no_remains() -> None:
    class Busy(Shelf):
        """Another rank enters and saves before this one looks for manifests."""

        async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
            if prefix == "manifests/" and "run.json" not in self.objects:
                self.objects |= other.objects
            return await super().list(prefix, after=after)

    other = Shelf()
    first = asyncio.run(enter(other, me(1)))
    other.objects["manifests/worker_1/000000-00000000.json"] = b"{}"
    made = asyncio.run(enter(Busy(), me(0)))
    assert (made.run.run_id, made.session.attempt) == (first.run.run_id, 0)


def test_large_jobs_read_few_sessions() -> None:
    keys = [session_key(f"worker_{rank}", attempt) for rank in range(2000) for attempt in range(5)]
    keys.append(session_key("worker_5000", 1))
    chosen = sessions_to_read([*keys, "sessions/readme"], 1000)
    assert len(chosen) <= 20
    for rank in (0, 999, 1000, 1001):
        assert session_key(f"worker_{rank}", 4) in chosen
    assert session_key("worker_5000", 1) in sessions_to_read(keys, 5000)


@pytest.mark.parametrize(
    ("include", "rank", "expected"),
    [("one", 0, True), ("one", 1, False), ("all", 3, True), ([2, 3], 3, True), ((2,), 0, False)],
)
def test_who_saves(include: str | Sequence[int], rank: int, expected: bool) -> None:
    assert rank_saves(rank, include) is expected


ENROL = """
import sys
from smdist.errors import RunExists
from smdist.storage import loop_thread as sync
from smdist.storage.local import LocalStore
from smdist.workers.join.enrolment import join_run, new_session
from smdist.workers.join.rank import resolve_rank
try:
    intent = new_session(resolve_rank(), include_workers="all", resume=len(sys.argv) > 2,
                    framework="pytorch")
    made = sync.run(join_run(LocalStore(sys.argv[1]), *intent))
    print(made.run.run_id, made.session.attempt)
except RunExists:
    print("RunExists")
"""


def enrol_in_a_process(folder: Path, *arguments: str, **environ: str) -> list[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SMDIST_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-c", ENROL, str(folder), *arguments],
        env=clean | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.slow
def test_real_processes_in_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two = {"SMDIST_WORLD_SIZE": "2"}
    run_id, attempt = enrol_in_a_process(folder, **two, SMDIST_RANK="0")
    assert attempt == "0"
    # The same parent started it, though the first is dead by now.
    assert enrol_in_a_process(folder, **two, SMDIST_RANK="1") == [run_id, "0"]
    assert enrol_in_a_process(folder, **two, SMDIST_RANK="1") == ["RunExists"]
    assert enrol_in_a_process(folder, **two, SMDIST_RANK="1", SMDIST_RESTART="1") == [run_id, "1"]
    assert enrol_in_a_process(folder, **two, SMDIST_RANK="0", SMDIST_RESTART="1") == [run_id, "1"]
    assert enrol_in_a_process(folder, "resume", **two, SMDIST_RANK="0") == [run_id, "2"]
    assert enrol_in_a_process(folder, **two, SMDIST_RANK="0", SMDIST_ATTEMPT="7") == [run_id, "7"]


def test_who_was_killed_after_entering_finds_its_own_session() -> None:
    shelf = Shelf()
    identity = Identity(0, 1, None, None, "explicit", settled=True)
    intent = new_session(
        identity, include_workers="all", resume=False, framework="pytorch", environ={}
    )
    assert intent[0].attempt == UNKNOWN_ATTEMPT
    first = asyncio.run(join_run(shelf, *intent))
    run_id = first.run.run_id
    assert first.session == msgspec.structs.replace(intent[0], attempt=0, run_id=run_id)
    before = dict(shelf.objects)
    assert asyncio.run(join_run(shelf, *intent)) == first
    assert shelf.objects == before
    other = new_session(
        identity, include_workers="all", resume=False, framework="pytorch", environ={}
    )
    with pytest.raises(RunExists):
        asyncio.run(join_run(shelf, *other))
