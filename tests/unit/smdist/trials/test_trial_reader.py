"""Ranged reads: few requests, every byte checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.errors import CorruptObject
from smdist.identity import ModeKeys
from smdist.storage import LocalStore, MemoryStore
from smdist.storage import loop_thread as sync
from smdist.storage.store import Buffer
from smdist.trials.catalogue import Catalogue
from smdist.trials.segment_reader import FEW, ObjectRange, SegmentReader, plan_reads
from smdist.trials.trial import Trial
from tests.support.run_builder import RunBuilder, Saved
from tests.support.snapshot_writer import SnapshotWriter

TRAIN = ModeKeys.TRAIN

ranges = st.lists(
    st.builds(
        lambda key, start, size: ObjectRange(key, start, start + size),
        st.sampled_from(["a", "b"]),
        st.integers(0, 1000),
        st.integers(1, 200),
    ),
    max_size=20,
)


@given(ranges, st.integers(0, 100), st.integers(1, 500))
def test_every_range_is_covered_once_by_a_request(
    wanted: list[ObjectRange], gap: int, span: int
) -> None:
    requests = plan_reads(wanted, gap, span)
    covered = [place for request in requests for place in request.members]
    assert sorted(covered) == list(range(len(wanted)))
    largest = max((want.nbytes for want in wanted), default=0)
    for request in requests:
        assert request.range.nbytes <= max(span, largest)
        for place in request.members:
            assert request.range.key == wanted[place].key
            assert request.range.start <= wanted[place].start
            assert wanted[place].stop <= request.range.stop


def test_near_ranges_share_a_request_and_far_ones_do_not() -> None:
    wanted = [
        ObjectRange("a", 0, 10),
        ObjectRange("a", 500, 510),
        ObjectRange("a", 20, 30),
        ObjectRange("b", 0, 10),
    ]
    requests = plan_reads(wanted, gap=10, span=1000)
    assert [(tuple(r.range), r.members) for r in requests] == [
        (("a", 0, 30), (0, 2)),
        (("a", 500, 510), (1,)),
        (("b", 0, 10), (3,)),
    ]


class CountingStore:
    """A real store that keeps count of what is asked of it."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._store = store if store is not None else MemoryStore()
        self.gets: list[str] = []
        self.lists: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return self._store.url

    async def check(self) -> None:
        await self._store.check()

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        await self._store.put(key, data, if_absent=if_absent)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.gets.append(key)
        return await self._store.get(key, start, stop)

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        self.lists.append((prefix, after))
        return await self._store.list(prefix, after=after)

    async def delete(self, key: str) -> None:
        await self._store.delete(key)

    async def close(self) -> None:
        await self._store.close()

    def kinds(self) -> Counter[str]:
        """What was read since the last time, by the first part of the key."""
        seen = Counter(key.split("/")[0] for key in self.gets)
        self.gets = []
        return seen


def open_trial(store: CountingStore) -> Trial:
    return Trial(store, "t", store.url, Catalogue())


def test_many_small_tensors_of_a_block_are_one_request() -> None:
    store = CountingStore()
    tensors = {f"t{i}": np.full(3, i, np.float32) for i in range(50)}
    RunBuilder(store).rank(0).step(TRAIN, 0, tensors).end()
    trial = open_trial(store)
    store.kinds()
    values = trial.values()
    assert [values[f"t{i}"][0]["worker_0"][0] for i in range(50)] == list(range(50))
    assert store.kinds() == {"segments": 1}


def test_statistics_of_a_block_are_read_once() -> None:
    store = CountingStore()
    saved = Saved(np.arange(4.0), raw=False, reductions=())
    RunBuilder(store).rank(0).step(TRAIN, 0, {f"t{i}": saved for i in range(20)}).end()
    trial = open_trial(store)
    store.kinds()
    for name in trial.tensor_names():
        assert trial.tensor(name).reduction_value(0, "mean") == 1.5
    assert store.kinds() == {"segments": 1}


