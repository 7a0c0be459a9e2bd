"""A drain lasts as long as it goes on: only a store that refuses, or says nothing, ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from smdist.errors import StoreError
from smdist.storage import Buffer
from smdist.storage.local import LocalStore
from smdist.workers.spool.spool import UploadOptions
from smdist.workers.upload.recover import find_spools, recover
from smdist.workers.upload.retry import RetryDeadlineExceeded
from tests.support.uploader_rig import Job, leave_behind, read_store

STEPS, LIMIT_S = 12, 30.0


class SlowStore(LocalStore):
    """A put takes five seconds of patience's clock, which no other thing moves.

    `happens` is asked first, with the number of the put.
    """

    def __init__(self, root: str, clock: SlowStore.Clock, happens: Callable[[int], None]) -> None:
        super().__init__(root)
        self._clock, self._happens, self.puts = clock, happens, 0

    class Clock:
        now = 0.0
        time, strftime, localtime = time.time, time.strftime, time.localtime

        def monotonic(self) -> float:
            return self.now

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        self.puts += 1
        self._clock.now += 5.0
        self._happens(self.puts)
        if self._happens is hangs:
            self._clock.now += LIMIT_S
            await asyncio.Event().wait()
        await super().put(key, data, if_absent=if_absent)


def works(_put: int) -> None:
    pass


def hangs(_put: int) -> None:
    pass


def refuses_every_other(put: int) -> None:
    if put % 2:
        raise StoreError("slow", "key", "put", "503")


def refuses_after_ten(put: int) -> None:
    if put > 10:
        raise StoreError("slow", "key", "put", "503")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    upload = UploadOptions(segment_bytes=100_000, heartbeat_s=1000.0, nice=0)  # a step is 80 kB
    slots = STEPS
    return Job(str(tmp_path / "spools"), str(tmp_path / "out"), slots=slots, upload=upload)


def send(job: Job, monkeypatch: pytest.MonkeyPatch, happens: Callable[[int], None]) -> SlowStore:
    spool = leave_behind(job, STEPS)
    store = SlowStore(job.out_dir, SlowStore.Clock(), happens)
    monkeypatch.setattr("smdist.workers.upload.retry.time", store._clock)
    monkeypatch.setattr("smdist.workers.upload.uploader.open_store", lambda *_, **__: store)
    recover(spool.path, lambda _text: None, give_up_s=LIMIT_S)
    return store


@pytest.mark.parametrize("happens", [works, refuses_every_other])
def test_a_drain_that_makes_progress_is_not_given_up(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[int], None]
) -> None:
    store = send(job, monkeypatch, happens)
    assert store._clock.now > 3 * LIMIT_S
    stored = read_store(tmp_path / "out", job.elements)
    assert sorted(stored.raw) == list(range(STEPS))
    assert stored.last.state == "lost"


@pytest.mark.parametrize(("happens", "why"), [(refuses_after_ten, "503"), (hangs, "not answered")])
def test_a_store_that_refuses_or_is_silent_is_given_up(
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[int], None],
    why: str,
) -> None:
    monkeypatch.setattr("smdist.workers.upload.commit._CLOSE_S", 0.1)
    monkeypatch.setattr("smdist.workers.upload.uploader._SHUTDOWN_GRACE_S", 0.1)
    with pytest.raises(RetryDeadlineExceeded, match=why):
        send(job, monkeypatch, happens)
    assert len(find_spools([tmp_path / "spools"])) == 1, "kept, to be sent later"
    if happens is refuses_after_ten:
        assert list((tmp_path / "out" / "manifests").rglob("*.json")), "what went well stays"
