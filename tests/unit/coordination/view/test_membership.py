"""How ranks stand at a time that is passed in, and when a step is complete."""

from __future__ import annotations

from typing import Any

import pytest

from smdist.coordination.view.membership import (
    LastContact,
    LivenessTimeouts,
    MissingReason,
    RankStatus,
    expected_ranks,
    finished,
    missing_ranks,
    rank_reports,
    step_attempts,
    step_facts,
)
from smdist.coordination.view.run_view import Fact, View, view_of_facts
from smdist.format.intervals import Members
from smdist.format.manifest import Dropped, Heartbeat, RankManifest, Session, StepEntry

NOW = 1000.0


def session(rank: int, world: int = 2, attempt: int = 0, **more: Any) -> Session:
    facts: dict[str, Any] = {"include_workers": "all", "started": 0.0}
    return Session(
        session=f"{attempt}.{rank}",
        rank=rank,
        world_size=world,
        attempt=attempt,
        host="h",
        pid=1,
        launch="",
        **{**facts, **more},
    )


def entry(number: int, *, closed: bool = True, step: int | None = None, mode: int = 1) -> StepEntry:
    global_step = number if step is None else step
    return StepEntry(
        mode, number, global_step, number * 10, closed, "l", "seg", 0, 0.0, float(number)
    )


def manifest(rank: int, *steps: StepEntry, attempt: int = 0, world: int = 2, **more: Any) -> Fact:
    facts: dict[str, Any] = {"include_workers": "all", "seq": 0, "state": "active", "time": NOW}
    return RankManifest(
        session=f"{attempt}.{rank}",
        rank=rank,
        world_size=world,
        attempt=attempt,
        first=0,
        upto=10,
        steps=steps,
        **{**facts, **more},
    )


def missing(view: View, key: tuple[int, int], *, attempt: int = 0) -> dict[int, MissingReason]:
    facts = step_facts(view, attempt, key, expected_ranks(view, attempt))
    assert facts is not None
    found = missing_ranks(view, facts, rank_reports(view, attempt, NOW))
    assert facts.complete == (not found)
    return found


def status(view: View, rank: int, now: float = NOW, **patience: float) -> RankStatus:
    return rank_reports(view, 0, now, LivenessTimeouts(**patience))[rank].status


@pytest.mark.parametrize(
    ("include", "ranks"), [("one", (0,)), ("all", (0, 1, 2)), ((2, 0, 7), (0, 2))]
)
def test_the_session_says_who_is_expected(include: Any, ranks: tuple[int, ...]) -> None:
    view = view_of_facts([session(0, world=3, include_workers=include)])
    assert expected_ranks(view, 0) == ranks


def test_a_step_is_complete_when_every_expected_rank_closed_it() -> None:
    assert missing(view_of_facts([manifest(0, entry(0)), manifest(1, entry(0))]), (1, 0)) == {}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ([manifest(1)], "lagging"),
        ([manifest(1, entry(0, closed=False))], "lagging"),
        ([manifest(1, state="ended")], "ended"),
        ([manifest(1, entry(0, closed=False), state="ended")], "ended within the step"),
        ([manifest(1, state="lost")], "lost"),
        ([manifest(1, entry(0, closed=False), state="lost")], "lost within the step"),
        ([manifest(1, time=NOW - 61)], "lost"),
        ([session(1, started=NOW - 61)], "lost"),
        ([], "never started"),
        ([manifest(1, entry(0), dropped=(Dropped(1, 0, 0, ("x",), 4, "full"),))], "dropped"),
        ([manifest(1, dropped=(Dropped(1, 0, 0, ("x",), 4, "full"),))], "dropped"),
        ([manifest(1, entry(3))], "skipped"),
    ],
)
def test_a_partial_step_says_who_is_missing_and_why(other: list[Fact], reason: str) -> None:
    found = missing(view_of_facts([manifest(0, entry(0)), *other]), (1, 0))
    assert found == {1: reason}
    assert isinstance(found[1], MissingReason)
    assert str(found[1]) == reason


def test_a_late_commit_of_a_rank_given_up_completes_the_step() -> None:
    facts: list[Fact] = [manifest(0, entry(0)), manifest(1, seq=0, state="lost")]
    assert missing(view_of_facts(facts), (1, 0)) == {1: MissingReason.LOST}
    facts.append(manifest(1, entry(0), seq=1, state="lost"))
    assert missing(view_of_facts(facts), (1, 0)) == {}


def test_heartbeats_keep_a_rank_alive_until_they_stop() -> None:
    beat = Heartbeat("0.1", 1, 0, NOW - 10, 5.0, -1, 0)
    view = view_of_facts([session(1), beat])
    assert status(view, 1) is RankStatus.ACTIVE
    assert status(view, 1, NOW + 51) is RankStatus.LOST
    assert status(view, 1, lost_after_s=5) is RankStatus.LOST