def test_only_what_is_new_is_read_again_and_a_finished_job_never() -> None:
    store = CountingStore()
    run = RunBuilder(store)
    writers = [run.rank(rank, 2) for rank in range(2)]
    for writer in writers:
        for step in range(3):
            writer.step(TRAIN, step, {"x": np.zeros(2)}).flush()
    trial = open_trial(store)
    assert store.kinds() == {"run.json": 1, "sessions": 2, "manifests": 6, "layouts": 1,
                             "collections": 1, "heartbeats": 2, "merged": 1}  # fmt: skip
    for writer in writers:
        writer.step(TRAIN, 3, {"x": np.zeros(2)}).flush()
    trial.refresh()
    assert trial.steps() == [0, 1, 2, 3]
    seen = store.kinds()
    assert (seen["manifests"], seen["layouts"], seen["sessions"]) == (2, 0, 0)
    for writer in writers:
        writer.end()
    assert trial.loaded_all_steps
    store.kinds()
    lists = len(store.lists)
    assert trial.loaded_all_steps
    assert trial.steps(ModeKeys.EVAL) == []
    assert not trial.has_tensor("nowhere")
    assert (store.kinds(), len(store.lists)) == ({}, lists)


def _damage(store: CountingStore, key: str, at: int | None) -> None:
    async def work() -> None:
        data = bytearray(await store.get(key))
        if at is None:
            del data[-16:]
        else:
            data[at] ^= 1
        await store.put(key, [bytes(data)])

    sync.run(work())


@pytest.mark.parametrize(("at", "what"), [(-16, "CRC32C"), (None, "early")])
def test_damaged_bytes_are_never_returned(at: int | None, what: str) -> None:
    store = CountingStore()
    RunBuilder(store).rank(0).step(TRAIN, 0, {"x": np.ones(64)}).end()
    (key,) = sync.run(store.list("segments/"))
    # The checksums follow the 8-byte elements: damage the last of those.
    _damage(store, key, None if at is None else at - 8)
    with pytest.raises(CorruptObject, match=what) as caught:
        open_trial(store).tensor("x").value(0)
    assert caught.value.key == key


