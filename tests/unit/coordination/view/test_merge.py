"""The laws of `merge`: order, grouping and repetition of facts change nothing."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from smdist.coordination.view.run_view import Fact, View, add, merge, view_of_facts
from smdist.format.manifest import Dropped, RankManifest, StepEntry
from tests.support.view_facts import facts

if TYPE_CHECKING:
    import random


@given(facts, st.randoms(use_true_random=False))
def test_order_does_not_matter(some: list[Fact], rng: random.Random) -> None:
    shuffled = list(some)
    rng.shuffle(shuffled)
    assert view_of_facts(some).canonical() == view_of_facts(shuffled).canonical()


@given(facts, facts)
def test_merge_commutes(some: list[Fact], others: list[Fact]) -> None:
    assert merge(view_of_facts(some), view_of_facts(others)) == merge(
        view_of_facts(others), view_of_facts(some)
    )


@given(facts, facts, facts)
def test_grouping_does_not_matter(a: list[Fact], b: list[Fact], c: list[Fact]) -> None:
    va, vb, vc = view_of_facts(a), view_of_facts(b), view_of_facts(c)
    assert merge(merge(va, vb), vc) == merge(va, merge(vb, vc)) == view_of_facts([*a, *b, *c])


@given(facts)
def test_repetition_does_not_matter(some: list[Fact]) -> None:
    view = view_of_facts(some)
    assert merge(view, view) == view == view_of_facts([*some, *some])
    assert merge(view, View()) == view == merge(View(), view)


@given(facts, facts)
def test_merge_leaves_its_arguments_alone(some: list[Fact], others: list[Fact]) -> None:
    a, b = view_of_facts(some), view_of_facts(others)
    before = a.canonical(), b.canonical()
    merge(a, b)
    assert (a.canonical(), b.canonical()) == before


@given(facts)
def test_views_of_single_facts_merge_to_the_fold(some: list[Fact]) -> None:
    merged = View()
    for fact in some:
        merged = merge(merged, View.of(fact))
    assert merged == view_of_facts(some)


def manifest(rank: int = 0, seq: int = 0, **more: Any) -> RankManifest:
    facts: dict[str, Any] = {
        "session": f"s{rank}",
        "world_size": 2,
        "attempt": 0,
        "include_workers": "all",
        "first": seq * 10,
        "upto": seq * 10 + 10,
        "state": "active",
        "time": float(seq),
    }
    return RankManifest(rank=rank, seq=seq, **{**facts, **more})


def entry(mode_step: int, *, closed: bool = True, block: int | None = None) -> StepEntry:
    number = mode_step * 10 if block is None else block
    return StepEntry(1, mode_step, mode_step, number, closed, "l", "seg", 0, 0.0, float(mode_step))


def test_the_state_is_that_of_the_highest_seq_and_blocks_keep_their_order() -> None:
    late = manifest(seq=1, state="ended", steps=(entry(0, block=7),))
    early = manifest(seq=0, steps=(entry(0, closed=False, block=3),))
    known = view_of_facts([late, early]).attempts[0][0]
    assert known.head is not None
    assert known.head.state == "ended"
    assert [e.block for e in known.steps[1, 0]] == [3, 7]


def test_a_drop_and_a_trouble_said_twice_in_one_manifest_are_two() -> None:
    drop = Dropped(1, 0, 0, ("x",), 4, "full")
    once = manifest(dropped=(drop, drop), troubles=("t", "t"))
    known = view_of_facts([once, once]).attempts[0][0]
    assert len(known.drops[1, 0]) == 2
    assert len(known.troubles) == 2


def test_folding_costs_in_proportion_to_what_is_new() -> None:
    """One more fact takes as many calls after a long history as after a short one."""

    def calls_for_one_more(steps: int) -> int:
        view = view_of_facts(
            manifest(rank=r, seq=s, steps=(entry(s),)) for s in range(steps) for r in range(4)
        )
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        gc.disable()  # a collection calls whatever was registered with it
        sys.setprofile(count)
        try:
            add(view, manifest(rank=0, seq=steps, steps=(entry(steps),)))
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls

    assert calls_for_one_more(1000) == calls_for_one_more(10)


def test_add_returns_the_view_it_was_given() -> None:
    view = View()
    assert add(view, manifest()) is view
