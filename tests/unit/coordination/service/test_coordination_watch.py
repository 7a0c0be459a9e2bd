"""A run, watched on a clock that the test moves: who is behind, who is lost, what is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from smdist.coordination.service.directory_watcher import DirectoryWatcher
from smdist.coordination.service.run_watcher import RunWatcher
from smdist.coordination.snapshot.pack import POINTER_KEY, Pointer, load_view
from smdist.coordination.view.membership import DEFAULT_TIMEOUTS, LivenessTimeouts, rank_reports
from smdist.coordination.view.status import RankLine, RunStatus
from smdist.errors import (
    CoordinationError,
    NoSuchRun,
    StepNotYetAvailable,
    StepUnavailable,
    WaitTimeout,
)
from smdist.format.manifest import RUN_KEY, Run, layout_key, manifest_key
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys
from smdist.storage.in_memory import MemoryStore
from smdist.storage.local import LocalStore
from smdist.storage.subtree import StoreSubtree
from tests.support.coordinator_driver import Life, from_scratch
from tests.support.run_builder import RankWriter, RunBuilder
from tests.support.waiting import until_async

T = TypeVar("T")
TRAIN, EVAL = ModeKeys.TRAIN, ModeKeys.EVAL
TENSORS = {"w": np.ones(3, np.float32)}


@dataclass
class Bench:
    """A job of some ranks, its watcher, and the time."""

    time: float = 10_000.0
    timeouts: LivenessTimeouts = DEFAULT_TIMEOUTS
    store: MemoryStore = field(default_factory=lambda: MemoryStore("watched"))
    ranks: list[RankWriter] = field(default_factory=list)
    ahead_s: float = 0.0  # the ranks' clocks are

    def __post_init__(self) -> None:
        self.job = RunBuilder(self.store, now=self.time + self.ahead_s)
        self.requests = Life(self.store)
        self.watcher = self.another()

    def another(self) -> RunWatcher:
        return RunWatcher(
            "memory://watched",
            store=self.requests,
            now=lambda: self.time,
            timeouts=self.timeouts,
            writer="test",
        )

    def start(self, world: int, attempt: int = 0) -> list[RankWriter]:
        self.ranks = [
            self.job.rank(rank, world, attempt=attempt, now=self.time + self.ahead_s)
            for rank in range(world)
        ]
        return self.ranks

    def save(self, step: int, *ranks: int, mode: ModeKeys = TRAIN, number: int = -1) -> None:
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].now = self.time + self.ahead_s
            self.ranks[rank].step(mode, step, TENSORS, step=number if number >= 0 else None).flush()

    def turn(self, after_s: float = 2.0) -> bool:
        self.time += after_s
        return asyncio.run(self.watcher.poll_once())

    def turns(self, seconds: float, every_s: float = 1.0, *beating: int) -> None:
        until = self.time + seconds
        while self.time < until:
            for rank in beating:
                self.ranks[rank].beat(self.time + self.ahead_s)
            self.turn(every_s)

    def line(self, rank: int) -> RankLine:
        return self.watcher.queries.status().ranks[rank]

    @property
    def state(self) -> str:
        return self.watcher.state

    def pointer(self) -> Pointer:
        return msgspec.json.decode(self.store.objects[POINTER_KEY], type=Pointer)


def run(work: Awaitable[T]) -> T:
    async def wrapped() -> T:
        return await work

    return asyncio.run(wrapped())


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    run(bench.watcher.open())
    return bench


# -- completeness ----------------------------------------------------------------------------------


def test_the_latest_complete_step_follows_the_slowest_rank(bench: Bench) -> None:
    bench.start(3)
    assert bench.watcher.queries.latest_complete_step() == -1
    for step in range(6):
        bench.save(step, 0, 1)
        if step % 2:
            bench.save(step // 2, 2)
        bench.turn()
        assert bench.watcher.queries.latest_complete_step() == (step - 1) // 2
    assert bench.watcher.queries.missing(5) == {2: "lagging"}
    assert bench.watcher.queries.missing(1) == {}
    status = bench.watcher.queries.status()
    assert status.latest_complete == {"TRAIN": 2, "GLOBAL": 2}
    assert (status.last_step, status.steps, status.complete_steps) == (5, 6, 3)
    assert msgspec.json.decode(msgspec.json.encode(status), type=RunStatus) == status


def test_lagging_rank_reports_how_far_it_is_behind(bench: Bench) -> None:
    bench.start(2)
    bench.save(0)
    for step in range(1, 9):
        bench.time += 10
        bench.save(step, 0)
        bench.ranks[1].beat(bench.time)
        bench.turn(0.5)
    line = bench.line(1)
    assert (line.status, line.step, line.behind_steps) == ("lagging", 0, 8)
    assert 80 <= line.behind_s <= 85
    assert bench.line(0).status == "active"
    assert bench.watcher.queries.status().lagging == (line,)
    assert bench.watcher.queries.step(8).standing == "pending"


def test_constantly_slow_rank_is_lagging(bench: Bench) -> None:
    """Its last step is always young; what counts is how far the others are."""
    bench.start(2)
    for step in range(40):
        bench.save(step, 0)
        if step % 2:
            bench.save(step // 2, 1)
        bench.turn(4.0)
    line = bench.line(1)
    assert (line.status, line.step, line.behind_steps) == ("lagging", 19, 20)
    assert line.behind_s == pytest.approx(80.0)
    assert (bench.line(0).behind_steps, bench.line(0).behind_s) == (0, 0.0)
    for step in range(20, 40):
        bench.save(step, 1)
    bench.turns(10)
    assert bench.line(1).status == "active"


def test_stopped_rank_is_lost_until_a_late_commit(bench: Bench) -> None:
    """SIGSTOP and SIGCONT, as a coordinator sees them."""
    bench.start(2)
    bench.save(0)
    bench.turn()
    stopped = bench.time
    for step in range(1, 40):
        bench.save(step, 0)
        bench.turn(2.0)
        lost = bench.line(1).status == "lost"
        assert lost is (bench.time - stopped > DEFAULT_TIMEOUTS.lost_after_s)
    assert "nothing heard" in bench.line(1).reason
    assert bench.watcher.queries.missing(30) == {1: "lost"}
    assert bench.watcher.queries.step(30).standing == "partial"
    assert bench.watcher.queries.latest_complete_step() == 0
    for step in range(1, 40):
        bench.save(step, 1)
    bench.turns(DEFAULT_TIMEOUTS.lost_after_s / 2)
    assert bench.line(1).status == "active"
    assert bench.watcher.queries.step(30).standing == "complete"
    assert bench.watcher.queries.latest_complete_step() == 39


def test_heartbeats_keep_a_rank_alive_in_snapshots(bench: Bench) -> None:
    bench.start(2)
    bench.save(0)
    bench.turn()
    before = len([key for key in bench.store.objects if key.startswith("merged/heads/")])
    for _ in range(60):
        bench.turns(5.0, 5.0, 0, 1)
        assert bench.line(0).status == bench.line(1).status == "active"
        # By what a reader finds in the store, whenever it looks.
        view = run(load_view(bench.store, bench.pointer())).view
        reports = rank_reports(view, 0, bench.time)
        assert {str(report.status) for report in reports.values()} == {"active"}
    after = len([key for key in bench.store.objects if key.startswith("merged/heads/")])
    assert after - before <= 300 / 15 + 1, "heartbeats alone make few snapshots"


def test_ranks_with_different_world_sizes_are_all_expected(bench: Bench) -> None:
    bench.start(1)
    bench.save(0)
    bench.turn()
    assert bench.watcher.queries.latest_complete_step() == 0
    bench.job.rank(1, 2, now=bench.time)
    bench.turns(3)
    assert bench.watcher.queries.latest_complete_step() == -1, (
        "what was complete is looked at again"
    )
    assert bench.watcher.queries.missing(0) == {1: "lagging"}


def test_each_mode_has_its_own_latest_step(bench: Bench) -> None:
    bench.start(1)
    bench.save(0, number=0)
    bench.save(0, mode=EVAL, number=1)
    bench.save(1, number=2)
    bench.turn()
    watcher = bench.watcher
    assert watcher.queries.latest_complete_step(TRAIN) == 1
    assert watcher.queries.latest_complete_step(EVAL) == 0
    assert watcher.queries.latest_complete_step() == 2
    assert watcher.queries.step(1).complete
    assert watcher.queries.status().latest_complete == {"TRAIN": 1, "EVAL": 0, "GLOBAL": 2}
    with pytest.raises(StepNotYetAvailable):
        watcher.queries.missing(7)
    bench.ranks[0].end()
    bench.turn()
    with pytest.raises(StepUnavailable):
        watcher.queries.missing(7)


def test_elastic_restart_with_another_world_size_continues(bench: Bench) -> None:
    bench.start(3)
    for step in range(4):
        bench.save(step)
    bench.save(4, 0, 1)
    bench.turn()
    assert bench.watcher.queries.missing(4) == {2: "lagging"}
    for rank in bench.ranks:
        rank.lose()
    bench.turns(6)
    assert bench.state == "watching", "a job that failed may be started again"
    bench.start(2, attempt=1)
    for step in range(3, 7):
        bench.save(step)
    bench.turns(10)
    status = bench.watcher.queries.status()
    assert [line.attempt for line in status.attempts] == [0, 1]
    assert [line.expected for line in status.attempts] == [3, 2]
    assert len(status.ranks) == 2
    assert bench.watcher.queries.step(4).attempt == 1
    assert bench.watcher.queries.step(2).attempt == 0
    assert bench.watcher.queries.latest_complete_step() == 6
    assert status.steps == 7, "steps that ran twice are there once"
    for rank in bench.ranks:
        rank.now = bench.time
        rank.end()
    bench.turns(3)
    assert bench.state == "finished"
    assert bench.pointer().final


# -- clocks that differ ----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [-7200.0, -90.0, 90.0, 7200.0])
def test_only_the_watchers_clock_decides_about_ranks(ahead_s: float) -> None:
    bench = Bench(ahead_s=ahead_s)
    run(bench.watcher.open())
    bench.start(3)
    for step in range(4):
        bench.save(step, 0, 1)
        bench.turn()
    bench.turns(DEFAULT_TIMEOUTS.lost_after_s - 20, 1.0, 0)
    assert [bench.line(rank).status for rank in range(3)] == ["active"] * 3
    assert bench.watcher.queries.step(9).standing == "pending"
    bench.turns(2 * DEFAULT_TIMEOUTS.lost_after_s, 1.0, 0)
    assert [bench.line(rank).status for rank in range(3)] == ["active", "lost", "lost"]
    assert bench.time - bench.line(0).last_seen <= DEFAULT_TIMEOUTS.lost_after_s / 2
    for rank in bench.ranks:
        rank.end()
    bench.turns(DEFAULT_TIMEOUTS.lost_after_s)
    assert bench.state == "finished"


def test_clock_skew_of_a_rank_is_not_lagging(bench: Bench) -> None:
    bench.start(2)
    for step in range(10):
        bench.ahead_s = 300.0
        bench.save(step, 0)
        bench.turn(1.0)
        assert bench.line(1).status == "active"
        bench.ahead_s = 0.0
        bench.save(step, 1)
        bench.turn(1.0)


# -- endings ---------------------------------------------------------------------------------------


def test_clean_end_is_final_soon(bench: Bench) -> None:
    for rank in bench.start(2):
        rank.step(TRAIN, 0, TENSORS).end()
    assert bench.turn()
    bench.turn()
    assert bench.state == "finished"
    assert bench.pointer().final
    assert not bench.turn()
    again = bench.another()
    run(again.open())
    assert again.state == "finished"
    assert again.queries.latest_complete_step() == 0
    claims = [key for key in bench.store.objects if key.startswith("merged/claims/")]
    assert len(claims) == 1, "nothing is claimed to look at a finished run"


@pytest.mark.parametrize("who", ["stays", "comes later", "restarts"])
def test_replaced_snapshots_of_a_finished_run_are_removed(bench: Bench, who: str) -> None:
    bench.start(2)
    for step in range(100):
        bench.save(step)
        bench.turn()
    for rank in bench.ranks:
        rank.end()
    if who == "restarts":
        bench.time += 100
        bench.watcher = bench.another()
        run(bench.watcher.open())
    bench.turns(5)
    assert bench.state == "finished"
    left = merged(bench)
    assert len(left) < 100, "old ones go with the last snapshot"
    assert who == "restarts" or len(left) > 20, "young ones stay, for who has just opened them"
    if who == "comes later":
        bench.time += 10_000
        bench.watcher = bench.another()
        run(bench.watcher.open())
    else:
        bench.time += 61
        assert not run(bench.watcher.has_new_data())
    assert bench.state == "finished"
    loaded = run(load_view(bench.store, bench.pointer()))
    named = {c.ref.key for sealed in loaded.view.sealed.values() for c in sealed.chunks}
    assert merged(bench) == {bench.pointer().head, *named}
    assert loaded.view.canonical() == from_scratch(bench.store).canonical()


def merged(bench: Bench) -> set[str]:
    return {k for k in bench.store.objects if k.startswith(("merged/heads/", "merged/steps/"))}


def test_continued_run_is_watched_again(bench: Bench) -> None:
    bench.start(1)[0].step(TRAIN, 0, TENSORS).end()
    bench.turns(3)
    assert not run(bench.watcher.has_new_data())
    bench.start(1, attempt=1)
    bench.save(1)
    assert run(bench.watcher.has_new_data())
    bench.watcher = bench.another()
    run(bench.watcher.open())
    assert bench.state == "watching"
    bench.turn()
    assert bench.watcher.queries.latest_complete_step() == 1
    assert not bench.pointer().final


def test_attempt_that_starts_while_the_last_one_ends_is_found(bench: Bench) -> None:
    old = bench.start(1)[0]
    bench.save(0)
    bench.turn()
    bench.start(1, attempt=1)
    old.end()
    bench.watcher.hint("worker_0", 0, 1)
    bench.turn(0.1)  # the listing of sessions is younger than that
    assert bench.line(0).status == "ended"
    assert bench.state == "watching"
    bench.save(1)
    bench.turns(3)
    assert bench.watcher.queries.latest_complete_step() == 1


def test_silent_run_is_not_final_and_continues_with_its_ranks(
    bench: Bench,
) -> None:
    ranks = bench.start(2)
    bench.save(0)
    ranks[0].end()
    bench.turns(20 * DEFAULT_TIMEOUTS.lost_after_s, 5.0)
    assert bench.line(1).status == "lost"
    assert bench.state == "watching", "it may come back"
    assert not bench.pointer().final
    bench.requests.counts.clear()
    bench.turns(1200, 1.0)
    counts = bench.requests.counts
    assert counts["get manifests"] <= 21
    assert counts["get heartbeats"] <= 21
    assert counts["list sessions"] <= 21
    bench.save(1, 1)
    bench.turns(62)
    assert bench.watcher.queries.view.attempts[0][1].passed[TRAIN.value] == 1
    ranks[1].end()
    bench.turns(62)
    assert bench.state == "finished"
    assert bench.pointer().final


@pytest.mark.parametrize("reopened", [False, True])
def test_data_recovered_after_the_end_is_merged(bench: Bench, reopened: bool) -> None:
    ended, lost = bench.start(2)
    bench.save(0)
    bench.save(1, 0)
    ended.end()
    lost.lose()
    bench.turns(2 * DEFAULT_TIMEOUTS.lost_after_s)
    assert bench.state == "finished"
    assert not run(bench.watcher.has_new_data())
    bench.save(1, 1)
    lost.lose()
    assert reopened or run(bench.watcher.has_new_data())
    bench.watcher = bench.another()
    run(bench.watcher.open())
    assert bench.state == "watching"
    bench.turn()
    assert bench.watcher.queries.missing(1) == {}
    bench.turns(2 * DEFAULT_TIMEOUTS.lost_after_s)
    assert bench.state == "finished"
    loaded = run(load_view(bench.store, bench.pointer()))
    assert loaded.view.canonical() == from_scratch(bench.store).canonical()


def test_data_recovered_while_other_ranks_run_is_merged(bench: Bench) -> None:
    lost = bench.start(2)[1]
    bench.save(0)
    bench.save(1, 0)
    lost.lose()
    bench.turns(100, 1.0, 0)
    assert bench.watcher.queries.missing(1) == {1: "lost"}
    bench.save(1, 1)
    bench.turns(30, 1.0, 0)
    assert bench.watcher.queries.missing(1) == {}


def test_final_snapshot_without_all_final_manifests_is_replaced(
    bench: Bench,
) -> None:
    bench.start(1)
    bench.save(0)
    bench.turn()
    said = msgspec.structs.replace(bench.pointer(), final=True)
    run(bench.store.put(POINTER_KEY, [encode(said, POINTER_KEY)]))
    bench.watcher = bench.another()
    run(bench.watcher.open())
    assert bench.state == "watching"


# -- a place that is used again --------------------------------------------------------------------


def begin_anew(bench: Bench, *, merged: bool) -> None:
    """Another job in the same place; `merged`: what was merged of the first one is still there."""
    for key in [*bench.store.objects]:
        if not (merged and key.startswith("merged/")):
            del bench.store.objects[key]
    bench.job = RunBuilder(bench.store, now=bench.time, run_id="another")


def is_right(bench: Bench) -> None:
    loaded = run(load_view(bench.store, bench.pointer()))
    assert loaded.head.run_id == bench.watcher.run_id == "another"
    right = from_scratch(bench.store).canonical()
    assert loaded.view.canonical() == bench.watcher.queries.view.canonical() == right


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_replaced_run_is_watched_from_its_beginning(
    bench: Bench, merged: bool, ended: bool
) -> None:
    bench.start(2)
    for step in range(4):
        bench.save(step)
        bench.turn()
    if ended:
        for rank in bench.ranks:
            rank.end()
        bench.turns(5)
        assert bench.state == "finished"
    before = bench.pointer()
    begin_anew(bench, merged=merged)
    bench.start(1)
    bench.save(0)
    bench.save(1)
    bench.turns(6)
    if ended:
        assert run(bench.watcher.has_new_data())
    assert bench.state == "waiting"
    assert bench.watcher.queries.latest_complete_step() == -1
    run(bench.watcher.open())
    bench.turn()
    assert bench.state == "watching"
    assert bench.watcher.queries.latest_complete_step() == 1
    assert any(
        "run another is there now" in text for text in bench.watcher.queries.status().troubles
    )
    after = bench.pointer()
    assert (after.epoch, after.number) > (before.epoch, before.number)
    is_right(bench)


@pytest.mark.parametrize("final", [False, True])
def test_snapshot_of_another_run_is_not_used(bench: Bench, final: bool) -> None:
    for rank in bench.start(2):
        rank.step(TRAIN, 0, TENSORS).flush("ended" if final else "active")
    bench.turns(5)
    assert bench.pointer().final == final
    begin_anew(bench, merged=True)
    bench.watcher = bench.another()
    run(bench.watcher.open())
    assert bench.state == "watching"
    bench.start(1)
    bench.save(3)
    bench.turn()
    assert bench.watcher.queries.latest_complete_step() == 3
    is_right(bench)


def test_nothing_is_written_where_a_run_was_removed(bench: Bench) -> None:
    bench.start(1)
    bench.save(0)
    bench.turn()
    bench.store.objects.clear()
    bench.turns(6)
    assert bench.state == "waiting"
    assert any("run.json is gone" in text for text in bench.watcher.queries.status().troubles)
    bench.store.objects.clear()
    bench.turns(60)
    with pytest.raises(NoSuchRun):
        run(bench.watcher.open())
    run(bench.watcher.close())
    assert not bench.store.objects


# -- waiting ---------------------------------------------------------------------------------------


def test_wait_for_step(bench: Bench) -> None:
    bench.start(2)
    bench.save(0)
    bench.save(1, 0)
    bench.turn()

    async def act() -> None:
        watcher = bench.watcher
        assert (await watcher.queries.wait_for_step(0)).complete
        with pytest.raises(WaitTimeout, match=r"rank 1 \(lagging\).*latest complete step is 0"):
            await watcher.queries.wait_for_step(1, timeout_s=0.01)
        waiting = asyncio.create_task(watcher.queries.wait_for_step(1))
        await asyncio.sleep(0)
        await asyncio.to_thread(bench.save, 1, 1)
        bench.time += 2
        await watcher.poll_once()
        assert (await waiting).standing == "complete"
        waiting = asyncio.create_task(watcher.queries.wait_for_step(9))
        await asyncio.sleep(0)
        await watcher.close()
        with pytest.raises(CoordinationError, match="not watched any more"):
            await waiting

    asyncio.run(act())


def test_waiting_ends_when_nothing_more_can_come(bench: Bench) -> None:
    ranks = bench.start(2)
    bench.save(0)
    bench.save(1, 0)
    ranks[1].lose()
    bench.turn()
    report = run(bench.watcher.queries.wait_for_step(1))
    assert (report.standing, report.missing) == ("partial", {1: "lost"})
    ranks[0].end()
    bench.turn()
    assert run(bench.watcher.queries.wait_for_step(2)).standing == "not saved"


# -- troubles --------------------------------------------------------------------------------------


def test_no_run_yet() -> None:
    store = MemoryStore("empty")
    with pytest.raises(NoSuchRun):
        run(RunWatcher("memory://empty", store=store).open())
    newer = Run("r", 0.0, "pytorch", format=99)
    store.objects[RUN_KEY] = encode(newer, RUN_KEY)
    with pytest.raises(CoordinationError, match="format 99"):
        run(RunWatcher("memory://empty", store=store).open())


def test_unreadable_snapshot_is_written_again(bench: Bench) -> None:
    bench.start(2)
    for step in range(4):
        bench.save(step)
        bench.turn()
    bench.store.objects[bench.pointer().head] = b"{torn"
    bench.watcher = bench.another()
    run(bench.watcher.open())
    assert "cannot be read" in bench.watcher.queries.status().troubles[0]
    bench.turns(3)
    assert bench.watcher.queries.latest_complete_step() == 3
    assert not bench.watcher.queries.status().troubles
    view = run(load_view(bench.store, bench.pointer())).view
    assert view.canonical() == from_scratch(bench.store).canonical()


def test_damaged_or_missing_objects_are_skipped(bench: Bench) -> None:
    bench.start(2)
    for step in range(6):
        bench.save(step)
    whole = dict(bench.store.objects)
    torn, gone = manifest_key("worker_0", 0, 2), manifest_key("worker_1", 0, 3)
    layout = next(key for key in whole if key.startswith(layout_key("")[:8]))
    bench.store.objects[torn] = b'{"session": '
    del bench.store.objects[gone]
    # Still a layout, but not the one that its name says.
    bench.store.objects[layout] = whole[layout][:-1] + b" }"
    bench.turn()
    assert any(layout in text for text in bench.watcher.queries.status().troubles)
    assert bench.watcher.queries.latest_complete_step() == 1
    assert any(torn in text for text in bench.watcher.queries.status().troubles)
    bench.turns(200, 1.0, 0, 1)
    assert bench.watcher.queries.latest_complete_step() == 5, "what comes after it is read"
    assert bench.watcher.queries.missing(2) == {0: "damaged"}
    assert bench.watcher.queries.missing(3) == {1: "damaged"}
    assert any("skipped" in text for text in bench.watcher.queries.status().troubles)
    bench.store.objects[layout] = whole[layout]
    bench.turns(30, 1.0, 0, 1)
    assert (
        layout[len("layouts/") : -len(".json")]
        in run(load_view(bench.store, bench.pointer())).layouts
    )


def test_store_outage_is_reported_and_survived(bench: Bench) -> None:
    bench.start(4)
    bench.save(0)
    bench.turn()
    bench.requests.faults = frozenset(range(0, 1 << 14, 2))  # every other one fails
    bench.save(1)
    for _ in range(30):
        bench.turn(5)
    assert bench.watcher.queries.status().troubles
    bench.requests.faults = frozenset()
    bench.turns(60, 1.0, *range(4))
    status = bench.watcher.queries.status()
    assert not status.troubles
    assert status.latest_complete["GLOBAL"] == 1


# -- how many requests -----------------------------------------------------------------------------


@pytest.mark.parametrize(("gap_s", "most"), [(3.0, 2.0), (20.0, 3.0), (300.0, 10.0)])
@pytest.mark.slow
def test_a_rank_is_read_about_as_often_as_it_writes(gap_s: float, most: float) -> None:
    ranks, steps = 16, 10
    bench = Bench()
    run(bench.watcher.open())
    bench.start(ranks)
    for step in range(2):
        bench.save(step)
        bench.turns(gap_s)
    bench.requests.counts.clear()
    for step in range(2, 2 + steps):
        bench.save(step)
        bench.turns(gap_s)
        assert bench.watcher.queries.latest_complete_step() == step
    counts = bench.requests.counts
    written = ranks * steps
    assert written <= counts["get manifests"] <= most * written
    assert counts["list manifests"] == 0
    seconds = steps * gap_s
    assert counts["get heartbeats"] <= ranks * seconds / 15
    assert counts["list sessions"] <= seconds / 5 + 60


def test_a_rank_that_has_ended_is_not_read_again(bench: Bench) -> None:
    ranks = bench.start(8)
    bench.save(0)
    for rank in ranks[1:]:
        rank.end()
    bench.turns(10)
    bench.requests.counts.clear()
    bench.turns(30, 1.0, 0)
    assert bench.requests.counts["get manifests"] <= 30
    assert bench.requests.counts["get heartbeats"] <= 3


def test_a_restart_reads_only_what_is_new() -> None:
    bench = Bench()
    run(bench.watcher.open())
    bench.start(8)
    for step in range(20):
        bench.save(step)
        bench.turn()
    bench.save(20)
    bench.requests.counts.clear()
    bench.watcher = bench.another()
    run(bench.watcher.open())
    bench.turn(0.0)
    assert bench.watcher.queries.latest_complete_step() == 20
    assert bench.requests.counts["get manifests"] <= 2 * 8 + 8
    assert bench.requests.counts["get sessions"] == 0
    assert bench.requests.counts["get layouts"] == 0


def test_a_backlog_is_read_in_bulk(bench: Bench) -> None:
    ranks, steps = 10, 60
    bench.start(ranks)
    for step in range(steps):
        bench.time += 2
        bench.save(step)
    bench.turn(1.0)
    assert bench.watcher.queries.latest_complete_step() == steps - 1
    assert bench.requests.counts["get manifests"] < ranks * (steps + 16)


def test_manifest_written_between_two_reads_is_found(bench: Bench) -> None:
    bench.start(1)
    for step in range(30):
        bench.time += 2
        bench.save(step)
    late = manifest_key("worker_0", 0, 11)
    data = bench.store.objects.pop(late)
    found = bench.store.get

    async def get(key: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            return await found(key, start, stop)
        finally:
            if key == late:
                bench.store.objects[late] = data

    bench.store.get = get  # type: ignore[method-assign]
    bench.turns(10)
    assert bench.watcher.queries.latest_complete_step() == 29
    assert bench.watcher.queries.status().complete_steps == 30
    assert bench.watcher.queries.view.canonical() == from_scratch(bench.store).canonical()


def test_queries_during_a_poll_see_the_previous_poll(bench: Bench) -> None:
    """That some ranks have ended is known then, and not yet what they saved."""
    bench.start(3)
    bench.save(0)
    bench.turn()
    for writer in bench.ranks:
        writer.step(TRAIN, 1, TENSORS).end()
    found, standings = bench.store.get, list[str]()

    async def get(key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = await found(key, start, stop)
        standings.append(bench.watcher.queries.step(1, TRAIN).standing)
        return data

    bench.store.get = get  # type: ignore[method-assign]
    bench.turn()
    assert set(standings) == {"pending"}
    assert len(standings) >= 3
    assert bench.watcher.queries.step(1, TRAIN).standing == "complete"


def test_a_hint_is_followed_at_once(bench: Bench) -> None:
    bench.start(1)
    for step in range(4):
        bench.save(step)
        bench.turns(60)
    bench.turns(10)
    bench.save(4)
    bench.requests.counts.clear()
    bench.turn(0.0)
    assert bench.requests.counts["get manifests"] == 0, "it is not due"
    bench.watcher.hint("worker_0", 0, 4)
    bench.watcher.hint("worker_0", 0, 2)
    bench.watcher.hint("nonsense", 0, 4)
    bench.watcher.hint("worker_9", 7, 4)
    bench.turn(0.0)
    assert bench.watcher.queries.latest_complete_step() == 4
    assert bench.requests.counts["get manifests"] == 1


# -- many runs -------------------------------------------------------------------------------------


async def until(condition: Callable[[], object], watch: DirectoryWatcher) -> None:
    await until_async(condition, "the watcher", about=lambda: f"{watch.trouble} {watch.runs()}")


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_runs_below_a_directory_are_found_as_they_appear(
    kind: str, tmp_path_factory: object
) -> None:
    store = (
        MemoryStore("place") if kind == "memory" else LocalStore(tmp_path_factory.mktemp("place"))  # type: ignore[attr-defined]
    )

    def begin(name: str) -> RankWriter:
        return RunBuilder(StoreSubtree(store, name)).rank(0).step(TRAIN, 0, TENSORS).flush()

    async def act() -> None:
        stop = asyncio.Event()
        watch = DirectoryWatcher(store.url, store=store, interval_s=0.02)
        running = asyncio.create_task(watch.run(stop))
        with pytest.raises(NoSuchRun):
            watch.watcher()
        first = await asyncio.to_thread(begin, "a/run1")
        await until(lambda: watch.runs(), watch)
        await until(lambda: watch.watcher().queries.latest_complete_step() == 0, watch)
        await asyncio.to_thread(begin, "run2")
        await until(lambda: len(watch.runs()) == 2, watch)
        assert set(watch.runs()) == {f"{store.url.rstrip('/')}/{n}" for n in ("a/run1", "run2")}
        assert watch.watcher("run2").url.endswith("run2")
        await asyncio.to_thread(first.end)
        await until(lambda: watch.watcher("a/run1").state == "finished", watch)
        with pytest.raises(NoSuchRun):
            watch.watcher("run3")
        stop.set()
        await running
        assert watch.watcher("run2").state == "stopped"
        await watch.close()

    asyncio.run(act())


def test_query_notices_that_a_finished_run_continues() -> None:
    store = MemoryStore("all")
    job = RunBuilder(StoreSubtree(store, "a"))
    job.rank(0).step(TRAIN, 0, TENSORS).end()

    async def scenario() -> None:
        stop, watch = (
            asyncio.Event(),
            DirectoryWatcher("memory://all", store=store, interval_s=0.01),
        )
        running = asyncio.get_running_loop().create_task(watch.run(stop))
        await until(lambda: [one.state for one in watch.runs().values()] == ["finished"], watch)
        finished = watch.watcher()
        assert await watch.refreshed() is finished
        await asyncio.to_thread(save_more, job)
        await asyncio.sleep(0.02)  # longer than an answer holds, by the watch's own interval
        resumed = await watch.refreshed()
        assert resumed is not finished
        assert (await resumed.queries.wait_for_step(1, TRAIN, timeout_s=30)).standing == "complete"
        stop.set()
        await running
        await watch.close()

    asyncio.run(scenario())


def save_more(job: RunBuilder) -> None:
    job.rank(0, attempt=1, now=time.time()).step(TRAIN, 1, TENSORS).flush()


def test_directory_that_is_a_run_and_a_run_of_another_coordinator() -> None:
    store = MemoryStore("one")
    rank = RunBuilder(store).rank(0).step(TRAIN, 0, TENSORS).flush()

    async def act() -> None:
        stop, other_stop = asyncio.Event(), asyncio.Event()
        watch = DirectoryWatcher(store.url, store=store, interval_s=0.02)
        running = asyncio.create_task(watch.run(stop))
        await until(
            lambda: watch.runs() and watch.watcher().queries.latest_complete_step() == 0, watch
        )
        other = DirectoryWatcher(store.url, store=store, interval_s=0.02)
        standing_by = asyncio.create_task(other.run(other_stop))
        await until(lambda: other.runs() and other.watcher().state == "refused", other)
        assert "--take-over" in other.watcher().queries.status().detail
        stop.set()
        await running
        await watch.close()
        await until(lambda: other.watcher().state == "watching", other)
        await asyncio.to_thread(rank.end)
        await until(lambda: other.watcher().state == "finished", other)
        other_stop.set()
        await standing_by
        await other.close()

    asyncio.run(act())
