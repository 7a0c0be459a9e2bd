"""The pure side of a trial: what it knows does not depend on how it learned it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smdist.coordination.view.run_view import View, view_of_facts
from smdist.format.manifest import RankManifest, StepEntry
from smdist.identity import ModeKeys
from smdist.trials.advance import advance
from smdist.trials.catalogue import Catalogue, StepState

TRAIN, GLOBAL = ModeKeys.TRAIN, ModeKeys.GLOBAL


def entry(mode: int, number: int, step: int, *, closed: bool = True) -> StepEntry:
    return StepEntry(mode, number, step, number, closed, "", "", 0, 0.0, 0.0)


def manifest(
    rank: int, seq: int, steps: tuple[StepEntry, ...], world: int = 2, attempt: int = 0
) -> RankManifest:
    name = f"{attempt}.{rank}"
    return RankManifest(name, rank, world, attempt, "all", seq, seq, seq + 1, "active", 1.0, steps)


manifests = st.builds(
    manifest,
    rank=st.integers(0, 2),
    seq=st.integers(0, 3),
    steps=st.lists(
        st.builds(
            entry,
            st.sampled_from([1, 2, 4]),
            st.integers(0, 3),
            st.integers(0, 4),
            closed=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    world=st.integers(1, 3),
    attempt=st.integers(0, 1),
)


@given(
    st.lists(st.lists(manifests, max_size=4), max_size=4),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([(None, None), (1, 3)]),
)
def test_learning_bit_by_bit_is_learning_at_once(
    bits: list[list[RankManifest]],
    attempt: int | None,
    range_steps: tuple[int | None, int | None],
) -> None:
    slow = Catalogue(attempt=attempt, range_steps=range_steps)
    for bit in bits:
        slow = advance(slow, view_of_facts(bit), {}, 2.0)
    every = view_of_facts(one for bit in bits for one in bit)
    fast = advance(Catalogue(attempt=attempt, range_steps=range_steps), every, {}, 2.0)
    assert dict(slow.steps) == dict(fast.steps)
    assert slow.by_number == fast.by_number
    assert slow.finished == fast.finished or not bits


@given(st.lists(manifests, max_size=6))
def test_a_step_is_complete_exactly_when_nobody_is_missing(some: list[RankManifest]) -> None:
    catalogue = advance(Catalogue(), view_of_facts(some), {}, 2.0)
    for facts in catalogue.steps.values():
        assert facts.complete == (catalogue.missing(facts) == {})


def test_advancing_leaves_the_old_catalogue_alone() -> None:
    old = advance(Catalogue(), view_of_facts([manifest(0, 0, (entry(1, 0, 0),))]), {}, 2.0)
    new = advance(old, view_of_facts([manifest(1, 0, (entry(1, 0, 0),))]), {}, 2.0)
    assert (old.steps[1, 0].complete, new.steps[1, 0].complete) == (False, True)
    assert old.last_complete_step == -1
    assert new.last_complete_step == 0


def test_a_world_that_grows_reopens_what_was_complete() -> None:
    old = advance(Catalogue(), view_of_facts([manifest(0, 0, (entry(1, 0, 0),), world=1)]), {}, 2.0)
    assert old.steps[1, 0].complete
    new = advance(old, view_of_facts([manifest(1, 0, (), world=2)]), {}, 2.0)
    assert new.steps[1, 0].absent == (1,)


def test_two_steps_that_claim_one_number_keep_their_own() -> None:
    first = manifest(0, 0, (entry(1, 0, 0), entry(2, 0, 1)), world=1)
    second = manifest(0, 0, (entry(1, 1, 1),), world=1, attempt=1)
    catalogue = advance(Catalogue(), view_of_facts([first, second]), {}, 2.0)
    assert catalogue.by_number[1].key == (1, 1)
    assert list(catalogue.of_mode(ModeKeys.EVAL)) == [0]


def test_a_step_beyond_the_range_is_not_waited_for() -> None:
    catalogue = Catalogue(range_steps=(0, 5))
    catalogue = advance(
        catalogue, view_of_facts([manifest(0, 0, (entry(1, 0, 0),), world=1)]), {}, 2.0
    )
    assert catalogue.state(7, GLOBAL) is StepState.UNAVAILABLE
    assert catalogue.state(4, GLOBAL) is StepState.NOT_YET_AVAILABLE


def test_nothing_known_is_not_finished() -> None:
    assert not Catalogue().finished
    assert Catalogue().state(0, TRAIN) is StepState.NOT_YET_AVAILABLE


def test_many_ranks_and_steps_arrive_in_rounds() -> None:
    ranks, rounds, steps = 256, 20, 10
    catalogue = Catalogue()
    for turn in range(rounds):
        delta: View = view_of_facts(
            manifest(
                rank,
                turn,
                tuple(entry(1, n, n) for n in range(turn * steps, (turn + 1) * steps)),
                world=ranks,
            )
            for rank in range(ranks)
        )
        catalogue = advance(catalogue, delta, {}, 2.0)
    assert len(catalogue.by_number) == rounds * steps
    assert all(facts.complete for facts in catalogue.steps.values())
