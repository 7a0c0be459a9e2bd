"""Commits into a store in memory: what order they have, and where the next uploader goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from smdist.errors import ObjectExists, StoreError, StoreForbidden
from smdist.format.fold import FoldedRecords
from smdist.format.journal_records import Describe
from smdist.format.manifest import (
    RankManifest,
    Session,
    StepEntry,
    manifest_key,
    segment_key,
    summary_key,
)
from smdist.format.segment import Segment
from smdist.format.stored_json import encode
from smdist.storage import Buffer, MemoryStore
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.upload.batch import Batch, nothing
from smdist.workers.upload.commit import Committer, Ending, ResumePoint, resume_point
from smdist.workers.upload.retry import ForeignObject, Retrier, RetryDeadlineExceeded

SESSION = Session("mine", 0, 1, 0, "all", 0.0, "host", 1, "")


class Watched(MemoryStore):
    """Remembers the order of puts. A key with a gate waits for it; one answer can get lost."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.lose_answer_of = ""

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        if key in self.gates:
            await self.gates[key].wait()
        await super().put(key, data, if_absent=if_absent)
        self.order.append(key)
        if key == self.lose_answer_of:
            self.lose_answer_of = ""
            raise StoreError(self.url, key, "put", "connection reset")


@pytest.fixture
def ack_page(tmp_path: Path) -> Iterator[AckPage]:
    ack_page = AckPage(tmp_path / "ack_page")
    yield ack_page
    ack_page.close()


def make_batch(seq: int, first: int, upto: int, described: bytes = b"") -> Batch:
    key = segment_key("worker_0", 0, seq, "0")
    describe = (Describe("collections/worker_0.json", described),) if described else ()
    news = FoldedRecords(first, upto, (), (), (), describe, None, False, 100)
    return Batch(seq, news, Segment(key, (b"data",), 4, (), {}))


def manifest(seq: int, upto: int, session: str = "mine") -> bytes:
    made = RankManifest(session, 0, 1, 0, "all", seq, 0, upto, "active", 0.0)
    return encode(made, manifest_key("worker_0", 0, seq))


def committer(store: Watched, ack_page: AckPage) -> Committer:
    retrier = Retrier(ack_page, lambda _text: None, lambda: 0)
    return Committer(store, SESSION, ack_page, retrier, ResumePoint(0, 0, None))


async def turn_until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def test_manifests_come_in_order_whatever_segment_is_slow(ack_page: AckPage) -> None:
    async def scenario() -> list[str]:
        store = Watched()
        slow = store.gates[segment_key("worker_0", 0, 0, "0")] = asyncio.Event()
        work = committer(store, ack_page)
        work.launch(make_batch(0, 0, 5, b"old"), None, lambda: None)
        work.launch(make_batch(1, 5, 9, b"new"), Ending("ended", ""), lambda: None)
        assert (work.in_flight, work.bytes_in_flight) == (2, 200)
        await turn_until(lambda: segment_key("worker_0", 0, 1, "0") in store.order)
        assert ack_page.acked == 0
        slow.set()
        await turn_until(lambda: ack_page.acked == 9)
        assert [batch.seq for batch in work.finished()] == [0, 1]
        assert (work.in_flight, work.bytes_in_flight) == (0, 0)
        assert await store.get("collections/worker_0.json") == b"new"
        return store.order

    assert asyncio.run(scenario()) == [
        "segments/worker_0/000000-00000001-0.safetensors",
        "segments/worker_0/000000-00000000-0.safetensors",
        "collections/worker_0.json",
        "manifests/worker_0/000000-00000000.json",
        "collections/worker_0.json",
        "manifests/worker_0/000000-00000001.json",
    ]


def test_a_lost_answer_is_no_second_manifest(ack_page: AckPage) -> None:
    async def scenario() -> list[str]:
        store = Watched()
        store.lose_answer_of = manifest_key("worker_0", 0, 0)
        work = committer(store, ack_page)
        work.launch(nothing(3, 0), Ending("lost", "killed"), lambda: None)
        await turn_until(lambda: ack_page.acked == 3)
        return store.order

    assert asyncio.run(scenario()) == [manifest_key("worker_0", 0, 0)]


def test_a_manifest_of_somebody_else_is_not_replaced(ack_page: AckPage) -> None:
    async def scenario() -> bytes:
        store, key = Watched(), manifest_key("worker_0", 0, 0)
        await store.put(key, (manifest(0, 7),))
        work = committer(store, ack_page)
        done = asyncio.Event()
        work.launch(nothing(3, 0), None, done.set)
        await done.wait()
        with pytest.raises(ForeignObject):
            work.finished()
        return await store.get(key)

    assert asyncio.run(scenario()) == manifest(0, 7)
    assert ack_page.acked == 0


@pytest.mark.parametrize("kind", [StoreError, StoreForbidden])
def test_a_successor_that_cannot_look_again_goes_on(
    ack_page: AckPage, kind: type[StoreError]
) -> None:
    """Looking whether a late manifest of its predecessor replaced its own is a courtesy at first."""

    class Blind(Watched):
        async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            raise kind(self.url, key, "get", "not now")

        async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
            raise kind(self.url, prefix, "list", "not now")

    async def scenario() -> None:
        retrier = Retrier(ack_page, lambda _text: None, lambda: 0)
        retrier.set_idle_deadline(0.0)
        start = ResumePoint(0, 0, None)
        work = Committer(Blind(), SESSION, ack_page, retrier, start, succeeds=True)
        for seq in range(3):
            work.launch(make_batch(seq, 5 * seq, 5 * seq + 5), None, lambda: None)
        await turn_until(lambda: ack_page.acked == 15)
        await turn_until(lambda: len(work.finished()) == 3 or not work.in_flight)
        if kind is StoreForbidden:
            await work.verify_before_exit()
        else:
            with pytest.raises(
                RetryDeadlineExceeded
            ):  # before the spool is removed it has to be sure
                await work.verify_before_exit()

    asyncio.run(scenario())


