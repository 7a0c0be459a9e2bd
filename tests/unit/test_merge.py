"""The laws of `merge`: order, grouping and repetition of facts change nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from smdist.coordination.merge import Fact, View, add, fold, merge
from smdist.manifest import Dropped, Heartbeat, RankManifest, Session, StepEntry

if TYPE_CHECKING:
    import random

small = st.integers(0, 3)
times = st.integers(0, 50).map(float)
includes = st.sampled_from(["one", "all", (0, 2)])


@st.composite
def entries(draw: st.DrawFn) -> StepEntry:
    mode_step = draw(small)
    return StepEntry(
        mode=draw(st.sampled_from([1, 2, 4])),
        mode_step=mode_step,
        step=mode_step + draw(st.integers(0, 1)),
        block=draw(small),
        closed=draw(st.booleans()),
        layout=draw(st.sampled_from(["a", "b"])),
        segment=draw(st.sampled_from(["", "s"])),
        offset=draw(st.sampled_from([0, 8])),
        began=0.0,
        time=draw(times),
    )


drops = st.builds(
    Dropped,
    mode=st.sampled_from([1, 2]),
    mode_step=small,
    step=small,
    names=st.just(("x",)),
    nbytes=small,
    reason=st.just("full"),
)
# Keys are drawn from few values on purpose: facts of one key that differ must not break the laws.
manifests = st.builds(
    RankManifest,
    session=st.sampled_from(["p", "q"]),
    rank=small,
    world_size=st.integers(1, 4),
    attempt=st.integers(0, 1),
    include_workers=includes,
    seq=small,
    first=small,
    upto=small,
    state=st.sampled_from(["active", "ended", "lost"]),
    time=times,
    steps=st.lists(entries(), max_size=3).map(tuple),
    dropped=st.lists(drops, max_size=2).map(tuple),
    troubles=st.lists(st.sampled_from(["t", "u"]), max_size=2).map(tuple),
    reason=st.sampled_from(["", "killed"]),
)
sessions = st.builds(
    Session,
    session=st.sampled_from(["p", "q"]),
    rank=small,
    world_size=st.integers(1, 4),
    attempt=st.integers(0, 1),
    include_workers=includes,
    started=times,
    host=st.just("h"),
    pid=small,
    launch=st.just(""),
)
heartbeats = st.builds(
    Heartbeat,
    session=st.just("p"),
    rank=small,
    attempt=st.integers(0, 1),
    time=times,
    interval_s=st.just(5.0),
    step=small,
    pending_bytes=small,
)
facts = st.lists(st.one_of(manifests, sessions, heartbeats), max_size=8)


@given(facts, st.randoms(use_true_random=False))
def test_order_does_not_matter(some: list[Fact], rng: random.Random) -> None:
    shuffled = list(some)
    rng.shuffle(shuffled)
    assert fold(some).canonical() == fold(shuffled).canonical()


@given(facts, facts)
def test_merge_commutes(some: list[Fact], others: list[Fact]) -> None:
    assert merge(fold(some), fold(others)) == merge(fold(others), fold(some))


@given(facts, facts, facts)
def test_grouping_does_not_matter(a: list[Fact], b: list[Fact], c: list[Fact]) -> None:
    va, vb, vc = fold(a), fold(b), fold(c)
    assert merge(merge(va, vb), vc) == merge(va, merge(vb, vc)) == fold([*a, *b, *c])


@given(facts)
def test_repetition_does_not_matter(some: list[Fact]) -> None:
    view = fold(some)
    assert merge(view, view) == view == fold([*some, *some])
    assert merge(view, View()) == view == merge(View(), view)


@given(facts, facts)
def test_merge_leaves_its_arguments_alone(some: list[Fact], others: list[Fact]) -> None:
    a, b = fold(some), fold(others)
    before = a.canonical(), b.canonical()
    merge(a, b)
    assert (a.canonical(), b.canonical()) == before


@given(facts)
def test_views_of_single_facts_merge_to_the_fold(some: list[Fact]) -> None:
    merged = View()
    for fact in some:
        merged = merge(merged, View.of(fact))
    assert merged == fold(some)


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
    known = fold([late, early]).attempts[0][0]
    assert known.head is not None
    assert known.head.state == "ended"
    assert [e.block for e in known.steps[1, 0]] == [3, 7]
    assert known.closed((1, 0))
    assert not known.closed((1, 1))


def test_a_drop_and_a_trouble_said_twice_in_one_manifest_are_two() -> None:
    drop = Dropped(1, 0, 0, ("x",), 4, "full")
    once = manifest(dropped=(drop, drop), troubles=("t", "t"))
    known = fold([once, once]).attempts[0][0]
    assert len(known.drops[1, 0]) == 2
    assert len(known.troubles) == 2


def test_folding_costs_in_proportion_to_what_is_new() -> None:
    """One more fact takes as many calls after a long history as after a short one."""

    def calls_for_one_more(steps: int) -> int:
        view = fold(
            manifest(rank=r, seq=s, steps=(entry(s),)) for s in range(steps) for r in range(4)
        )
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            add(view, manifest(rank=0, seq=steps, steps=(entry(steps),)))
        finally:
            sys.setprofile(None)
        return calls

    assert calls_for_one_more(1000) == calls_for_one_more(10)


def test_add_returns_the_view_it_was_given() -> None:
    view = View()
    assert add(view, manifest()) is view
