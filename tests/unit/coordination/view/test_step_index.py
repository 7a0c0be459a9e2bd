"""The coordinator's book of steps: kept up to date bit by bit, it says what a fresh one says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.coordination.view.membership import rank_reports
from smdist.coordination.view.run_view import Fact, StepKey, View, add, view_of_facts
from smdist.coordination.view.step_index import StepIndex
from smdist.format.manifest import RankManifest, RankState, Session, StepEntry
from smdist.identity import ModeKeys
from tests.support.view_facts import facts, many_steps

MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.GLOBAL)


def told(book: StepIndex, view: View) -> object:
    reports = {attempt: rank_reports(view, attempt, 1e9) for attempt in view.attempts}
    numbers = range(-1, book.last_step + 2)
    answers = [book.report(view, reports, number, mode) for mode in MODES for number in numbers]
    latest = [book.latest_complete(mode) for mode in MODES]
    return answers, latest, book.complete, len(book), book.layouts()


def touched(fact: Fact) -> dict[int, set[StepKey]]:
    view = View.of(fact)
    return {
        attempt: set().union(*({*known.steps, *known.drops} for known in ranks.values()))
        for attempt, ranks in view.attempts.items()
    }


def assert_same_as_afresh(bits: Sequence[Fact]) -> None:
    book, view = StepIndex(), View()
    for fact in bits:
        add(view, fact)
        book.update(view, touched(fact))
        fresh = StepIndex()
        fresh.load(view)
        assert told(book, view) == told(fresh, view)


@given(facts)
def test_bit_by_bit_is_at_once(some: list[Fact]) -> None:
    assert_same_as_afresh(some)


@given(many_steps)
@pytest.mark.slow
def test_bit_by_bit_is_at_once_for_many_steps(some: list[Fact]) -> None:
    assert_same_as_afresh(some[:12])


STATES: list[RankState] = ["active", "active", "active", "ended", "lost"]
entries = st.builds(
    lambda number, planned: StepEntry(
        1, number, number, number, True, "l", "s", 0, 0.0, 0.0, planned
    ),
    st.integers(0, 8),
    st.booleans(),
)


@given(st.data())
@pytest.mark.slow
def test_a_rank_that_is_lost_is_missing_at_steps_that_nobody_planned_too(
    data: st.DataObject,
) -> None:
    some: list[Fact] = [
        Session(f"s{rank}", rank, 3, 0, "all", 0.0, "h", 1, "") for rank in range(3)
    ]
    for seq in range(4):
        for rank in data.draw(st.permutations(range(3))):
            state = data.draw(st.sampled_from(STATES))
            steps = tuple(data.draw(st.lists(entries, max_size=3)))
            some.append(
                RankManifest(f"s{rank}", rank, 3, 0, "all", seq, seq, seq + 1, state, 0.0, steps)
            )
    assert_same_as_afresh(some)
    assert view_of_facts(some).canonical()