@pytest.mark.parametrize("damage", ["name", "shape", "torn", "gone"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_layout_that_is_not_what_it_was_is_told_where_values_are_asked(
    damage: str, merged: bool
) -> None:
    store = CountingStore()
    rank = RunBuilder(store).rank(0)
    rank.step(TRAIN, 0, {"x": np.ones((2, 8)), "y": np.ones(1)})
    rank.step(TRAIN, 1, {"z": np.ones(1)}).end()
    (key,) = [k for k in sync.run(store.list("layouts/")) if b'"x"' in sync.run(store.get(k))]
    data = sync.run(store.get(key))
    if merged:  # and what the coordinator copied is no better
        SnapshotWriter(store).write(final=True)
    for place in [key, *sync.run(store.list("merged/heads/"))]:
        text = sync.run(store.get(place))
        if damage == "gone":
            sync.run(store.delete(place))
            continue
        wrong = {
            "name": text.replace(b'"x"', b'"w"'),
            "shape": text.replace(b"[2,8]", b"[4,4]"),
            "torn": text[:-10],
        }[damage]
        assert wrong != text
        sync.run(store.put(place, [wrong]))
    trial = open_trial(store)
    assert trial.steps() == [1]
    assert trial.missing(0) == {0: "damaged"}
    assert any(key in text for text in trial.troubles()[""])
    questions: list[Callable[[], object]] = [
        lambda: trial.tensor("x"),
        lambda: trial.tensor("z").value(0),
        lambda: trial.tensor("z").value(0, worker=0),
        lambda: trial.tensor("z").values(show_incomplete_steps=True),
        lambda: trial.tensor("z").stack(0),
        lambda: trial.to_dataframe(),
    ]
    for ask in questions:
        with pytest.raises(CorruptObject, match="not known what step 0 holds") as caught:
            ask()
        assert caught.value.key == key
    assert trial.tensor("z").value(1) == 1
    sync.run(store.put(key, [data]))
    trial.refresh()
    assert trial.tensor("x").value(0).shape == (2, 8)
    assert trial.steps() == [0, 1]


def test_an_unreadable_manifest_is_passed_over_and_reported() -> None:
    store = CountingStore()
    rank = RunBuilder(store).rank(0)
    rank.step(TRAIN, 0, {"x": np.ones(1)}).flush()
    rank.step(TRAIN, 1, {"x": np.ones(1)}).end()
    (first, _) = sync.run(store.list("manifests/"))
    sync.run(store.put(first, [b"{"]))
    trial = open_trial(store)
    assert trial.steps() == [1]
    assert first in trial.troubles()[""][0]
    assert trial.loaded_all_steps


def test_a_rank_is_listed_after_what_was_read_and_not_at_all_once_it_ended() -> None:
    store = CountingStore()
    run = RunBuilder(store)
    run.rank(0, 2).step(TRAIN, 0, {"x": np.ones(1)}).end()
    run.rank(1, 2).step(TRAIN, 0, {"x": np.ones(1)}).flush()
    trial = open_trial(store)
    store.lists.clear()
    store.kinds()
    trial.refresh()
    assert store.lists == [
        ("sessions/", ""),
        ("manifests/worker_1/", "manifests/worker_1/000000-00000000.json"),
    ]
    assert store.kinds()["heartbeats"] == 1


def test_a_manifest_that_appears_after_its_successor_is_read_and_nothing_twice() -> None:
    store = CountingStore()
    rank = RunBuilder(store).rank(0)
    rank.step(TRAIN, 0, {"x": np.ones(1)}).flush()
    rank.step(TRAIN, 1, {"x": np.ones(1)}).flush()
    (first, _) = sync.run(store.list("manifests/"))
    held_back = sync.run(store.get(first))
    sync.run(store.delete(first))
    trial = open_trial(store)
    assert trial.steps() == [1]
    sync.run(store.put(first, [held_back]))
    store.kinds()
    trial.refresh()
    assert trial.steps() == [0, 1]
    assert store.kinds()["manifests"] == 1


def test_what_came_with_a_manifest_needs_no_request_of_its_own() -> None:
    store = CountingStore()
    writer = RunBuilder(store).rank(0)
    writer.attach_bytes = 1 << 16
    measured = Saved(np.arange(4.0), raw=False, reductions=())
    for step in range(3):
        writer.step(TRAIN, step, {"loss": np.array(step / 2), "w": measured}).flush()
    writer.step(TRAIN, 3, {"big": np.arange(100)}).end()
    assert len(sync.run(store.list("segments/"))) == 1
    trial = open_trial(store)
    store.kinds()
    losses = trial.tensor("loss").values(mode=TRAIN)
    assert {step: float(value) for step, value in losses.items()} == {0: 0.0, 1: 0.5, 2: 1.0}
    assert trial.tensor("w").reduction_value(1, "mean", mode=TRAIN) == 1.5
    assert store.kinds() == {}
    np.testing.assert_array_equal(trial.tensor("big").value(3, mode=TRAIN), np.arange(100))
    assert store.kinds() == {"segments": 1}


def test_an_attached_segment_that_fell_out_of_the_cache_is_read_again() -> None:
    store = CountingStore()
    writer = RunBuilder(store).rank(0)
    writer.attach_bytes = 1 << 16
    writer.step(TRAIN, 0, {"loss": np.array(0.25)}).end()
    trial = open_trial(store)
    trial.reader = SegmentReader(store, sync.run)
    store.kinds()
    assert trial.tensor("loss").value(0, mode=TRAIN) == 0.25
    assert store.kinds() == {"manifests": 1}


@pytest.mark.parametrize("ranks", [2, FEW + 4])
def test_a_directory_is_read_without_a_loop_as_any_store_is_with_one(
    tmp_path: Path, ranks: int
) -> None:
    """Some of the values came with their manifests; the last segment is damaged afterwards."""
    store = LocalStore(tmp_path)
    builder = RunBuilder(store)
    for rank in range(ranks):
        writer = builder.rank(rank, ranks)
        writer.attach_bytes = 1 << 16
        for step in range(3):
            writer.step(TRAIN, step, {"loss": np.array(step / 2)}).flush()
            writer.step(TRAIN, step + 3, {"big": np.full(100, 10.0 * rank + step)}).flush()
        writer.end()
    trial = Trial(store, "t", store.url, Catalogue())
    trial.reader = SegmentReader(store, forbidden)
    losses = trial.values(["loss"], [2], mode=TRAIN)["loss"][2]
    assert losses == {f"worker_{rank}": 1.0 for rank in range(ranks)}
    found = trial.values(["big"], [4, 5], mode=TRAIN)["big"]
    for rank, worker in enumerate(trial.workers()):
        assert [found[step][worker][7] for step in (4, 5)] == [10.0 * rank + 1, 10.0 * rank + 2]
    last = max((tmp_path / "segments" / f"worker_{ranks - 1}").iterdir())
    last.write_bytes(last.read_bytes()[:-40])
    trial.reader = SegmentReader(store, forbidden)
    with pytest.raises(CorruptObject, match="early"):
        trial.values(["big"], [5], mode=TRAIN)


def forbidden(_work: object) -> NoReturn:
    raise AssertionError("it went through the loop")
