from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from smdist.format.journal_records import Declare, Drop, End, Flush, Trouble
from smdist.identity import ModeKeys
from smdist.workers.upload.batching import OPEN_LINGER, Decision, Pending, decide
from tests.support.journal_model import Scribe


class Limits(NamedTuple):
    linger_s: float = 2.0
    segment_bytes: int = 1000


LIMITS = Limits()
WAIT = Decision(None, None)


class Uploader(Scribe):
    """A scribe whose records the uploader sees at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = Pending()
        self.seen = 0

    def look(self, now: float) -> None:
        self.pending.add(self.pieces[self.seen :], now)
        self.seen = len(self.pieces)

    def step(self, mode_step: int, nbytes: int, close: bool = True) -> None:
        self.part({"w": np.zeros(nbytes, "u1")}, mode_step)
        if close:
            self.close(mode_step)


def test_nothing_pending_waits_for_news() -> None:
    assert decide(Pending(), LIMITS, 0.0) == WAIT


def test_a_declaration_alone_is_not_worth_writing() -> None:
    up = Uploader()
    up.say(Declare(0, (), (), 0))
    up.look(0.0)
    assert decide(up.pending, LIMITS, 1e9) == WAIT


def test_a_closed_step_lingers_then_goes() -> None:
    up = Uploader()
    up.step(0, 80)
    up.look(10.0)
    assert decide(up.pending, LIMITS, 11.0) == Decision(None, 12.0)
    assert decide(up.pending, LIMITS, 12.0) == Decision(2, None)


def test_the_open_step_stays_behind_until_it_is_old() -> None:
    up = Uploader()
    up.step(0, 80)
    up.look(0.0)
    up.step(1, 80, close=False)
    up.look(1.0)
    assert decide(up.pending, LIMITS, 2.0) == Decision(2, None)
    assert len(up.pending.take(2)) == 2
    old = 1.0 + OPEN_LINGER * LIMITS.linger_s
    assert decide(up.pending, LIMITS, old - 0.1) == Decision(None, old)
    assert decide(up.pending, LIMITS, old) == Decision(3, None)
    up.pending.take(3)
    assert decide(up.pending, LIMITS, old) == WAIT


def test_small_news_linger_too() -> None:
    up = Uploader()
    up.say(Trouble("oops", 0, 0.0))
    up.look(0.0)
    assert decide(up.pending, LIMITS, 0.0) == Decision(None, 2.0)
    assert decide(up.pending, LIMITS, 2.0) == Decision(1, None)


def test_size_takes_whole_steps_that_fit() -> None:
    up = Uploader()
    for step in range(5):
        up.step(step, 400)
    up.look(0.0)
    assert decide(up.pending, LIMITS, 0.0) == Decision(4, None)
    up.pending.take(4)
    assert up.pending.nbytes == 1200
    assert decide(up.pending, LIMITS, 0.0) == Decision(8, None)
    up.pending.take(8)
    assert decide(up.pending, LIMITS, 0.0) == Decision(None, 2.0)


def test_a_bigger_step_goes_alone_once_it_is_closed() -> None:
    up = Uploader()
    up.step(0, 5000, close=False)
    up.look(0.0)
    assert decide(up.pending, LIMITS, 0.0) == Decision(None, OPEN_LINGER * LIMITS.linger_s)
    up.close(0)
    up.step(1, 8)
    up.look(0.0)
    assert decide(up.pending, LIMITS, 0.0) == Decision(2, None)


ROOMY = Limits(segment_bytes=1 << 40)


def test_steps_too_many_to_be_held_go_before_they_are_old() -> None:
    up, step = Uploader(), 0
    while not up.pending.full:
        up.step(step, 8)
        up.look(0.0)
        step += 1
    assert 1000 < step < 10_000
    up.step(step, 8, close=False)
    up.look(0.0)
    for drain in (False, True):
        assert decide(up.pending, ROOMY, 0.0, drain=drain).upto == 2 * step, "whole steps"
    up.pending.take(2 * step)
    assert decide(up.pending, ROOMY, 0.0).upto is None


def test_an_open_step_too_long_to_be_held_goes_in_pieces() -> None:
    up = Uploader()
    while not up.pending.full:
        up.step(0, 8, close=False)
        up.look(0.0)
    assert decide(up.pending, ROOMY, 0.0) == Decision(len(up.pieces), None)
    up.pending.take(len(up.pieces))
    up.step(0, 8, close=False)
    up.look(0.0)
    assert decide(up.pending, ROOMY, 0.0).upto is None


def test_tensors_count_as_records_do() -> None:
    up = Uploader()
    many = {f"t{i}": np.zeros(1, "u1") for i in range(1000)}
    while not up.pending.full:
        up.part(many, len(up.pieces))
        up.look(0.0)
    assert 4 < len(up.pieces) < 40


def test_an_open_step_does_not_hold_back_what_came_before_it() -> None:
    up = Uploader()
    up.step(0, 400)
    up.step(1, 4000, close=False)
    up.look(0.0)
    assert decide(up.pending, LIMITS, 0.0) == Decision(2, None)


def test_flush_wants_the_open_step_too() -> None:
    up = Uploader()
    up.step(0, 80, close=False)
    up.say(Flush())
    up.look(0.0)
    assert decide(up.pending, LIMITS, 0.0) == Decision(2, None)
    up.pending.take(2)
    assert decide(up.pending, LIMITS, 0.0) == WAIT


def test_end_and_drain_want_everything_in_batches() -> None:
    for last in (End("", 0.0), None):
        up = Uploader()
        up.step(0, 800)
        up.step(1, 800)
        up.step(2, 80, close=False)
        if last is not None:
            up.say(last)
        up.look(0.0)
        taken = []
        while (decision := decide(up.pending, LIMITS, 0.0, drain=last is None)).upto is not None:
            taken.append([piece.ordinal for piece in up.pending.take(decision.upto)])
        assert taken == [[0, 1], [2, 3, 4] + ([5] if last is not None else [])]


def test_a_late_part_opens_nothing() -> None:
    up = Uploader()
    up.step(0, 80)
    up.part({"scalar": np.ones(1)}, 0)
    up.look(0.0)
    assert decide(up.pending, LIMITS, 2.0) == Decision(3, None)


def test_a_drop_belongs_to_its_open_step() -> None:
    up = Uploader()
    up.say(Drop(1, 0, 0, 0.0, ("w",), 8, "full"))
    up.look(0.0)
    assert decide(up.pending, LIMITS, 2.0).upto is None
    up.close(0)
    up.look(2.0)
    assert decide(up.pending, LIMITS, 2.0) == Decision(2, None)


def test_a_step_that_never_closes_does_not_stop_big_batches() -> None:
    up = Uploader()
    up.step(0, 8, close=False)
    for step in range(3):
        up.part({"w": np.zeros(800, "u1")}, step, mode=ModeKeys.EVAL)
        up.close(step, mode=ModeKeys.EVAL)
    up.look(0.0)
    assert decide(up.pending, LIMITS, 0.0) == Decision(7, None)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["part", "close", "flush", "look", "decide"]),
            st.integers(0, 3),
            st.integers(0, 1500),
        ),
        max_size=60,
    )
)
def test_every_record_is_taken_once_in_order_and_nothing_waits_forever(
    story: list[tuple[str, int, int]],
) -> None:
    up = Uploader()
    now = 0.0
    taken: list[int] = []

    def work(drain: bool = False) -> float | None:
        while True:
            decision = decide(up.pending, LIMITS, now, drain=drain)
            if decision.upto is None:
                return decision.wake_at
            batch = up.pending.take(decision.upto)
            assert batch
            taken.extend(piece.ordinal for piece in batch)

    for what, step, nbytes in story:
        now += 0.3
        if what == "part":
            up.step(step, nbytes, close=False)
        elif what == "close":
            up.close(step)
        elif what == "flush":
            up.say(Flush())
        elif what == "look":
            up.look(now)
        else:
            wake = work()
            assert wake is None or now < wake <= now + OPEN_LINGER * LIMITS.linger_s
    up.look(now)
    now += OPEN_LINGER * LIMITS.linger_s
    work()
    assert taken == list(range(len(up.pieces)))
    assert up.pending.nbytes == 0