def test_a_rank_that_commits_long_behind_the_front_is_lagging() -> None:
    view = view_of_facts([manifest(0, entry(500)), manifest(1, entry(450))])
    report = rank_reports(view, 0, NOW)[1]
    assert (report.status, report.behind_s, report.step) == (RankStatus.LAGGING, 50.0, 450)
    assert report.pending
    assert status(view, 0) is RankStatus.ACTIVE


def test_one_rank_closing_early_ends_nothing_for_the_others() -> None:
    view = view_of_facts([manifest(0, state="ended"), manifest(1)])
    assert not finished(view, NOW)
    assert finished(view_of_facts([manifest(0, state="ended"), manifest(1, state="lost")]), NOW)
    assert finished(view, NOW + 61)


def test_a_rank_that_never_started_is_waited_for_only_for_a_while() -> None:
    view = view_of_facts([session(0, started=NOW), manifest(0, state="ended")])
    assert not finished(view, NOW + 59)
    assert finished(view, NOW + 61)


def test_who_hears_a_rank_believes_its_own_clock() -> None:
    view = view_of_facts([session(0), manifest(0, time=NOW - 500), manifest(1, time=NOW + 500)])
    hearing = {
        (0, 0): LastContact(NOW - 100, NOW - 50, NOW - 10),
        (0, 1): LastContact(NOW - 100, NOW - 90, NOW - 61),
    }
    reports = rank_reports(view, 0, NOW, hearing=hearing)
    assert [report.status for report in reports.values()] == ["active", "lost"]
    assert [report.last_seen for report in reports.values()] == [NOW - 10, NOW - 61]
    assert not finished(view, NOW, hearing=hearing)
    assert finished(view, NOW + 51, hearing=hearing)
    reports = rank_reports(view, 0, NOW)
    assert [report.status for report in reports.values()] == ["lost", "active"]


def test_a_view_without_ranks_is_not_finished() -> None:
    assert not finished(View(), NOW)


def test_attempts_have_their_own_world_and_the_newest_comes_first() -> None:
    old = [manifest(r, entry(0), entry(1), world=3) for r in range(3)]
    new = [manifest(r, entry(0), attempt=1, world=2) for r in range(2)]
    view = view_of_facts([*old, *new])
    assert step_attempts(view, (1, 0)) == (1, 0)
    assert step_attempts(view, (1, 1)) == (0,)
    assert step_attempts(view, (1, 2)) == ()
    assert missing(view, (1, 0), attempt=1) == {}
    assert missing(view, (1, 0), attempt=0) == {}
    assert expected_ranks(view, 1) == (0, 1)


def test_ranks_that_number_a_step_differently_are_reported_and_the_lowest_rank_is_followed() -> (
    None
):
    view = view_of_facts([manifest(0, entry(1, step=1)), manifest(1, entry(1, step=2))])
    facts = step_facts(view, 0, (1, 1), Members(((0, 2),)))
    assert facts is not None
    assert facts.step == 1
    assert facts.complete
    assert facts.disagreement is not None
    assert facts.disagreement.numbers == {1: (0,), 2: (1,)}


def test_a_step_nobody_knows_has_no_facts() -> None:
    assert step_facts(view_of_facts([manifest(0, entry(0))]), 0, (2, 0), Members(((0, 1),))) is None


def unplanned(number: int, block: int) -> StepEntry:
    return StepEntry(1, number, number, block, True, "l", "s", 0, 0.0, 1.0, planned=False)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (manifest(1, entry(2)), None),
        (manifest(1, entry(2), state="lost"), MissingReason.LOST),
        (manifest(1, entry(4)), None),
        (manifest(1, entry(4), state="lost"), None),
        (manifest(1, entry(2), state="ended"), None),
    ],
)
def test_who_saved_nothing_where_nothing_was_due_has_chosen_so_unless_it_was_lost_before(
    other: Fact, reason: MissingReason | None
) -> None:
    view = view_of_facts([session(0), session(1), manifest(0, unplanned(3, 30)), other])
    assert missing(view, (1, 3)) == ({1: reason} if reason else {})


@pytest.mark.parametrize("other", [manifest(1, entry(3)), manifest(1, entry(3, closed=False))])
def test_a_step_that_was_due_for_one_rank_is_expected_of_all(other: Fact) -> None:
    view = view_of_facts([session(0, world=3), session(1, world=3), session(2, world=3), other,
                 manifest(0, unplanned(3, 30)), manifest(2, entry(2))])  # fmt: skip
    assert 2 in missing(view, (1, 3))


def test_values_added_later_do_not_make_a_due_step_undue() -> None:
    view = view_of_facts(
        [session(0), session(1), manifest(0, entry(3), unplanned(3, 99)), manifest(1)]
    )
    assert missing(view, (1, 3)) == {1: MissingReason.LAGGING}


def test_a_step_at_which_nothing_was_due_but_something_was_dropped_is_expected_of_all() -> None:
    drop = Dropped(1, 3, 3, ("x",), 4, "full")
    view = view_of_facts([session(0), session(1), manifest(0, unplanned(3, 30), dropped=(drop,))])
    assert set(missing(view, (1, 3))) == {0, 1}
