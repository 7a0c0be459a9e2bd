"""A run that is merged once, by whoever comes: the same answers, fewer requests, nothing hidden."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from smdist.coordination.service.merge_once import MergeResult, merge_once
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer, load_view
from smdist.errors import (
    AlreadyCoordinated,
    CoordinationError,
    NoSuchRun,
    StoreError,
    StoreForbidden,
)
from smdist.format.manifest import CollectionInfo, Session, session_key
from smdist.identity import ModeKeys
from smdist.storage import MemoryStore
from smdist.storage import loop_thread as sync
from smdist.storage.store import Buffer, Store
from smdist.workers.upload import final_merge as closing
from smdist.workers.upload.final_merge import Rank, merge_if_last
from smdist.workers.upload.summaries import Summary
from tests.support.coordinator_driver import from_scratch
from tests.support.run_builder import RankWriter, RunBuilder, Saved
from tests.unit.smdist.trials.test_trial_reader import CountingStore
from tests.unit.smdist.trials.test_trial_snapshot import answers, open_trial, without_snapshots

TRAIN, EVAL = ModeKeys.TRAIN, ModeKeys.EVAL
OPEN = 5  # run, pointer, head, collections; the listing of sessions


def summarise(writer: RankWriter) -> None:
    data = sync.run(writer.store.get(session_key(writer.worker, writer.session.attempt)))
    summary = Summary(msgspec.json.decode(data, type=Session))
    sync.run(summary.write(writer.store, writer.seq))


def work(writer: RankWriter, steps: range) -> RankWriter:
    rank = writer.session.rank
    for step in steps:
        value = np.full(3, 100 * rank + step, np.float32)
        writer.step(TRAIN, step, {"a": value, "b": Saved(value, False, ["max"])}).flush()
    return writer


def finish(writer: RankWriter, *, lost: bool = False) -> RankWriter:
    (writer.lose if lost else writer.end)()
    summarise(writer)
    return writer


def build(
    store: Store, ranks: int = 8, steps: int = 4, *, lost: Sequence[int] = (), attempt: int = 0
) -> list[RankWriter]:
    """A finished run of which each rank has left a summary."""
    run = RunBuilder(store)
    writers = [run.rank(rank, ranks, attempt=attempt) for rank in range(ranks)]
    writers[0].describe(CollectionInfo("weights"))
    for writer in writers:
        finish(work(writer, range(steps)), lost=writer.session.rank in lost)
    return writers


def merge(store: Store) -> MergeResult:
    return sync.run(merge_once(store))


def pointer(store: MemoryStore) -> Pointer:
    return msgspec.json.decode(store.objects[POINTER_KEY], type=Pointer)


def requests_to_open(store: MemoryStore) -> int:
    counting = CountingStore(store)
    with open_trial(counting) as trial:
        found = len(counting.gets) + len(counting.lists)
        assert trial.steps()
    return found


def told(store: MemoryStore) -> dict[str, str]:
    with open_trial(store) as trial:
        return {str(question): repr(answer) for question, answer in answers(trial).items()}


def assert_same(store: MemoryStore) -> None:
    assert told(store) == told(without_snapshots(store))


# -- what it is for --------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [(), (1,), tuple(range(16))], ids=["all ended", "one", "all lost"])
@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("steps", [4, 40])
def test_merged_run_opens_with_few_requests(ranks: int, steps: int, lost: tuple[int, ...]) -> None:
    store = MemoryStore()
    build(store, ranks, steps, lost=lost)
    assert requests_to_open(store) >= OPEN + ranks
    done = merge(store)
    assert done.written
    assert done.status.final
    assert requests_to_open(store) == OPEN + (1 if lost else 0)


def test_merging_changes_no_answer() -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    writers = [run.rank(rank, 5) for rank in range(5)]
    writers[0].describe(CollectionInfo("weights"), CollectionInfo("mine"))
    for writer in writers:
        writer.attach_bytes = 1 << 20
        work(writer, range(6))
        writer.step(EVAL, 0, {"loss": np.array(writer.session.rank, np.float32)}, step=6)
    writers[1].drop(TRAIN, 7, "a").trouble("no room")
    writers[2].step(TRAIN, 6, {"a": np.ones(3, np.float32)}, step=7, close=False)
    for writer in writers:
        finish(writer, lost=writer is writers[2])
    before = told(store)
    assert merge(store).written
    assert told(store) == before


def test_scalars_of_a_merged_run_are_read_by_session() -> None:
    """They travelled in manifests; one request for all of a rank, as before it was merged."""
    store = MemoryStore()
    run = RunBuilder(store)
    writers = [run.rank(rank, 8) for rank in range(8)]
    for writer in writers:
        writer.attach_bytes = 1 << 20
        for step in range(20):
            loss = np.array(100 * writer.session.rank + step, np.float32)
            writer.step(TRAIN, step, {"loss": loss}).flush()
        finish(writer)
    late = finish(writers[7].step(TRAIN, 20, {"loss": np.array(720, np.float32)}), lost=True)
    merge(store)
    counting = CountingStore(store)
    with open_trial(counting) as trial:
        counting.gets.clear()
        workers = [f"worker_{rank}" for rank in range(8)]
        found = trial.values(["loss"], range(20), workers)
        assert {s: v["worker_5"] for s, v in found["loss"].items()} == {
            s: 500 + s for s in range(20)
        }
        summaries = [key for key in counting.gets if key.startswith("summaries/")]
        assert len(summaries) == 8
        assert not [key for key in counting.gets if key.startswith("manifests/")]
        # One number of one step: its manifest alone. Without summaries: manifest by manifest.
    for key in [key for key in store.objects if key.startswith("summaries/")]:
        del store.objects[key]
    with open_trial(counting) as trial:
        counting.gets.clear()
        assert trial.tensor("loss").value(20, worker=late.worker) == 720
        assert not [key for key in counting.gets if key.startswith("summaries/")]
        assert trial.tensor("loss").values(worker="worker_3")[19] == 319


def test_second_merge_writes_nothing() -> None:
    store = MemoryStore()
    build(store, lost=(3,))
    merge(store)
    kept = dict(store.objects)
    done = merge(store)
    assert (done.written, done.status.state, done.status.final) == (False, "finished", True)
    assert store.objects == kept


def test_merge_without_a_run_raises() -> None:
    with pytest.raises(NoSuchRun):
        merge(MemoryStore())


# -- what comes later ------------------------------------------------------------------------


def test_run_that_continues_after_a_merge_is_visible() -> None:
    store = MemoryStore()
    build(store)
    merge(store)
    run = RunBuilder(store)
    writers = [work(run.rank(rank, 8, attempt=1), range(2, 6)) for rank in range(8)]
    with open_trial(store) as trial:
        assert trial.steps() == [0, 1, 2, 3, 4, 5]
        assert not trial.loaded_all_steps
    for writer in writers:
        finish(writer)
    assert_same(store)
    assert merge(store).written
    assert_same(store)
    assert requests_to_open(store) == OPEN
    with open_trial(store) as trial:
        assert [attempt.number for attempt in trial.attempts()] == [0, 1]


@pytest.mark.parametrize("lost", [(2,), tuple(range(8))])
def test_data_recovered_after_a_merge_is_visible(lost: tuple[int, ...]) -> None:
    store = MemoryStore()
    writers = build(store, lost=lost)
    merge(store)
    work(writers[2], range(4, 6)).lose()
    assert_recovered(store)
    summarise(writers[2])
    assert merge(store).written
    assert_recovered(store)
    assert_same(store)


def assert_recovered(store: MemoryStore) -> None:
    with open_trial(store) as trial:
        assert trial.steps(show_incomplete_steps=True) == [0, 1, 2, 3, 4, 5]
        assert trial.tensor("a").value(5, worker="worker_2")[0] == 205


def test_live_run_is_merged_as_it_is() -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    writers = [work(run.rank(rank, 8), range(200)) for rank in range(8)]
    done = merge(store)
    assert done.written
    assert not done.status.final
    assert done.status.complete_steps == 200
    assert pointer(store).number == 1, "one snapshot, however long the backlog"
    assert not merge(store).written, "nothing is new"
    for writer in writers:
        work(writer, range(200, 201))
    # At once: whoever wrote the snapshot did not stay to write the next.
    with open_trial(store) as trial:
        assert trial.last_complete_step == 200
        assert not trial.loaded_all_steps
    assert merge(store).written
    with open_trial(store) as trial:
        assert trial.last_complete_step == 200


def test_merge_continues_from_a_dead_coordinators_snapshot() -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    writers = [work(run.rank(rank, 8), range(3)) for rank in range(8)]
    writers[0].describe(CollectionInfo("weights"))

    async def coordinate() -> None:
        watcher = RunWatcher(store.url, store=store, now=lambda: 1000.0)
        await watcher.open()
        await watcher.poll_once()

    sync.run(coordinate())
    for writer in writers:
        finish(work(writer, range(3, 5)))
    assert merge(store).status.final
    assert_same(store)
    assert requests_to_open(store) == OPEN


# -- damaged runs ----------------------------------------------------------------------------


def keys_of(store: MemoryStore, prefix: str) -> list[str]:
    return sorted(key for key in store.objects if key.startswith(prefix))


def two_modes() -> MemoryStore:
    """A merged run with one chunk for TRAIN and one for EVAL."""
    store = MemoryStore()
    run = RunBuilder(store)
    for rank in range(3):
        writer = work(run.rank(rank, 3), range(3))
        writer.step(EVAL, 0, {"loss": np.array(rank, np.float32)}, step=3).flush()
        finish(writer)
    merge(store)
    assert len(keys_of(store, "merged/steps/")) == 2
    return store


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_merge_keeps_layouts_that_only_the_snapshot_has(damage: str) -> None:
    store = two_modes()
    store.objects[keys_of(store, "merged/steps/")[0]] = b"damaged"
    for key in keys_of(store, "layouts/"):
        if damage == "gone":
            del store.objects[key]
        else:
            store.objects[key] = b"damaged"
    with open_trial(store) as trial:
        assert trial.tensor("a").value(2, worker=1)[0] == 102
    assert merge(store).written
    with open_trial(store) as trial:
        assert trial.tensor("a").value(2, worker=1)[0] == 102
        assert trial.steps() == [0, 1, 2, 3]
        assert trial.troubles() == {}, "the damaged chunk was written again"


def test_merge_keeps_a_layout_pack_that_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smdist.coordination.snapshot.layout_packs._PACK_BYTES", 300)
    store = MemoryStore()
    writer = RunBuilder(store).rank(0)
    for step in range(10):
        writer.step(TRAIN, step, {"a": np.full(step + 1, step, np.float32)}).flush()
    finish(writer)
    merge(store)
    packs = keys_of(store, "merged/layouts/")
    assert len(packs) > 2
    store.objects[packs[0]] = b"damaged"
    done = merge(store)
    assert done.written
    assert packs[0] not in str(done.status.troubles)
    with open_trial(store) as trial:
        assert [trial.tensor("a").value(step)[0] for step in range(10)] == list(range(10))
        assert trial.troubles() == {}


def test_merge_refuses_to_replace_a_snapshot_that_knows_more() -> None:
    """A chunk is damaged, and so are manifests that it was made from."""
    store = two_modes()
    chunk = keys_of(store, "merged/steps/")[0]
    store.objects[chunk] = b"damaged"
    del store.objects["summaries/worker_1/000000.json"]
    store.objects["manifests/worker_1/000000-00000001.json"] = b"damaged"
    before, kept = told(store), dict(store.objects)
    with pytest.raises(CoordinationError, match=r"worker_1") as caught:
        merge(store)
    assert chunk in str(caught.value)
    assert told(store) == before
    for key in keys_of(store, "merged/steps/") + keys_of(store, "merged/heads/") + [POINTER_KEY]:
        assert store.objects[key] == kept[key]


@pytest.mark.parametrize("folder", ["segments/worker_1/", "layouts/"])
def test_merge_names_objects_that_are_gone(folder: str) -> None:
    store = MemoryStore()
    build(store, 3, 4)
    gone = keys_of(store, folder)[0]
    del store.objects[gone]
    done = sync.run(merge_once(store, check_objects=True))
    assert done.missing is not None
    assert list(done.missing.keys) == [gone]
    assert done.missing.complete_steps == done.missing.keys[gone] > 0
    if folder == "layouts/":
        assert any(gone in text and "missing" in text for text in done.status.troubles)


# -- beside others ---------------------------------------------------------------------------


def test_merge_does_not_disturb_an_active_coordinator() -> None:
    store = MemoryStore()
    writers = build(store, 8)
    late = work(RunBuilder(store).rank(8, 9), range(4))

    async def act() -> None:
        watcher = RunWatcher(store.url, store=store)
        await watcher.open()
        await watcher.poll_once()
        kept = dict(store.objects)
        with pytest.raises(AlreadyCoordinated):
            await merge_once(store)
        assert await merge_if_last(store, rank_of(writers[0])) == ""
        assert store.objects == kept
        await watcher.close()

    sync.run(act())
    finish(late)
    assert sync.run(merge_if_last(store, rank_of(late))) == ""
    assert pointer(store).final


class Restless(MemoryStore):
    """Others get their turn at every request; who uses it can be killed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.killed = False

    async def rest(self) -> None:
        for _ in range(self._random.randrange(12)):
            await asyncio.sleep(0)
        if self.killed:
            raise asyncio.CancelledError

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        await self.rest()
        await super().put(key, data, if_absent=if_absent)
        await self.rest()

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        await self.rest()
        return await super().get(key, start, stop)

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        await self.rest()
        return await super().list(prefix, after=after)


