"""Ranks agree on the attempt, whatever the order they come in; only the right ones may join."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.format.manifest import Session
from smdist.workers.join.attempt import LONG_BEFORE_S, StartingRank, choose_attempt, may_join


def session(rank: int = 0, attempt: int = 0, **facts: object) -> Session:
    values: dict[str, object] = {
        "session": f"{rank}-{attempt}",
        "rank": rank,
        "world_size": 2,
        "attempt": attempt,
        "include_workers": "all",
        "started": 1000.0,
        "host": "a",
        "pid": 100 + rank,
        "launch": "",
        "restart": 0,
    }
    return Session(**(values | facts))  # type: ignore[arg-type]


def me(rank: int = 0, **facts: object) -> StartingRank:
    values: dict[str, object] = {
        "rank": rank,
        "world_size": 2,
        "host": "a",
        "pid": 900 + rank,
        "launch": "",
        "restart": 0,
        "began": 1001.0,
    }
    return StartingRank(**(values | facts))  # type: ignore[arg-type]


# -- agreement, over histories of starts ---------------------------------------------------------


@dataclass
class Job:
    """A store and the sessions that starts of a job leave in it."""

    sessions: list[Session] = field(default_factory=list)
    now: float = 1000.0

    def start(self, ranks: list[StartingRank]) -> set[int]:
        """Enrol these, in this order; the attempts they chose. All earlier processes are dead."""
        before = {s.session: s.host for s in self.sessions}
        began, chosen = self.now, set()
        for newcomer in ranks:
            one = replace(newcomer, began=began)
            gone = {name for name, host in before.items() if host == one.host}
            attempt = choose_attempt(one, self.sessions, gone)
            assert not any(s.rank == one.rank and s.attempt == attempt for s in self.sessions)
            self.now += 1.0
            self.sessions.append(
                session(
                    one.rank,
                    attempt,
                    session=f"s{len(self.sessions)}",
                    world_size=one.world_size,
                    host=one.host,
                    launch=one.launch,
                    restart=one.restart,
                    started=self.now,
                )
            )
            chosen.add(attempt)
        self.now += 1.0
        return chosen


def starts(
    *, all_enrol: bool, worlds: st.SearchStrategy[int]
) -> st.SearchStrategy[list[tuple[int, list[int]]]]:
    """(world size, ranks in the order they enrol) of each start of a job."""

    def ranks_of(world: int) -> st.SearchStrategy[tuple[int, list[int]]]:
        order = st.permutations(range(world))
        least = world if all_enrol else 1
        return st.tuples(
            st.just(world),
            st.tuples(order, st.integers(least, world)).map(lambda pair: list(pair[0][: pair[1]])),
        )

    return st.lists(worlds.flatmap(ranks_of), min_size=1, max_size=5)


def assert_agreed(chosen: list[set[int]]) -> None:
    assert all(len(attempts) == 1 for attempts in chosen), chosen
    numbers = [attempts.pop() for attempts in chosen]
    assert numbers == list(range(len(numbers)))


@given(
    starts(all_enrol=False, worlds=st.integers(1, 5)),
    st.sampled_from(["given:x", "slurm:7.0", "sagemaker:j"]),
)
def test_counted_restarts_agree_though_some_ranks_never_enrolled(
    history: list[tuple[int, list[int]]], launch: str
) -> None:
    job, chosen = Job(), []
    for restart, (world, ranks) in enumerate(history):
        chosen.append(
            job.start(
                [
                    me(r, world_size=world, host=f"h{r}", launch=launch, restart=restart)
                    for r in ranks
                ]
            )
        )
    assert_agreed(chosen)


@given(starts(all_enrol=False, worlds=st.integers(1, 5)))
def test_launches_with_an_id_agree_when_started_by_hand(
    history: list[tuple[int, list[int]]],
) -> None:
    job, chosen = Job(), []
    for number, (world, ranks) in enumerate(history):
        launch = f"torchelastic:{number}"
        chosen.append(
            job.start([me(r, world_size=world, host=f"h{r}", launch=launch) for r in ranks])
        )
    assert_agreed(chosen)


@given(
    starts(all_enrol=True, worlds=st.just(4)),
    st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
    st.sampled_from(["torchelastic:id", "agent"]),
)
def test_agents_of_two_machines_count_only_their_own_restarts(
    history: list[tuple[int, list[int]]], failing: list[str], launch: str
) -> None:
    job, chosen, counts = Job(), [], {"a": 0, "b": 0}
    for number, (world, ranks) in enumerate(history):
        if number:
            counts[failing[number - 1]] += 1
        members = []
        for rank in ranks:
            host = "ab"[rank // 2]
            name = launch if ":" in launch else f"agent:{host}:boot:5:5"
            members.append(me(rank, world_size=world, host=host, launch=name, restart=counts[host]))
        chosen.append(job.start(members))
    assert_agreed(chosen)


@given(starts(all_enrol=True, worlds=st.integers(1, 5)), st.booleans())
def test_without_any_evidence_ranks_that_all_had_sessions_agree(
    history: list[tuple[int, list[int]]], shells: bool
) -> None:
    job, chosen = Job(), []
    for number, (world, ranks) in enumerate(history):
        chosen.append(
            job.start(
                [
                    me(
                        r,
                        world_size=world,
                        host=f"h{r}",
                        launch=f"parent:h{r}:{number}" if shells else "",
                    )
                    for r in ranks
                ]
            )
        )
    assert_agreed(chosen)


@given(
    starts(all_enrol=False, worlds=st.integers(1, 5)), st.sampled_from(["", "torchelastic:fixed"])
)
def test_on_one_machine_dead_processes_tell_starts_apart(
    history: list[tuple[int, list[int]]], launch: str
) -> None:
    job = Job()
    assert_agreed(
        [job.start([me(r, world_size=w, launch=launch) for r in ranks]) for w, ranks in history]
    )


@given(starts(all_enrol=True, worlds=st.integers(1, 5)))
def test_an_id_that_is_used_again_does_not_confuse(history: list[tuple[int, list[int]]]) -> None:
    job, chosen = Job(), []
    for world, ranks in history:
        members = [me(r, world_size=world, host=f"h{r}", launch="slurm:7.") for r in ranks]
        chosen.append(job.start(members))
    assert_agreed(chosen)


# -- single decisions ------------------------------------------------------------------------------


def test_first_rank_opens_attempt_0() -> None:
    assert choose_attempt(me(), []) == 0


def test_old_sessions_of_a_remote_rank_are_of_an_earlier_start() -> None:
    remote = session(1, host="b", started=1000.0)
    near = me(0, began=1000.0 + LONG_BEFORE_S - 1)
    late = me(0, began=1000.0 + LONG_BEFORE_S + 1)
    assert (choose_attempt(near, [remote]), choose_attempt(late, [remote])) == (0, 1)


def test_a_sibling_that_died_in_our_own_start_does_not_end_it() -> None:
    # It enrolled after this process began, so it is of the same start.
    sibling = session(1, launch="torchelastic:x", started=1002.0)
    assert choose_attempt(me(0, launch="torchelastic:x"), [sibling], {sibling.session}) == 0


def test_ranks_run_one_after_the_other_by_one_parent_are_one_attempt() -> None:
    first = session(1, launch="parent:a:1:2:3", started=900.0)
    assert choose_attempt(me(0, launch="parent:a:1:2:3"), [first], {first.session}) == 0


@pytest.mark.parametrize(
    ("newcomer", "found", "resume", "expected"),
    [
        pytest.param(me(), [], False, True, id="nobody-there"),
        pytest.param(me(), [session(0)], False, False, id="second-run-by-hand"),
        pytest.param(me(), [session(0)], True, True, id="resume"),
        pytest.param(me(1), [session(0)], False, True, id="other-rank-nothing-known"),
        pytest.param(me(1, world_size=4), [session(0)], False, False, id="other-rank-other-world"),
        pytest.param(
            me(0, launch="parent:a:1:2:3"),
            [session(0, launch="parent:a:1:2:3")],
            False,
            False,
            id="twice-from-one-shell",
        ),
        pytest.param(
            me(0, launch="parent:a:1:2:3"),
            [session(r, launch="parent:a:1:2:3") for r in (0, 1)],
            False,
            False,
            id="both-ranks-twice-from-one-shell",
        ),
        pytest.param(
            me(1, launch="slurm:8.0"),
            [session(0, launch="slurm:7.0")],
            False,
            False,
            id="another-job",
        ),
        pytest.param(
            me(1, launch="slurm:8.0"),
            [session(0, launch="parent:a:1:2:3")],
            False,
            False,
            id="a-job-after-a-run-by-hand",
        ),
        pytest.param(
            me(0), [session(0), session(1, 1)], False, False, id="others-resumed-and-this-did-not"
        ),
        pytest.param(
            me(1, launch="slurm:7.0", host="b"),
            [session(0, launch="slurm:7.0")],
            False,
            True,
            id="same-job",
        ),
        pytest.param(
            me(0, launch="slurm:7."),
            [session(0, launch="slurm:7.")],
            False,
            False,
            id="twice-in-one-batch-script",
        ),
        pytest.param(
            me(0, launch="slurm:7.1", restart=1000),
            [session(0, launch="slurm:7.0")],
            False,
            True,
            id="requeued",
        ),
        pytest.param(
            me(0, launch="torchelastic:x", restart=1),
            [session(0, launch="torchelastic:x")],
            False,
            True,
            id="elastic-restart",
        ),
        pytest.param(
            me(0, launch="torchelastic:x", world_size=3),
            [session(0, launch="torchelastic:x")],
            False,
            True,
            id="membership-change",
        ),
        pytest.param(
            me(0, launch="agent:a:1:2:3", restart=1),
            [session(0, launch="agent:a:1:2:3")],
            False,
            True,
            id="restart-by-an-agent-without-id",
        ),
        pytest.param(
            me(0, launch="torchelastic:y", restart=1),
            [session(0, launch="torchelastic:x")],
            False,
            False,
            id="restart-of-another-launch",
        ),
        pytest.param(me(0, restart=1), [session(0)], False, True, id="restart-said-explicitly"),
        pytest.param(
            me(0, launch="given:x", pid=100),
            [session(0, launch="given:x", pid=100)],
            False,
            False,
            id="second-hook-of-one-process",
        ),
    ],
)
def test_may_join(
    newcomer: StartingRank, found: list[Session], resume: bool, expected: bool
) -> None:
    assert may_join(newcomer, found, resume=resume) is expected


def test_nobody_joins_an_attempt_whose_ranks_here_are_dead() -> None:
    assert not may_join(me(1), [session(0)], {"0-0"})
