"""However much was captured and however slow the store is, little is on its way to it at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from smdist.storage import Buffer
from smdist.storage.local import LocalStore
from smdist.workers.spool.spool import UploadOptions
from smdist.workers.upload.recover import recover
from tests.support.uploader_rig import Job, leave_behind, read_store

STEPS, STEP_BYTES = 40, 80_000
BATCHES = 4


class FullStore(LocalStore):
    """Segments arrive and stay under way until no more come; counts how many bytes that were."""

    def __init__(self, root: str, expected: int) -> None:
        super().__init__(root)
        self._expected, self._under_way = expected, 0
        self._arrived = asyncio.Condition()
        self.bytes_under_way = self.most_bytes = self.most = self.waves = 0

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        if not key.startswith("segments/"):
            await super().put(key, data, if_absent=if_absent)
            return
        size = sum(memoryview(buffer).nbytes for buffer in data)
        self._under_way += 1
        self.bytes_under_way += size
        self.most = max(self.most, self._under_way)
        self.most_bytes = max(self.most_bytes, self.bytes_under_way)
        try:
            await self._hold()
            await super().put(key, data, if_absent=if_absent)
        finally:
            self._under_way -= 1
            self.bytes_under_way -= size

    async def _hold(self) -> None:
        """The first wave waits until it is as large as it may become, and then some."""
        async with self._arrived:
            self._arrived.notify_all()
            await self._arrived.wait_for(lambda: self.most >= self._expected)
        for _ in range(50):  # turns of the loop, in which one more would come if it could
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("segment_bytes", "batches", "most_bytes"),
    [
        (STEP_BYTES + 10_000, BATCHES, BATCHES * STEP_BYTES),
        (4 * STEP_BYTES + 1_000, BATCHES, 16 * STEP_BYTES),
        (STEP_BYTES // 2, 2, 2 * STEP_BYTES),  # a step is larger: its bytes are the limit
    ],
)
def test_what_is_on_its_way_is_bounded_by_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    segment_bytes: int,
    batches: int,
    most_bytes: int,
) -> None:
    upload = UploadOptions(segment_bytes=segment_bytes, nice=0)
    job = Job(str(tmp_path / "spools"), str(tmp_path / "out"), slots=STEPS, upload=upload)
    spool = leave_behind(job, STEPS)
    store = FullStore(job.out_dir, batches)
    monkeypatch.setattr("smdist.workers.upload.uploader.open_store", lambda *_, **__: store)
    recover(spool.path, lambda _text: None)
    assert store.most == batches
    headers = batches * 8_000
    assert most_bytes <= store.most_bytes <= most_bytes + headers
    assert store.most_bytes <= 4 * max(segment_bytes, STEP_BYTES) + headers
    stored = read_store(tmp_path / "out", job.elements)
    assert sorted(stored.raw) == list(range(STEPS))