def assert_merged(store: MemoryStore) -> None:
    loaded = sync.run(load_view(store, pointer(store)))
    assert pointer(store).final
    assert loaded.head.final
    assert loaded.view.canonical() == from_scratch(without_snapshots(store)).canonical()
    assert_same(store)


@pytest.mark.parametrize("seed", range(30))
def test_uploaders_that_end_together_write_one_snapshot(seed: int) -> None:
    store = Restless(seed)
    writers = build(store, 6, 2)

    async def act() -> None:
        said = await asyncio.gather(*(merge_if_last(store, rank_of(w)) for w in writers))
        assert set(said) == {""}

    sync.run(act())
    assert_merged(store)


@pytest.mark.parametrize("seed", range(30))
def test_merge_killed_at_any_request_loses_nothing(seed: int) -> None:
    store = Restless(seed)
    build(store, 6, 2, lost=(4,))
    before = told(store)

    async def act() -> None:
        merging = asyncio.ensure_future(merge_once(store))
        for _ in range(random.Random(seed).randrange(250)):
            await asyncio.sleep(0)
        store.killed = True
        await asyncio.wait([merging])
        store.killed = False

    sync.run(act())
    assert told(store) == before
    sync.run(merge_once(store, take_over=True))
    assert_merged(store)


class Refusing(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.refuses = False

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        if self.refuses:
            raise StoreForbidden(self.url, key, "write", "read-only")
        await super().put(key, data, if_absent=if_absent)


def test_refusing_store_is_an_error_but_a_note_for_uploaders() -> None:
    store = Refusing()
    writers = build(store)
    store.refuses = True
    with pytest.raises(StoreError):
        merge(store)
    said = sync.run(merge_if_last(store, rank_of(writers[0])))
    assert "was not merged" in said
    assert "smdist merge" in said
    assert_same(store)


# -- which uploader does it ------------------------------------------------------------------


def rank_of(writer: RankWriter, layouts: int = 1, summary_bytes: int = 1000) -> Rank:
    return Rank(writer.session, layouts, summary_bytes)


def asked_by_last(store: MemoryStore, rank: Rank) -> int:
    counting = CountingStore(store)
    assert sync.run(merge_if_last(counting, rank)) == ""
    return len(counting.gets) + len(counting.lists)


def test_small_runs_are_not_merged() -> None:
    for ranks, layouts in ((1, 1), (2, 1), (3, 1), (1, 3)):
        store = MemoryStore()
        writers = build(store, ranks)
        assert asked_by_last(store, rank_of(writers[-1], layouts)) == 0
        assert POINTER_KEY not in store.objects
        assert requests_to_open(store) <= 9


def test_one_rank_with_many_layouts_is_merged() -> None:
    store = MemoryStore()
    writer = RunBuilder(store).rank(0)
    for step in range(10):
        writer.step(TRAIN, step, {"a": np.ones(step + 1, np.float32)}).flush()
    finish(writer)
    assert requests_to_open(store) > 10
    asked_by_last(store, rank_of(writer, layouts=10))
    assert requests_to_open(store) == OPEN


@pytest.mark.parametrize("layouts", [1, 100])
def test_uploader_that_is_not_the_last_lists_once(layouts: int) -> None:
    store = MemoryStore()
    writers = build(store, 8)
    others = RunBuilder(store)
    del store.objects["summaries/worker_5/000000.json"]
    assert asked_by_last(store, rank_of(writers[0], layouts)) == 1
    summarise(writers[5])
    work(others.rank(0, 8, attempt=1), range(2))  # it was started again meanwhile
    assert asked_by_last(store, rank_of(writers[0], layouts)) == 2
    assert POINTER_KEY not in store.objects


def test_large_runs_are_not_merged_by_an_uploader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    writers = build(store, 8)
    monkeypatch.setattr(closing, "_MOST_BYTES", 7999)
    said = sync.run(merge_if_last(store, rank_of(writers[0])))
    assert "smdist merge" in said
    assert POINTER_KEY not in store.objects
    monkeypatch.setattr(closing, "_MOST_BYTES", 8000)
    assert sync.run(merge_if_last(store, rank_of(writers[0]))) == ""
    assert pointer(store).final


def test_elastic_restart_with_fewer_ranks_is_merged() -> None:
    store = MemoryStore()
    build(store, 6, lost=range(6))
    run = RunBuilder(store)
    writer = finish(work(run.rank(0, 1, attempt=1), range(2, 5)))
    asked_by_last(store, rank_of(writer))
    assert pointer(store).final
    assert_same(store)
