"""Facts for hypothesis: few values for every key, so that facts meet, repeat and contradict."""

from __future__ import annotations

from hypothesis import strategies as st

from smdist.format.manifest import Dropped, Heartbeat, RankManifest, Session, StepEntry, segment_key
from smdist.limits import MAX_NUMBER

small = st.integers(0, 3)
times = st.integers(0, 50).map(float)
includes = st.sampled_from(["one", "all", (0, 2)])
segments = [
    "",
    "s",
    segment_key("worker_0", 0, 1, "a1"),
    segment_key("worker_1", 0, 7, "b2"),
    segment_key("worker_1", 1, 10**9, ""),
    "manifests/worker_0/000000-00000003.json",
    "manifests/worker_2/000001-00000000.json",
]


@st.composite
def entries(draw: st.DrawFn, numbers: st.SearchStrategy[int] = small) -> StepEntry:
    mode_step = draw(numbers)
    return StepEntry(
        mode=draw(st.sampled_from([1, 2, 4])),
        mode_step=mode_step,
        step=mode_step + draw(st.integers(0, 1)),
        block=draw(small),
        closed=draw(st.booleans()),
        layout=draw(st.sampled_from(["", "a", "b"])),
        segment=draw(st.sampled_from(segments)),
        offset=draw(st.sampled_from([0, 8, MAX_NUMBER])),
        began=0.5,
        time=draw(times),
        planned=draw(st.booleans()),
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


def manifests_of(entry: st.SearchStrategy[StepEntry]) -> st.SearchStrategy[RankManifest]:
    return st.builds(
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
        steps=st.lists(entry, max_size=3).map(tuple),
        dropped=st.lists(drops, max_size=2).map(tuple),
        troubles=st.lists(st.sampled_from(["t", "u"]), max_size=2).map(tuple),
        reason=st.sampled_from(["", "killed"]),
    )


manifests = manifests_of(entries())
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
many_steps = st.lists(manifests_of(entries(st.integers(0, 40))), max_size=12)