def test_a_successor_insists_on_removing_what_no_manifest_names(ack_page: AckPage) -> None:
    class Stubborn(Watched):
        refusals = 3

        async def delete(self, key: str) -> None:
            if self.refusals:
                self.refusals -= 1
                raise StoreError(self.url, key, "delete", "connection reset")
            await super().delete(key)

    async def scenario() -> Sequence[str]:
        store, retrier = Stubborn(), Retrier(ack_page, lambda _text: None, lambda: 0)
        await store.put(segment_key("worker_0", 0, 0, "predecessor"), (b"unnamed",))
        start = ResumePoint(0, 0, None)
        work = Committer(store, SESSION, ack_page, retrier, start, succeeds=True)
        work.launch(make_batch(0, 0, 5), Ending("ended", ""), lambda: None)
        await turn_until(lambda: len(work.finished()) == 1)
        await work.verify_before_exit()
        return await store.list("segments/")

    assert asyncio.run(scenario()) == [segment_key("worker_0", 0, 0, "0")]


def test_closing_gives_up_what_is_on_its_way(ack_page: AckPage) -> None:
    async def scenario() -> list[str]:
        store = Watched()
        store.gates[segment_key("worker_0", 0, 0, "0")] = asyncio.Event()
        work = committer(store, ack_page)
        work.launch(make_batch(0, 0, 5), None, lambda: None)
        work.launch(make_batch(1, 5, 9), None, lambda: None)
        await asyncio.sleep(0)
        await work.close()
        return [key for key in store.order if key.startswith("manifests/")]

    assert asyncio.run(scenario()) == []


# -- where to go on --------------------------------------------------------------------------------


def resume(store: MemoryStore) -> tuple[int, int]:
    point = asyncio.run(resume_point(store, SESSION))
    return point.seq, point.upto


def fill(objects: dict[str, bytes]) -> MemoryStore:
    async def put() -> MemoryStore:
        store = MemoryStore()
        for key, data in objects.items():
            await store.put(key, (data,))
        return store

    return asyncio.run(put())


def test_an_empty_store_is_a_beginning() -> None:
    assert resume(fill({})) == (0, 0)


def test_it_goes_on_behind_the_newest_manifest_of_this_attempt() -> None:
    store = fill(
        {
            manifest_key("worker_0", 0, 9): manifest(9, 50),
            manifest_key("worker_0", 0, 10): manifest(10, 60),
            manifest_key("worker_0", 1, 0): manifest(0, 5, "later attempt"),
            manifest_key("worker_1", 0, 99): manifest(99, 900, "other rank"),
        }
    )
    assert resume(store) == (11, 60)


def naming(seq: int, upto: int, segment: str) -> bytes:
    steps = (StepEntry(1, 0, 0, 0, True, "layout", segment, 0, 0.0, 0.0),)
    made = RankManifest("mine", 0, 1, 0, "all", seq, 0, upto, "active", 0.0, steps)
    return encode(made, manifest_key("worker_0", 0, seq))


def test_segments_that_no_manifest_can_come_to_name_are_removed() -> None:
    keys = [segment_key("worker_0", 0, seq, life) for seq in range(5) for life in "ab"]
    others = [segment_key("worker_0", 1, 3, "0"), segment_key("worker_1", 0, 3, "0")]
    last = {manifest_key("worker_0", 0, 1): naming(1, 50, keys[3])}
    store = fill({**last, **dict.fromkeys(keys + others, b"x")})
    assert resume(store) == (2, 50)
    # Of 1 what its manifest names. Of 2 all: a manifest that names one may be on its way.
    left = [*keys[:2], keys[3], *keys[4:6]]
    assert list(asyncio.run(store.list("segments/"))) == sorted(left + others)


def test_uploads_of_whatever_can_be_large_are_swept() -> None:
    swept: list[str] = []

    class HasParts(Watched):
        dangling_uploads = False

        async def sweep_uploads(self, prefix: str) -> int:
            swept.append(prefix)
            return 0

    assert asyncio.run(resume_point(HasParts(), SESSION)).seq == 0
    large = (
        segment_key("worker_0", 0, 3, "0"),
        manifest_key("worker_0", 0, 3),
        summary_key("worker_0", 0),
    )
    for key in large:
        assert sum(key.startswith(prefix) for prefix in swept) == 1, key
    assert not summary_key("worker_0", 1).startswith(tuple(swept))


def test_a_manifest_that_a_power_cut_emptied_is_written_again() -> None:
    key = manifest_key("worker_0", 0, 1)
    store = fill({manifest_key("worker_0", 0, 0): manifest(0, 8), key: b""})
    assert resume(store) == (1, 8)
    assert key not in asyncio.run(store.list())


def test_manifests_of_another_process_are_a_conflict() -> None:
    store = fill({manifest_key("worker_0", 0, 0): manifest(0, 8, "theirs")})
    with pytest.raises(ForeignObject, match="another process"):
        resume(store)


def test_the_store_in_memory_refuses_as_real_ones_do() -> None:
    store = fill({"a": b"x"})
    with pytest.raises(ObjectExists):
        asyncio.run(store.put("a", (b"y",), if_absent=True))
