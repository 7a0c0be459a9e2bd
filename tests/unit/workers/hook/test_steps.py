"""Counting steps, by value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.errors import ConfigurationError
from smdist.identity import ModeKeys, StepRef
from smdist.workers.hook.step_clock import NEXT_STEP, StepClock

T, E, P, G = ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT, ModeKeys.GLOBAL


def test_one_counter_for_all_and_one_per_mode() -> None:
    clock, seen = StepClock(), []
    for mode in (T, T, E, E, T, T):
        clock.set_mode(mode)
        clock.forward()
        seen.append(clock.ref)
    assert seen == [
        StepRef(T, 0, 0),
        StepRef(T, 1, 1),
        StepRef(E, 0, 2),
        StepRef(E, 1, 3),
        StepRef(T, 2, 4),
        StepRef(T, 3, 5),
    ]
    assert clock.mode_steps == {T: 3, E: 1, G: 5}


def test_the_mode_that_nobody_sets_counts_as_the_global_counter() -> None:
    clock = StepClock()
    clock.forward()
    clock.set_mode(T)
    clock.forward()
    clock.set_mode(G)
    clock.forward()
    assert clock.ref == StepRef(G, 2, 2)


def test_only_steps_from_the_due_one_on_are_told() -> None:
    clock = StepClock()
    clock.due = 3
    assert [clock.forward() for _ in range(5)] == [False, False, False, True, True]
    clock.due = NEXT_STEP
    assert clock.forward()


def test_a_new_mode_is_told_at_once() -> None:
    clock = StepClock()
    clock.due = 100
    clock.set_mode(T)
    assert clock.forward()


def test_an_optimizer_step_spans_all_forwards_before_it() -> None:
    clock = StepClock("optimizer")
    numbers = []
    for _ in range(3):
        for _ in range(4):
            clock.forward()
            numbers.append(clock.step)
        clock.end()
    assert numbers == [0] * 4 + [1] * 4 + [2] * 4


def test_without_an_optimizer_in_evaluation_every_forward_is_a_step() -> None:
    clock = StepClock("optimizer")
    clock.set_mode(E)
    for _ in range(3):
        clock.forward()
    assert clock.ref == StepRef(E, 2, 2)


def test_changing_the_mode_ends_a_step() -> None:
    clock = StepClock("optimizer")
    clock.set_mode(T)
    clock.forward()
    clock.set_mode(E)
    clock.forward()
    clock.set_mode(T)
    clock.forward()
    assert clock.ref == StepRef(T, 1, 2)


def test_manual_steps_end_only_when_told() -> None:
    clock = StepClock("manual")
    for _ in range(5):
        clock.forward()
    assert clock.step == 0
    clock.end()
    clock.forward()
    assert clock.step == 1


def test_the_current_step_is_the_modes_own_last_one() -> None:
    clock = StepClock()
    clock.set_mode(T)
    assert not clock.has_step
    assert clock.ref == StepRef(T, 0, 0)
    clock.forward()
    clock.set_mode(E)
    assert not clock.has_step
    assert clock.ref == StepRef(E, 0, 1)
    clock.forward()
    clock.set_mode(T)
    assert clock.ref == StepRef(T, 0, 0)


def test_an_unknown_kind_of_step_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'forward', 'optimizer', 'manual'"):
        StepClock().step_on = "epoch"  # type: ignore[assignment]


modes = st.lists(st.sampled_from([T, E, P, G]), max_size=30)


@given(modes, modes)
def test_a_restored_clock_goes_on_as_if_nothing_had_happened(
    before: list[ModeKeys], after: list[ModeKeys]
) -> None:
    def run(clock: StepClock, plan: list[ModeKeys]) -> list[StepRef]:
        found = []
        for mode in plan:
            clock.set_mode(mode)
            clock.forward()
            found.append(clock.ref)
        return found

    first = StepClock()
    run(first, before)
    second = StepClock()
    second.restore(json.loads(json.dumps(first.state())))
    assert run(second, after) == run(first, after)


@pytest.mark.parametrize(
    "state", [{}, {"step": "x", "modes": {}}, {"step": 1, "modes": {"X": [1, 2]}}]
)
def test_the_state_of_something_else_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="state_dict"):
        StepClock().restore(state)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.integers(1, 6)),
        st.tuples(st.just("due"), st.integers(-1, 12)),
        st.tuples(st.just("mode"), st.sampled_from([T, E, P, G])),
        st.tuples(st.just("step_on"), st.sampled_from(["forward", "optimizer", "manual"])),
        st.tuples(st.just("end"), st.none()),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=40,
)


@given(moves)
def test_counting_down_is_the_same_as_asking_every_time(plan: list[tuple[str, object]]) -> None:
    told: dict[str, list[object]] = {"asked": [], "counted": []}
    for how, seen in told.items():
        clock = StepClock()
        for what, value in plan:
            if what == "forward":
                for _ in range(int(str(value))):
                    if how == "counted" and clock.idle_forwards_left > 0:
                        clock.idle_forwards_left -= 1
                        seen.append(False)
                    else:
                        seen.append(clock.forward())
            elif what == "mode":
                clock.set_mode(ModeKeys(value))
            elif what == "end":
                clock.end()
            elif what == "look":
                seen.append((clock.ref, clock.step, clock.in_step, clock.has_step))
            else:
                setattr(clock, what, value)
        seen.append((clock.state(), clock.mode_steps, clock.due))
    assert told["counted"] == told["asked"]
