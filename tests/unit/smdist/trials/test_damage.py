"""What damage to stored objects does to a trial: it is named, and never a value of something else."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from msgspec.structs import replace

from smdist.coordination.service.merge_once import merge_once
from smdist.coordination.service.store_poller import StorePoller
from smdist.errors import CorruptObject, ObjectNotFound, SmdistError
from smdist.format.manifest import (
    RUN_KEY,
    Heartbeat,
    RankManifest,
    Session,
    heartbeat_key,
    manifest_key,
    session_key,
)
from smdist.format.stored_json import decode, encode
from smdist.identity import ModeKeys
from smdist.storage import MemoryStore
from smdist.storage import loop_thread as sync
from smdist.workers.upload.summaries import Summary
from tests.support.run_builder import RankWriter, RunBuilder
from tests.unit.smdist.trials.test_trial_snapshot import open_trial

TRAIN, EVAL = ModeKeys.TRAIN, ModeKeys.EVAL


def work(writer: RankWriter, steps: range, offset: float = 0.0) -> RankWriter:
    for step in steps:
        rank, attempt = writer.session.rank, writer.session.attempt
        value = np.full(3, offset + 100 * attempt + 10 * rank + step)
        writer.step(TRAIN, step, {"x": value}).flush()
    return writer


def run_of(
    ranks: int = 1,
    steps: int = 4,
    *,
    run_id: str = "run",
    offset: float = 0.0,
    summarised: bool = False,
) -> MemoryStore:
    store = MemoryStore()
    run = RunBuilder(store, run_id=run_id)
    for rank in range(ranks):
        writer = work(run.rank(rank, ranks), range(steps), offset).end()
        if summarised:
            sync.run(Summary(writer.session).write(store, writer.seq))
    return store


def swap(store: MemoryStore, one: str, other: str) -> None:
    objects = store.objects
    objects[one], objects[other] = objects[other], objects[one]


def said(store: MemoryStore) -> str:
    return "\n".join(open_trial(store).troubles().get("", []))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("segments/worker_0/000000-00000001-0.safetensors", "segments/worker_0/000000-00000002-0.safetensors"),
        ("segments/worker_0/000000-00000001-0.safetensors", "segments/worker_1/000000-00000001-0.safetensors"),
    ],
)  # fmt: skip
def test_swapped_segments_give_no_value_and_their_steps_are_not_complete(
    one: str, other: str
) -> None:
    store = run_of(2)
    swap(store, one, other)
    trial = open_trial(store)
    with pytest.raises(CorruptObject, match="belong to other data") as caught:
        trial.tensor("x").value(1, worker=0)
    assert caught.value.key == one
    assert trial.missing(1) == {0: "damaged"}
    assert trial.steps() == [0, 2, 3], "the other one was not read yet"
    assert any(one in text for text in trial.troubles()[""])
    assert trial.tensor("x").value(0, worker=1)[0] == 10


def test_a_segment_of_another_run_is_not_taken_for_ours() -> None:
    store, other = run_of(), run_of(run_id="other", offset=0.5)
    key = "segments/worker_0/000000-00000001-0.safetensors"
    store.objects[key] = other.objects[key]
    trial = open_trial(store)
    with pytest.raises(CorruptObject):
        trial.tensor("x").value(1)
    assert trial.tensor("x").value(2)[0] == 2


def test_a_missing_segment_is_said_once_it_is_asked_for() -> None:
    store = run_of()
    key = "segments/worker_0/000000-00000001-0.safetensors"
    del store.objects[key]
    trial = open_trial(store)
    with pytest.raises(ObjectNotFound):
        trial.tensor("x").value(1)
    assert trial.missing(1) == {0: "damaged"}
    assert any(key in text for text in trial.troubles()[""])


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("damage", ["gone", "torn", "foreign"])
def test_a_manifest_that_cannot_be_read_is_no_skipped_step(damage: str, merged: bool) -> None:
    store = run_of(2)
    key = manifest_key("worker_1", 0, 2)
    if damage == "gone":
        del store.objects[key]
    else:
        foreign = run_of(2, run_id="other").objects[key]
        store.objects[key] = foreign if damage == "foreign" else store.objects[key][:-5]
    if merged:
        sync.run(merge_once(store))
    trial = open_trial(store)
    assert trial.missing(2) == {1: "damaged"}
    assert trial.steps() == [0, 1, 3]
    assert key in said(store)


def test_the_last_manifest_of_a_rank_that_cannot_be_read_is_damage_too() -> None:
    store = run_of(2, 3)
    run = RunBuilder(store)
    assert run.run_id == "run"
    key = max(k for k in store.objects if k.startswith("manifests/worker_1/"))
    before = manifest_key("worker_1", 0, 2)
    store.objects[key] = store.objects[before] = b""
    trial = open_trial(store)
    assert key in said(store)
    assert trial.steps() == [0, 1]
    assert 1 in trial.missing(2)


def test_what_is_damaged_and_written_anew_is_read() -> None:
    store = run_of()
    key = manifest_key("worker_0", 0, 1)
    whole, store.objects[key] = store.objects[key], b""
    trial = open_trial(store)
    assert trial.steps() == [0, 2, 3]
    store.objects[key] = whole
    trial.refresh()
    assert trial.steps() == [0, 1, 2, 3]
    assert trial.troubles() == {}


def test_a_step_that_began_in_a_missing_manifest_is_not_complete() -> None:
    store = MemoryStore()
    writer = RunBuilder(store).rank(0)
    work(writer, range(1))
    writer.step(TRAIN, 1, {"x": np.zeros(1)}, close=False).flush()
    writer.step(EVAL, 0, {"e": np.zeros(1)}, step=2).flush()
    writer.step(TRAIN, 1, {"y": np.zeros(1)}).flush()
    work(writer, range(3, 4)).end()
    assert open_trial(store).steps(TRAIN) == [0, 1, 3]
    del store.objects[manifest_key("worker_0", 0, 1)]
    trial = open_trial(store)
    assert trial.steps(TRAIN) == [0, 3]
    assert trial.steps(EVAL) == [0]
    assert trial.missing(1, TRAIN) == {0: "damaged"}


@pytest.mark.parametrize("summary", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_a_run_without_sessions_is_not_an_empty_one(summary: bool, merged: bool) -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    for rank in range(2):
        writer = work(run.rank(rank, 2), range(3)).end()
        if summary:
            sync.run(Summary(writer.session).write(store, writer.seq))
    for key in [key for key in store.objects if key.startswith("sessions/")]:
        del store.objects[key]
    if merged:
        sync.run(merge_once(store))
    trial = open_trial(store)
    assert trial.steps(show_incomplete_steps=True) == [0, 1, 2]
    assert trial.missing(1) == ({} if summary else {0: "damaged", 1: "damaged"})
    assert trial.tensor("x").value(1, worker=1)[0] == 11
    if not (summary and merged):  # what was merged needs them no more
        assert session_key("worker_1", 0) in said(store)


def test_a_run_without_its_head_says_what_is_missing() -> None:
    store = run_of()
    del store.objects[RUN_KEY]
    with pytest.raises(SmdistError, match=r"run\.json"):
        open_trial(store)


@pytest.mark.parametrize("at", ["summaries/", "heartbeats/", "merged/current", "merged/heads/"])
def test_what_others_say_too_is_passed_over_and_named(at: str) -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    for rank in range(2):
        writer = work(run.rank(rank, 2), range(3))
        writer.beat(writer.now)
        if rank == 0:
            sync.run(Summary(writer.end().session).write(store, writer.seq))
    right = open_trial(store).values()
    if at.startswith("merged/"):
        sync.run(merge_once(store))
    key = [k for k in sorted(store.objects) if k.startswith(at)][-1]
    store.objects[key] = store.objects[key].replace(b"0", b"\xff", 1)
    trial = open_trial(store)
    assert trial.steps() == [0, 1, 2]
    np.testing.assert_equal(trial.values(), right)
    assert sum(key in text for text in trial.troubles()[""]) == 1


def test_a_step_that_a_damaged_attempt_may_have_had_anew_is_not_complete() -> None:
    store = MemoryStore()
    run = RunBuilder(store)
    work(run.rank(0), range(4)).lose()
    work(run.rank(0, attempt=1), range(2, 6)).end()
    del store.objects[manifest_key("worker_0", 1, 1)]
    trial = open_trial(store)
    assert trial.steps() == [2, 4, 5]
    assert trial.missing(3) == {0: "damaged"}
    assert open_trial(store, attempt=0).steps() == [0, 1, 2, 3], "that one is whole"


def copy_rank(store: MemoryStore, other: MemoryStore, worker: str) -> None:
    store.objects.update({k: v for k, v in other.objects.items() if f"/{worker}/" in k})


def test_session_of_another_run_without_manifests_is_not_waited_for() -> None:
    store = run_of()
    foreign = session_key("worker_1", 0)
    store.objects[foreign] = run_of(2, run_id="other").objects[foreign]
    trial = open_trial(store)
    assert trial.steps() == [0, 1, 2, 3]
    assert foreign in said(store)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("summarised", [False, True])
def test_rank_copied_from_another_run_is_damaged(merged: bool, summarised: bool) -> None:
    store = run_of(2)
    other = run_of(2, run_id="other", offset=0.5, summarised=summarised)
    copy_rank(store, other, "worker_1")
    if merged:
        sync.run(merge_once(store))
    trial = open_trial(store)
    assert trial.steps() == []
    assert trial.missing(1) == {1: "damaged"}
    assert trial.tensor("x").value(1, worker=0)[0] == 1
    with pytest.raises(CorruptObject):
        trial.tensor("x").value(1, worker=1)
    troubles = [text for text in trial.troubles()[""] if session_key("worker_1", 0) in text]
    assert troubles
    assert all("other" in text and "run.json names run" in text for text in troubles)
    assert troubles[0] in trial.describe()


@pytest.mark.parametrize("merged", [False, True])
def test_corrected_session_is_read_again(merged: bool) -> None:
    store, other = run_of(2), run_of(2, run_id="other", offset=0.5)
    copy_rank(store, other, "worker_1")
    if merged:
        sync.run(merge_once(store))
    trial = open_trial(store)
    assert trial.steps() == []
    key = session_key("worker_1", 0)
    session = decode(store.objects[key], Session, key)
    store.objects[key] = encode(replace(session, run_id="run"), key)
    for reader in (trial, open_trial(store)):
        reader.refresh()
        assert reader.steps() == [0, 1, 2, 3]
        assert reader.missing(1) == {}
        assert reader.tensor("x").value(1, worker=1)[0] == 11.5
        assert reader.troubles() == {}
    sync.run(merge_once(store))
    again = open_trial(store)
    assert (again.steps(), again.troubles()) == ([0, 1, 2, 3], {})


def test_coordinator_reads_a_corrected_session_again() -> None:
    store, now = MemoryStore(), 1000.0
    run = RunBuilder(store, now=now)
    work(run.rank(0, 2, now=now), range(2))
    other = MemoryStore()
    work(RunBuilder(other, now=now, run_id="other").rank(1, 2, now=now), range(2))
    copy_rank(store, other, "worker_1")
    facts: list[object] = []

    async def check() -> None:
        nonlocal now
        follow = StorePoller(store, facts.append, lambda: now)
        await follow.poll()
        key = session_key("worker_1", 0)
        assert "run.json names run" in follow.troubles[key]
        assert not [f for f in facts if isinstance(f, Session) and f.rank == 1 and f.is_recorded]
        session = decode(store.objects[key], Session, key)
        store.objects[key] = encode(replace(session, run_id="run"), key)
        manifests = len([f for f in facts if isinstance(f, RankManifest)])
        now += 60.0
        await follow.poll()
        assert key not in follow.troubles
        assert [f for f in facts if isinstance(f, Session) and f.rank == 1 and f.is_recorded]
        assert len([f for f in facts if isinstance(f, RankManifest)]) == manifests

    asyncio.run(check())


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("evidence", ["heartbeat", "segments"])
def test_a_rank_whose_manifests_are_all_gone_is_damaged(evidence: str, merged: bool) -> None:
    store = MemoryStore()
    run = RunBuilder(store, now=time.time() - 1000)
    for rank in range(2):
        work(run.rank(rank, 2), range(6))
    if evidence == "heartbeat":
        beat = Heartbeat("0.1", 1, 0, run.now, 5.0, 5, 0)
        key = heartbeat_key("worker_1", 0)
        store.objects[key] = encode(beat, key)
    for key in [*store.objects]:
        if key.startswith("manifests/worker_1/"):
            del store.objects[key]
        if evidence == "heartbeat" and key.startswith("segments/worker_1/"):
            del store.objects[key]
    if merged:
        sync.run(merge_once(store))
    trial = open_trial(store)
    assert trial.missing(3) == {1: "damaged"}
    assert trial.steps() == []
    gone = manifest_key("worker_1", 0, 0)
    assert any(text.startswith(f"{gone} and all others") for text in trial.troubles()[""])
    assert "before its first step" not in trial.describe()


def test_a_rank_that_was_lost_before_its_first_manifest_is_not_damaged() -> None:
    store = MemoryStore()
    run = RunBuilder(store, now=time.time() - 1000)
    work(run.rank(0, 2), range(2))
    run.rank(1, 2)
    segment = "segments/worker_1/000000-00000000-0.safetensors"  # its uploader was killed then
    store.objects[segment] = store.objects[segment.replace("worker_1", "worker_0")]
    trial = open_trial(store)
    assert trial.missing(0) == {1: "lost"}
    assert trial.troubles() == {}


@pytest.mark.parametrize("merged", [False, True])
def test_missing_collections_are_reported(merged: bool) -> None:
    store = run_of(2)
    assert said(store) == ""
    if merged:
        sync.run(merge_once(store))
    del store.objects["collections/worker_0.json"]
    assert "collections/worker_0.json is missing" in said(store)
    del store.objects["collections/worker_1.json"]
    trial = open_trial(store)
    assert trial.steps() == [0, 1, 2, 3]
    assert "collections/worker_1.json is missing" in "\n".join(trial.troubles()[""])
