"""A trial of a merged run: the same answers with few requests, whatever the coordinator does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Timer
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdist import errors
from smdist.coordination.columnar import chunks as sealed
from smdist.coordination.service.leadership import ClaimId, LeaseRecord
from smdist.coordination.snapshot import layout_packs
from smdist.coordination.snapshot import pack as snapshot
from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer
from smdist.format.manifest import RUN_KEY, RankState
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys
from smdist.storage import MemoryStore
from smdist.storage import loop_thread as sync
from smdist.storage.store import Store
from smdist.trials import Trial
from smdist.trials.catalogue import Catalogue
from tests.support.run_builder import RankWriter, RunBuilder, Saved
from tests.support.snapshot_writer import SnapshotWriter
from tests.unit.smdist.trials.test_trial_reader import CountingStore

TRAIN, EVAL, GLOBAL = ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.GLOBAL
X = {"x": np.zeros(2, np.float32)}


def open_trial(store: Store, **options: Any) -> Trial:
    return Trial(store, "t", store.url, Catalogue(**options))


def without_snapshots(store: MemoryStore) -> MemoryStore:
    bare = MemoryStore()
    bare.objects = {k: v for k, v in store.objects.items() if not k.startswith("merged/")}
    return bare


def grow_old(store: MemoryStore) -> None:
    """The coordinator has not been heard of for long."""
    pointer = msgspec.json.decode(store.objects[POINTER_KEY], type=Pointer)
    old = msgspec.structs.replace(pointer, time=pointer.time - 1000)
    store.objects[POINTER_KEY] = encode(old, POINTER_KEY)


def wait_on(trial: Trial, seconds: float) -> None:
    trial._snapshots.clock = lambda: time.monotonic() + seconds


def asked(question: Callable[..., Any], *about: Any) -> Any:
    try:
        return question(*about)
    except errors.TrialError as error:
        return type(error), str(error)


def answers(trial: Trial) -> dict[Any, Any]:
    """Everything a trial can be asked. What depends on the moment of asking is left out."""
    found: dict[Any, Any] = {
        "workers": trial.workers(),
        "num": trial.num_workers,
        "names": trial.tensor_names(),
        "modes": trial.modes(),
        "last": trial.last_complete_step,
        "dropped": trial.dropped(),
        "troubles": trial.troubles(),
        "collections": sorted(trial.collections()),
        "finished": trial.loaded_all_steps,
        "disagreements": trial.disagreements(),
        "attempts": [
            (a.number, a.expected, a.world_size, a.started, a.steps, a.ranks)
            for a in trial.attempts()
        ],
        "ranks": {a.number: trial.ranks(a.number) for a in trial.attempts()},
    }
    for mode in (GLOBAL, TRAIN, EVAL):
        steps = trial.steps(mode, show_incomplete_steps=True)
        found["steps", mode] = (steps, trial.steps(mode))
        for step in [*steps, 99]:
            found["missing", mode, step] = asked(trial.missing, step, mode)
            found["names", mode, step] = trial.tensor_names(step=step, mode=mode)
            found["passed", mode, step] = trial.has_passed_step(step, mode)
            found["mode", step] = trial.mode_modestep(step)
        for name in trial.tensor_names():
            found |= tensor_answers(trial, name, mode)
    table = trial.to_dataframe(reductions=["max"])
    found["table"] = table.sort_values(["tensor", "step", "worker"]).to_dict("records")
    return found


def tensor_answers(trial: Trial, name: str, mode: ModeKeys) -> dict[Any, Any]:
    tensor = trial.tensor(name)
    found: dict[Any, Any] = {("tensor", name, mode): (tensor.steps(mode), tensor.shapes(mode))}
    for worker in trial.workers():
        values = asked(tensor.values, mode, worker)
        found["values", name, mode, worker] = repr(values)
    for step in tensor.steps(mode, show_incomplete_steps=True):
        found["workers", name, mode, step] = asked(tensor.workers, step, mode)
        found["stack", name, mode, step] = repr(asked(tensor.stack, step, mode))
        found["max", name, mode, step] = asked(tensor.across_ranks, step, "max", mode)
    return found


# -- the same answers ------------------------------------------------------------------------

actions = st.tuples(
    st.sampled_from(["step", "step", "step", "open", "script", "drop", "flush", "numbered"]),
    st.sampled_from([TRAIN, TRAIN, EVAL, GLOBAL]),
    st.integers(0, 3),
)
ranks = st.tuples(
    st.lists(actions, max_size=6), st.sampled_from(["end", "lose", "flush", "silent"])
)
attempts = st.lists(
    st.tuples(st.integers(1, 3), st.lists(ranks, min_size=1, max_size=3)), min_size=1, max_size=2
)
Attempts = list[tuple[int, list[tuple[list[tuple[str, ModeKeys, int]], str]]]]


def act(writer: RankWriter, what: str, mode: ModeKeys, number: int, rank: int) -> None:
    value = np.full(2, 10 * rank + number, np.float32)
    tensors = {"x": Saved(value, reductions=()), f"own{rank % 2}": Saved(value)}
    if what == "flush":
        writer.flush()
    elif what == "drop":
        writer.drop(mode, number, "x").trouble(f"trouble {number}")
    elif what == "numbered":
        writer.step(mode, number, tensors, step=number + rank)
    else:
        writer.step(mode, number, tensors, close=what != "open", planned=what != "script")


def write_attempt(
    run: RunBuilder, number: int, attempt: tuple[int, list[Any]], halfway: Callable[[], object]
) -> None:
    world, every = attempt
    writers = [run.rank(r, world, attempt=number) for r in range(min(world, len(every)))]
    for rank, (writer, (todo, _)) in enumerate(zip(writers, every, strict=False)):
        for what, mode, step in todo[: len(todo) // 2]:
            act(writer, what, mode, step, rank)
        writer.flush()
    halfway()
    for rank, (writer, (todo, ending)) in enumerate(zip(writers, every, strict=False)):
        for what, mode, step in todo[len(todo) // 2 :]:
            act(writer, what, mode, step, rank)
        if ending == "end":
            writer.end()
        elif ending == "lose":
            writer.lose()
        elif ending == "flush":
            writer.flush()


@pytest.fixture(scope="module", autouse=True)
def _few_steps_a_chunk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed, "_LEAST_STEPS", 1)
        patch.setattr(sealed, "_MOST_STEPS", 2)
        patch.setattr(snapshot, "_MOST_DROPS", 1)
        yield


@settings(max_examples=40, deadline=None)
@given(
    attempts,
    st.sampled_from([None, 0, 1]),
    st.sampled_from([(None, None), (1, 3)]),
    st.sampled_from(["fresh", "final", "stale", "restarted", "died"]),
)
def test_a_snapshot_changes_no_answer(
    every: Attempts,
    attempt: int | None,
    range_steps: tuple[int | None, int | None],
    how: str,
) -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    merger = SnapshotWriter(store)
    old: list[Trial] = []

    def halfway() -> None:
        merger.write(age_s=500.0 if how == "stale" else 0.0)
        old.append(open_trial(store, attempt=attempt, range_steps=range_steps))

    for number, one in enumerate(every):
        write_attempt(run, number, one, halfway)
    if how == "restarted":
        merger.restart()
    if how in ("fresh", "final", "restarted"):
        merger.write(final=how == "final")
    elif how == "died":
        grow_old(store)
    for each in old:
        wait_on(each, 1000.0)
    options = {"attempt": attempt, "range_steps": range_steps}
    expected = open_trial(without_snapshots(store), **options)
    trial = open_trial(store, **options)
    for each in (trial, *old):
        each.refresh()
    for each in (trial, *old, expected):
        assert each.catalogue.view.canonical() == expected.catalogue.view.canonical()
        each.dynamic_refresh = False
        each.catalogue = replace(each.catalogue, now=expected.catalogue.now)
    wanted = answers(expected)
    for each in (trial, *old):
        got = answers(each)
        assert got.keys() == wanted.keys()
        for question, answer in wanted.items():
            assert got[question] == answer, question


# -- few requests ----------------------------------------------------------------------------


def job(store: Store, ranks: int, steps: int) -> list[RankWriter]:
    run = RunBuilder(store)
    writers = [run.rank(rank, ranks) for rank in range(ranks)]
    for writer in writers:
        for step in range(steps):
            writer.step(TRAIN, step, {"x": np.full(2, writer.session.rank + step)}).flush()
    return writers


def test_a_merged_run_is_opened_and_read_with_few_requests() -> None:
    store = CountingStore()
    for writer in job(store, 8, 6):
        writer.end()
    SnapshotWriter(store).write(final=True)
    store.kinds()
    store.lists.clear()
    trial = open_trial(store)
    seen = store.kinds()
    assert (seen["run.json"], seen["merged"], set(seen)) == (
        1,
        2,
        {"run.json", "merged", "collections"},
    )
    assert store.lists == [("sessions/", "")]
    assert trial.steps() == [0, 1, 2, 3, 4, 5]
    assert trial.missing(3) == {}
    assert trial.tensor("x").steps() == trial.steps()
    assert "8 workers, 6 steps 0..5, 1 tensors, finished" in repr(trial)
    assert store.kinds() == {}
    assert trial.tensor("x").stack(3)[:, 0].tolist() == [rank + 3 for rank in range(8)]
    assert store.kinds() == {"merged": 1, "segments": 8}
    assert trial.tensor("x").value(2, worker=5)[0] == 7
    assert store.kinds() == {"segments": 1}
    trial.tensor("x").values(worker=2)
    assert store.kinds() == {"merged": 2, "segments": 5}  # that of step 3 is known


def test_a_live_trial_follows_the_pointer_alone() -> None:
    store = CountingStore()
    writers = job(store, 4, 2)
    merger = SnapshotWriter(store).write()
    trial = open_trial(store)
    store.kinds()
    trial.refresh()
    assert store.kinds() == {"merged": 1}
    for writer in writers:
        writer.step(TRAIN, 2, X).flush()
    trial.refresh()
    assert trial.steps() == [0, 1]  # not merged yet: no later than the next snapshot
    merger.write()
    store.kinds()
    store.lists.clear()
    trial.refresh()
    assert trial.steps() == [0, 1, 2]
    seen = store.kinds()
    assert (seen["merged"], seen["layouts"], seen["manifests"], store.lists) == (2, 0, 0, [])


def test_waiting_follows_the_pointer_and_has_a_deadline() -> None:
    store = MemoryStore()
    writers = job(store, 2, 1)
    merger = SnapshotWriter(store).write()
    trial = open_trial(store)
    with pytest.raises(errors.WaitTimeout):
        trial.wait_for_steps([1], timeout_s=0.2)

    def go_on() -> None:
        for writer in writers:
            writer.step(TRAIN, 1, X).end()
        merger.write(final=True)

    timer = Timer(0.3, go_on)
    timer.start()
    try:
        trial.wait_for_steps([1], timeout_s=60)
    finally:
        timer.join()
    assert trial.missing(1) == {}
    with pytest.raises(errors.NoMoreData):
        trial.wait_for_steps([7], timeout_s=60)


def test_of_a_dead_coordinator_only_the_rest_is_read_from_the_ranks() -> None:
    store = CountingStore()
    writers = job(store, 3, 4)
    SnapshotWriter(store).write(age_s=1000)
    for writer in writers[:2]:
        writer.step(TRAIN, 3, {"late": np.ones(1)}).flush()  # more of a step that is sealed
        writer.step(TRAIN, 4, X).flush()
    writers[2].lose()
    store.kinds()
    trial = open_trial(store)
    assert store.kinds()["manifests"] == 5
    assert trial.steps() == [0, 1, 2, 3]
    assert trial.missing(4) == {2: "lost"}
    assert trial.tensor("late").workers(3) == ["worker_0", "worker_1"]
    assert trial.tensor("x").workers(3) == ["worker_0", "worker_1", "worker_2"]
    trial.refresh()
    assert store.kinds()["manifests"] == 0


def test_what_the_ranks_said_is_forgotten_once_a_snapshot_says_it() -> None:
    store = MemoryStore()
    writers = job(store, 3, 4)
    merger = SnapshotWriter(store).write(age_s=1000)
    for writer in writers:
        writer.step(TRAIN, 4, X).flush()
    trial = open_trial(store)
    assert any(known.steps for _, _, known in trial.catalogue.view.ranks())
    merger.write()
    trial.refresh()
    assert trial.steps() == [0, 1, 2, 3, 4]
    assert not any(known.steps for _, _, known in trial.catalogue.view.ranks())


def test_a_layout_that_the_coordinator_could_not_read_is_read_by_its_key() -> None:
    store = CountingStore()
    for writer in job(store, 2, 2):
        writer.end()
    merger = SnapshotWriter(store)
    sync.run(merger._loader.poll()).layouts.clear()
    merger.write(final=True)
    store.kinds()
    trial = open_trial(store)
    assert store.kinds()["layouts"] == 1
    assert trial.tensor("x").steps() == [0, 1]


def test_a_pinned_snapshot_stays_as_it_is_when_late_commits_rewrite_its_chunks() -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    first, slow = run.rank(0, 2), run.rank(1, 2)
    for step in range(4):
        first.step(TRAIN, step, X)
    first.flush()
    slow.step(TRAIN, 0, X).flush()
    merger = SnapshotWriter(store).write()
    trial = open_trial(store)
    trial.dynamic_refresh = False
    slow.step(TRAIN, 1, X).step(TRAIN, 2, X).flush()
    merger.write()
    assert trial.missing(1) == {1: "lagging"}
    assert trial.tensor("x").workers(1) == ["worker_0"]
    trial.refresh()
    assert trial.steps() == [0, 1, 2]
    assert trial.tensor("x").workers(1) == ["worker_0", "worker_1"]
    assert trial.missing(3) == {1: "lagging"}


def test_a_job_that_goes_on_without_its_coordinator_is_seen() -> None:
    store = MemoryStore()
    for writer in job(store, 2, 2):
        writer.end()
    SnapshotWriter(store).write(final=True)
    again = RunBuilder(store).rank(0, 1, attempt=1)
    again.step(TRAIN, 2, X).end()
    trial = open_trial(store)
    assert trial.steps() == [0, 1, 2]
    assert [a.number for a in trial.attempts()] == [0, 1]


@pytest.mark.parametrize("word", ["lost", "active"])
def test_what_a_rank_that_did_not_end_commits_after_the_last_snapshot_is_seen(
    word: RankState,
) -> None:
    store = MemoryStore()
    first, lost = job(store, 2, 1)
    first.step(TRAIN, 1, X).end()
    lost.flush(word, "SIGKILL")
    SnapshotWriter(store).write(final=True)
    early = open_trial(store)
    assert early.steps() == [0]
    lost.step(TRAIN, 1, X).flush("lost", "SIGKILL")
    early.refresh()
    counted = CountingStore(store)
    trial, bare = open_trial(counted), open_trial(without_snapshots(store))
    assert counted.kinds()["manifests"] == 2, "whether there is one, and the one"
    for each in (early, trial, bare):
        each.catalogue = replace(each.catalogue, now=bare.catalogue.now)
    assert bare.steps() == [0, 1]
    assert answers(trial) == answers(bare) == answers(early)


@pytest.mark.parametrize("part", ["merged/current.json", "merged/heads/"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_snapshot_that_cannot_be_read_is_done_without(part: str, damage: str) -> None:
    store = MemoryStore()
    for writer in job(store, 2, 3):
        writer.end()
    SnapshotWriter(store).write(final=True)
    (key,) = [key for key in store.objects if key.startswith(part)]
    if damage == "cut":
        store.objects[key] = store.objects[key][:40]
    else:
        del store.objects[key]
    trial = open_trial(store)
    assert trial.steps() == [0, 1, 2]
    assert trial.tensor("x").stack(1).shape == (2, 2)
    if (part, damage) != ("merged/current.json", "gone"):
        assert key in trial.troubles()[""][0]


@pytest.mark.parametrize("part", ["merged/steps/", "merged/drops/", "merged/"])
@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "gone"])
@pytest.mark.parametrize("opened", ["before", "after"])
def test_what_is_broken_below_a_head_is_read_from_the_ranks(
    part: str, damage: str, opened: str
) -> None:
    store = MemoryStore()
    writers = job(store, 3, 5)
    writers[1].drop(TRAIN, 5, "x").drop(TRAIN, 6, "x").flush()
    for writer in writers:
        writer.end()
    SnapshotWriter(store).write(final=True)
    trial = open_trial(store)
    hit = [key for key in store.objects if key.startswith(part)]
    assert hit
    for key in hit:
        if damage == "gone":
            del store.objects[key]
        else:
            data = store.objects[key]
            half = data[: len(data) // 2]
            store.objects[key] = {"cut": half, "empty": b"", "garbage": b"\xa5" * 200}[damage]
    if opened == "after":
        trial = open_trial(store)
    trial.refresh()
    found, expected = answers(trial), answers(open_trial(without_snapshots(store)))
    said = trial.troubles().get("", [])
    del found["troubles"], expected["troubles"]
    assert found == expected
    if part != "merged/":
        assert len(said) == len(hit)
        for key, about in zip(sorted(hit), sorted(said), strict=True):
            assert about.startswith(f"{key} was ignored, the manifests were read instead")


def test_an_older_pointer_takes_no_trial_back() -> None:
    store = MemoryStore()
    writers = job(store, 1, 1)
    merger = SnapshotWriter(store).write()
    before = store.objects[POINTER_KEY]
    writers[0].step(TRAIN, 1, X).flush()
    merger.write()
    trial = open_trial(store)
    store.objects[POINTER_KEY] = before
    trial.refresh()
    assert trial.steps() == [0, 1]


def hold_lease(store: Store, *, released: bool = False, age_s: float = 0.0) -> None:
    lease = LeaseRecord(1, "w", time.time() - age_s, 30.0, released)
    key = ClaimId(1, "w").lease_key
    sync.run(store.put(key, [encode(lease, key)]))


def test_a_coordinator_with_nothing_to_write_costs_two_listings_and_no_heartbeats() -> None:
    store = CountingStore()
    job(store, 3, 1)
    SnapshotWriter(store).write(age_s=200, interval_s=60.0)
    for released in (False, True):
        hold_lease(store, released=released, age_s=5)
        store.lists.clear()
        store.kinds()
        trial = open_trial(store)
        assert store.kinds()["heartbeats"] == 3 * released
        assert bool(len(store.lists) > 2) == released
    hold_lease(store)
    store.lists.clear()
    for _ in range(3):
        trial.refresh_if_live()  # what a loop does
    assert store.lists == [], "the ranks were asked just now"


@pytest.mark.parametrize("question", ["refresh", "wait", "open", "ask", "no more", "again"])
def test_a_coordinator_that_died_hides_nothing_though_its_lease_runs(question: str) -> None:
    store = MemoryStore()
    (writer,) = job(store, 1, 2)
    SnapshotWriter(store).write(interval_s=60.0)
    hold_lease(store)
    trial = open_trial(store)
    writer.step(TRAIN, 2, X).flush()
    writer.step(TRAIN, 3, X).end()
    if question == "wait":  # before anything says that the pointer stands still
        trial.wait_for_steps([3], timeout_s=0)
    elif question == "ask":
        assert trial.missing(3) == {}
    elif question == "no more":
        with pytest.raises(errors.NoMoreData):
            trial.wait_for_steps([4], timeout_s=0)
    elif question == "open":
        grow_old(store)
        trial = open_trial(store)
    else:
        trial.refresh()
        assert trial.steps() == [0, 1], "the coordinator has a moment to write it"
        wait_on(trial, 200.0)
        if question == "again":
            trial.refresh_if_live()
        else:
            trial.refresh()
    trial.dynamic_refresh = False
    assert trial.steps() == [0, 1, 2, 3]
    assert trial.loaded_all_steps


def test_what_was_written_after_a_coordinator_was_stopped_is_seen_at_once() -> None:
    store = MemoryStore()
    (writer,) = job(store, 1, 2)
    SnapshotWriter(store).write(interval_s=600.0)
    hold_lease(store)
    trial = open_trial(store)
    writer.step(TRAIN, 2, X).flush()
    wait_on(trial, 10.0)
    trial.refresh()
    assert trial.steps() == [0, 1]
    hold_lease(store, released=True)
    trial.refresh()
    assert trial.steps() == [0, 1, 2]


def test_a_pointer_that_was_seen_to_move_is_fresh_whatever_the_clocks_say() -> None:
    store = CountingStore()
    (writer,) = job(store, 1, 1)
    merger = SnapshotWriter(store).write(age_s=-5000, interval_s=1.0)
    trial = open_trial(store)
    writer.step(TRAIN, 1, X).flush()
    merger.write(age_s=-5000, interval_s=1.0)
    store.lists.clear()
    now = time.monotonic()
    trial._snapshots.clock = lambda: now  # however long this machine takes
    trial.refresh()
    assert trial.steps() == [0, 1]
    assert store.lists == []


@pytest.mark.parametrize("merged", [False, True])
def test_a_replaced_run_is_not_mixed_into_an_open_trial(
    merged: bool,
) -> None:
    store = MemoryStore()
    job(store, 2, 3)
    if merged:
        SnapshotWriter(store).write(age_s=1000)
    trial = open_trial(store)
    before = trial.catalogue.view.canonical()
    store.objects.clear()
    run = RunBuilder(store, run_id="other")
    for rank in range(3):
        run.rank(rank, 3).step(TRAIN, 0, X).step(TRAIN, 6, X).flush()
    trial.refresh()
    assert trial.catalogue.view.canonical() == before
    assert trial.workers() == ["worker_0", "worker_1"]
    assert "now holds run other" in trial.troubles()[""][-1]
    for question in (trial.missing, lambda step: trial.wait_for_steps([step], timeout_s=60)):
        with pytest.raises(errors.RunReplaced, match="run run of this trial was removed"):
            question(6)
    assert open_trial(store).steps() == [0, 6]


@pytest.mark.parametrize("ended", [False, True])
def test_a_number_in_a_manifest_of_another_run_is_not_taken_for_this_ones(ended: bool) -> None:
    store = MemoryStore()

    def write(session: str, value: float) -> None:
        writer = RunBuilder(store).rank(0)
        writer.attach_bytes = 4096
        writer.session = msgspec.structs.replace(writer.session, session=session)
        key = "sessions/worker_0/000000.json"
        sync.run(store.put(key, [encode(writer.session, key)]))
        for step in range(3):
            writer.step(TRAIN, step, {"loss": np.full(1, value)}).flush()
        if ended:
            writer.end()

    write("one", 1.0)
    SnapshotWriter(store).write(final=ended)
    trial, idle = open_trial(store), open_trial(store)
    assert trial.tensor("loss").value(1) == 1.0
    store.objects = {}
    write("other", 2.0)
    for step in (0, 2):
        with pytest.raises(errors.SmdistError):
            idle.tensor("loss").value(step)
    assert any("is of session other" in text for text in idle.troubles()[""])


def test_a_run_that_was_removed_is_told_and_stays_in_view() -> None:
    store = MemoryStore()
    (writer,) = job(store, 1, 2)
    trial = open_trial(store)
    del store.objects[RUN_KEY]
    writer.step(TRAIN, 2, X).flush()
    trial.refresh()
    assert trial.steps() == [0, 1, 2]
    assert "run.json of run run cannot be read" in trial.troubles()[""][0]


def test_a_trial_outlives_the_chunks_that_it_has_pinned() -> None:
    store = MemoryStore()
    writers = job(store, 3, 4)
    late = RunBuilder(store).rank(3, 4)
    merger = SnapshotWriter(store).write()
    trial = open_trial(store)
    writers[0].step(TRAIN, 3, {"late": np.ones(1)}).flush()
    for step in range(4):
        late.step(TRAIN, step, {"x": np.full(2, 99)})
    for writer in (*writers, late):
        writer.step(TRAIN, 4, X).end()
    pinned = {key for key in store.objects if key.startswith("merged/steps/")}
    merger.write(final=True)
    assert merger.packed is not None
    assert not pinned & merger.packed.chunks
    for key in pinned:
        del store.objects[key]
    trial.dynamic_refresh = False
    for step in range(4):
        values = trial.tensor("x").stack(step, partial=True)
        assert values[:, 0].tolist() == [step, step + 1, step + 2]
    assert trial.steps(show_incomplete_steps=True) == [0, 1, 2, 3]
    trial.refresh()
    assert trial.tensor("x").stack(3).shape == (4, 2)


def test_what_is_dropped_later_of_a_step_is_seen_in_the_next_snapshot() -> None:
    store = MemoryStore()
    writers = job(store, 2, 4)
    merger = SnapshotWriter(store).write()
    trial = open_trial(store)
    assert trial.steps() == [0, 1, 2, 3]
    writers[1].drop(TRAIN, 0, "x").drop(TRAIN, 2, "x").flush()
    merger.write()
    assert merger.packed is not None
    assert len(merger.packed.drops) == 1  # in no head
    trial.refresh()
    assert trial.steps() == [1, 3]
    assert trial.missing(2) == {1: "dropped"}
    assert [(d.worker, d.step) for d in trial.dropped()] == [("worker_1", 0), ("worker_1", 2)]


class FlakyStore(CountingStore):
    """Every request fails whose number is in `failing`, counted from the last time it was set."""

    failing: frozenset[int] = frozenset()
    count = 0

    def fail(self, *numbers: int) -> None:
        self.failing, self.count = frozenset(numbers), 0

    def _maybe(self, key: str) -> None:
        self.count += 1
        if self.count in self.failing:
            raise errors.StoreError(self.url, key, "get", "unreachable")

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._maybe(key)
        return await super().get(key, start, stop)

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        self._maybe(prefix)
        return await super().list(prefix, after=after)


@pytest.mark.parametrize("merged", ["not", "final", "stale"])
@pytest.mark.parametrize("number", range(1, 14))
def test_what_a_failed_refresh_has_read_is_not_lost(merged: str, number: int) -> None:
    store = FlakyStore()
    writers = job(store, 2, 1)
    trial = open_trial(store)
    for writer in writers:
        writer.step(TRAIN, 1, X).end()
    RunBuilder(store).rank(0, 1, attempt=1).step(TRAIN, 2, X).end()
    if merged != "not":
        SnapshotWriter(store).write(final=merged == "final", age_s=500)
    store.fail(number)
    with contextlib.suppress(errors.StoreError):
        trial.refresh()
    store.fail()
    trial.refresh()
    assert trial.steps() == [0, 1, 2]
    assert trial.tensor("x").workers(1) == ["worker_0", "worker_1"]
    assert trial.loaded_all_steps


def test_layouts_that_the_head_has_no_room_for_are_in_packs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout_packs, "_PACK_BYTES", 600)
    store = CountingStore()
    writer = RunBuilder(store).rank(0)
    merger = SnapshotWriter(store)
    trials = []
    for step in range(8):
        writer.step(TRAIN, step, {f"t{step}": np.zeros(step + 1)}).flush()
        merger.write()
        if step in (1, 4):
            trials.append(open_trial(store))
    packs = sync.run(store.list("merged/layouts/"))
    assert merger.packed is not None
    assert 2 <= len(packs) == len(merger.packed.layout_packs) <= 4
    store.kinds()
    trials.append(open_trial(store))
    seen = store.kinds()
    assert (seen["layouts"], seen["merged"]) == (0, 2 + len(packs))
    restarted = merger.restart().write()
    assert sync.run(store.list("merged/layouts/")) == packs
    assert list(restarted.layouts) == list(merger.layouts)
    for trial in trials:
        trial.refresh()
        assert trial.tensor_names() == [f"t{step}" for step in range(8)]
        assert trial.tensor("t6").value(6).shape == (7,)


def test_the_snapshot_of_a_run_that_was_here_before_is_not_taken_for_this_one() -> None:
    store = MemoryStore()
    for writer in job(store, 2, 3):
        writer.end()
    SnapshotWriter(store).write(final=True)
    for key in [key for key in store.objects if not key.startswith("merged/")]:
        del store.objects[key]
    RunBuilder(store, run_id="other").rank(0).step(TRAIN, 7, X).end()
    trial = open_trial(store)
    assert trial.steps() == [7]
    assert "another run" in trial.troubles()[""][0]


def test_more_chunks_than_are_kept_are_fetched_again() -> None:
    store = CountingStore()
    for writer in job(store, 2, 8):
        writer.end()
    SnapshotWriter(store).write(final=True)
    trial = open_trial(store)
    trial._snapshots.cache_bytes = 1
    store.kinds()
    for _ in range(2):
        assert list(trial.tensor("x").values(worker=1)) == list(range(8))
        assert store.kinds()["merged"] == 4
