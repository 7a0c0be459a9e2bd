"""A rank that runs is read by spans: few requests, the same answers, and nobody needs them."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdist.coordination.service.merge_once import merge_once
from smdist.coordination.service.poll_schedule import PollIntervals
from smdist.coordination.service.store_poller import StorePoller
from smdist.coordination.view.run_view import Fact, View, view_of_facts
from smdist.errors import StoreError
from smdist.format.manifest import (
    RankManifest,
    RankSpan,
    RankSummary,
    Session,
    manifest_key,
    span_key,
    summary_key,
)
from smdist.format.stored_json import decode, encode
from smdist.identity import ModeKeys
from smdist.storage import Buffer, MemoryStore
from smdist.storage import loop_thread as sync
from smdist.trials.run_loader import RunLoader, RunUpdate
from smdist.workers.upload import summaries as module
from smdist.workers.upload.manifest_spans import Rolling, take_back
from smdist.workers.upload.summaries import Summary
from tests.support.run_builder import RunBuilder
from tests.support.spans import Roller, without_spans
from tests.unit.smdist.trials.test_trial_reader import CountingStore
from tests.unit.smdist.trials.test_trial_snapshot import open_trial
from tests.unit.workers.upload.test_summary import Counting

TRAIN = ModeKeys.TRAIN
MANY = 300  # manifests: spans of 256, 2 x 16, and 12 by themselves


def build(
    store: MemoryStore, manifests: int = MANY, *, ranks: int = 1, attach_bytes: int = 0
) -> RunBuilder:
    """Ranks that have run for a while, every step flushed by itself, and go on."""
    run = RunBuilder(store)
    run.now -= 10 * manifests
    for rank in range(ranks):
        writer = run.rank(rank, ranks)
        writer.attach_bytes = attach_bytes
        roller = Roller(writer)
        for step in range(manifests):
            writer.now += 1
            value = [step] if attach_bytes else [rank, step]
            writer.step(TRAIN, step, {"x": np.array(value, np.float32)})
            if step % 7 == 3:
                writer.drop(TRAIN, step, "y").trouble(f"something {step}")
            writer.flush()
        roller.roll()
    return run


@pytest.fixture(scope="module")
def built() -> MemoryStore:
    store = MemoryStore()
    build(store)
    return store


def copy(store: MemoryStore) -> Counting:
    made = Counting()
    made.objects = dict(store.objects)
    return made


def poll(store: MemoryStore) -> RunUpdate:
    return sync.run(RunLoader(store).poll())


def same(found: RunUpdate, plain: RunUpdate) -> None:
    assert found.facts == plain.facts
    assert found.layouts.keys() == plain.layouts.keys()
    assert found.attached == plain.attached
    assert found.troubles == plain.troubles


def key(first: int, upto: int) -> str:
    return span_key("worker_0", 0, first, upto)


# -- reading ---------------------------------------------------------------------------------------


def test_a_live_rank_is_opened_with_few_requests() -> None:
    store = Counting()
    build(store, ranks=3)
    store.asked.clear()
    found = poll(store)
    assert store.asked["get spans"] == 3 * (1 + 2)
    assert store.asked["get manifests"] == 3 * 12
    assert store.asked["list manifests"] == 1
    assert store.asked["list spans"] == 0, "their names follow from the manifests"
    same(found, poll(without_spans(store)))
    assert [len(known.steps) for _, _, known in found.facts.ranks()] == [MANY] * 3


def test_refreshing_costs_what_is_new() -> None:
    store = Counting()
    run = build(store)
    loader = RunLoader(store)
    sync.run(loader.poll())
    writer = run.rank(0)
    writer.seq = MANY
    for step in range(3):
        writer.step(TRAIN, MANY + step, {}).flush()
    store.asked.clear()
    loader.confirm()
    assert len(next(iter(sync.run(loader.poll()).facts.ranks()))[2].steps) == 3
    assert (store.asked["get spans"], store.asked["get manifests"]) == (0, 3)


@dataclass
class Harm:
    """To a run, between its writers and its readers."""

    spans: dict[int, str] = field(default_factory=dict)  # by place
    manifests: set[int] = field(default_factory=set)  # removed

    def do(self, store: MemoryStore) -> None:
        keys = sorted(key for key in store.objects if key.startswith("spans/"))
        for place, harm in self.spans.items():
            at = keys[place]
            if at not in store.objects:
                continue
            whole = store.objects[at]
            made = msgspec.json.decode(whole, type=RankSpan).manifests if whole else ()
            if harm == "gone":
                del store.objects[at]
            elif harm == "torn":
                store.objects[at] = whole[: len(whole) // 2]
            elif harm == "empty":
                store.objects[at] = b""
            elif harm == "short":
                store.objects[at] = encode(RankSpan(made[:-1]), at)
            elif harm == "other session":
                other = tuple(msgspec.structs.replace(one, session="x") for one in made)
                store.objects[at] = encode(RankSpan(other), at)
            else:
                other = tuple(msgspec.structs.replace(one, rank=7) for one in made)
                store.objects[at] = encode(RankSpan(other), at)
        for seq in self.manifests:
            del store.objects[manifest_key("worker_0", 0, seq)]


harms = st.builds(
    Harm,
    st.dictionaries(
        st.integers(0, 17),
        st.sampled_from(["gone", "torn", "empty", "short", "other session", "other rank"]),
        max_size=8,
    ),
    st.sets(st.one_of(st.integers(0, MANY - 1), st.integers(0, 3)), max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(harms)
@pytest.mark.slow
def test_a_trial_with_spans_is_the_trial_without(built: MemoryStore, harm: Harm) -> None:
    store = copy(built)
    harm.do(store)
    found = poll(store)
    for key in [key for key in found.troubles if key.startswith("spans/")]:
        del found.troubles[key]
    same(found, poll(without_spans(store)))


@settings(max_examples=40, deadline=None)
@given(harms)
@pytest.mark.slow
def test_who_follows_finds_the_same_with_spans_and_without(built: MemoryStore, harm: Harm) -> None:
    store = copy(built)
    harm.do(store)
    assert followed(store) == followed(without_spans(store))


def followed(store: MemoryStore) -> View:
    facts: list[Fact] = []
    clock = [1e12]  # long after the rank began
    poller = StorePoller(store, facts.append, lambda: clock[0], PollIntervals(interval_s=0.0))
    for _ in range(20 + 10 * 5):  # gaps are skipped after a silence
        sync.run(poller.poll())
        clock[0] += 100
    assert [f.seq for f in facts if isinstance(f, RankManifest)] == sorted(
        int(k[-13:-5]) for k in store.objects if k.startswith("manifests/")
    )
    return view_of_facts(facts)


def test_who_comes_late_to_follow_needs_few_requests(built: MemoryStore) -> None:
    store = copy(built)
    poller = StorePoller(store, lambda _fact: None, lambda: 1e12, PollIntervals(interval_s=0.0))
    found = sync.run(poller.poll())
    assert found.manifests == MANY
    assert store.asked["get spans"] == 3
    assert store.asked["get manifests"] == 12
    assert store.asked["list manifests"] == 1


def test_one_that_fell_behind_catches_up_by_spans(built: MemoryStore) -> None:
    store = copy(built)
    poller = StorePoller(store, lambda _fact: None, lambda: 1e12, PollIntervals(interval_s=0.0))
    hidden = {k: v for k, v in store.objects.items() if k.startswith(("manifests", "spans"))}
    early = {manifest_key("worker_0", 0, seq) for seq in range(20)}
    store.objects = {k: v for k, v in store.objects.items() if k not in hidden or k in early}
    assert sync.run(poller.poll()).manifests == 20
    store.objects.update(hidden)
    store.asked.clear()
    poller.hint("worker_0", 0, MANY - 1)
    assert sync.run(poller.poll()).manifests == MANY - 20
    # 20..31, 240..255 and 288..299 by themselves, 14 and 2 spans of 16: there is none for 240.
    assert store.asked["get manifests"] == 12 + 16 + 12
    assert store.asked["get spans"] == 14 + 2


@pytest.mark.parametrize("spans", [True, False])
@pytest.mark.slow
def test_a_long_backlog_is_read_a_share_at_a_time(spans: bool) -> None:
    store = MemoryStore()
    build(store, 4096 + 256 + 3)
    store = store if spans else without_spans(store)
    counting = copy(store)
    poller = StorePoller(counting, lambda _fact: None, lambda: 1e12, PollIntervals(interval_s=0.0))
    found = [sync.run(poller.poll()).manifests for _ in range(3)]
    assert sum(found) == 4096 + 256 + 3
    assert found[0] == 4096
    if spans:
        assert counting.asked["get spans"] == 2
        assert counting.asked["get manifests"] <= 3 + 3


def test_merging_once_passes_over_manifests_that_are_gone(built: MemoryStore) -> None:
    store = copy(built)
    Harm(manifests={0, 1, 17, 18, 290}).do(store)
    merged = sync.run(merge_once(store))
    assert merged.status.manifests == MANY - 5
    assert any("skipped" in text for text in merged.status.troubles)
    with open_trial(store) as trial:
        assert len(trial.steps(show_incomplete_steps=True)) == MANY - 5


def attached_in(store: MemoryStore, first: int, upto: int) -> list[int]:
    made = msgspec.json.decode(store.objects[key(first, upto)], type=RankSpan)
    return [len(one.attached) for one in made.manifests]


class Growing(MemoryStore):
    """Two more manifests arrive just before they are listed for the second time."""

    def __init__(self, objects: dict[str, bytes], more: dict[str, bytes]) -> None:
        super().__init__()
        self.objects, self._more, self.listed = objects, more, 0

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        self.listed += prefix.startswith("manifests/")
        if self.listed == 2:
            self.objects.update(self._more)
        return await super().list(prefix, after=after)


def test_merging_once_takes_what_comes_meanwhile_for_no_gap(built: MemoryStore) -> None:
    keys = [manifest_key("worker_0", 0, seq) for seq in (MANY - 2, MANY - 1)]
    objects = dict(built.objects)
    store = Growing(objects, {key: objects.pop(key) for key in keys})
    merged = sync.run(merge_once(store))
    assert store.listed >= 2
    assert merged.status.manifests == MANY
    assert merged.status.troubles == ()


def test_numbers_come_with_the_manifests_while_they_are_few() -> None:
    store = MemoryStore()
    build(store, attach_bytes=1 << 20)
    assert all(attached_in(store, 0, 256))
    found = poll(store)
    assert len(found.attached) == MANY
    same(found, poll(without_spans(store)))


def test_many_numbers_are_read_by_the_spans_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    most = 20_000  # the numbers of 16 manifests, and not of 256
    monkeypatch.setattr(module, "_MOST_ATTACHED", most)
    build(store, attach_bytes=1 << 20)
    assert all(attached_in(store, 0, 16))
    assert all(attached_in(store, 224, 240))
    assert sum(attached_in(store, 0, 256)) <= most
    plain = poll(without_spans(store))
    found = poll(store)
    assert found.facts == plain.facts
    assert found.attached.items() < plain.attached.items()
    sync.run(merge_once(store))  # so that none of them are at hand when it is opened
    counting = CountingStore(store)
    with open_trial(counting) as trial:
        counting.gets.clear()
        values = trial.tensor("x").values(show_incomplete_steps=True)
        assert {step: value[0] for step, value in values.items()} == {s: s for s in range(MANY)}
    kinds = Counter(key.partition("/")[0] for key in counting.gets)
    # 18 spans are there, but that of 240 is one of 256; 288..299 have none yet.
    assert (kinds["spans"], kinds["manifests"]) == (19, 16 + 12)


# -- writing ---------------------------------------------------------------------------------------


def manifests(store: MemoryStore, upto: int) -> list[RankManifest]:
    keys = [manifest_key("worker_0", 0, seq) for seq in range(upto)]
    return [msgspec.json.decode(store.objects[key], type=RankManifest) for key in keys]


def spans_of(told: Sequence[RankManifest], summary: Summary) -> list[str]:
    found = []
    for manifest in told:
        summary.note(manifest)
        if made := summary.span(manifest.seq + 1):
            found.append(made.key)
    return found


def summary_of(store: MemoryStore) -> Summary:
    data = store.objects["sessions/worker_0/000000.json"]
    return Summary(msgspec.json.decode(data, type=Session))


def test_a_successor_writes_what_it_knows(built: MemoryStore) -> None:
    told = manifests(built, MANY)
    first, second = summary_of(built), summary_of(built)
    assert spans_of(told[:150], first) == [key(n, n + 16) for n in range(0, 144, 16)]
    assert spans_of(told[150:], second) == [key(n, n + 16) for n in range(160, 288, 16)]


def test_what_was_lost_from_the_store_is_in_no_span(built: MemoryStore) -> None:
    told, summary = manifests(built, MANY), summary_of(built)
    spans_of(told[:37], summary)
    summary.forget()
    assert spans_of(told[37:], summary) == [key(n, n + 16) for n in range(48, 288, 16)]
    sync.run(summary.write(built, MANY))
    assert "summaries/worker_0/000000.json" not in built.objects


def test_one_that_is_too_long_is_written_in_parts(
    built: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, summary = manifests(built, MANY), summary_of(built)
    monkeypatch.setattr(module, "_MOST_SPAN_BYTES", 50_000)
    found = spans_of(told, summary)
    assert found == [key(n, n + 16) for n in range(0, 288, 16)]


def test_what_is_kept_for_them_is_bounded(
    built: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, summary = manifests(built, MANY), summary_of(built)
    monkeypatch.setattr(module, "_MOST_BYTES", 50_000)
    monkeypatch.setattr(module, "_MOST_SPAN_BYTES", 30_000)
    assert spans_of(told, summary) == [key(n, n + 16) for n in range(0, 288, 16)]
    assert summary.too_long
    assert sum(map(len, summary._told.values())) <= 30_000


@settings(max_examples=30, deadline=None)
@given(harms, st.integers(0, MANY))
def test_a_summary_of_what_is_no_longer_kept_is_read_back(
    built: MemoryStore, harm: Harm, begun: int
) -> None:
    """By an uploader that took over at `begun`, with whatever spans there are."""
    store, told, summary = copy(built), manifests(built, MANY), summary_of(built)
    Harm(harm.spans).do(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_SPAN_BYTES", 50_000)
        for manifest in told[begun:]:
            summary.note(manifest)
        sync.run(summary.write(store, MANY))
    made = msgspec.json.decode(store.objects[summary_key("worker_0", 0)], type=RankSummary)
    assert list(made.manifests) == told


def test_reading_back_takes_few_requests(built: MemoryStore) -> None:
    store, summary = copy(built), summary_of(built)
    sync.run(summary.write(store, MANY))
    assert (store.asked["get spans"], store.asked["get manifests"]) == (1 + 2, 12)


def test_numbers_that_are_kept_for_them_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    build(store, 100, attach_bytes=1 << 20)
    told, summary = manifests(store, 100), summary_of(store)
    largest = max(len(one.attached) for one in told)
    monkeypatch.setattr(module, "_MOST_ATTACHED", 4 * largest)
    for manifest in told:
        summary.note(manifest)
        assert sum(summary._carrying.values()) <= (4 + 16) * largest
        kept = msgspec.json.decode(b"[" + b",".join(summary._told.values()) + b"]")
        assert sum(bool(one["attached"]) for one in kept) == len(summary._carrying)


class Slow(MemoryStore):
    """Spans hang, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.tried = error, 0

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        self.tried += 1
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "error", [None, StoreError("memory://", "spans", "put", "no"), RuntimeError("odd")]
)
def test_a_span_that_does_not_get_through_holds_nobody_up(
    built: MemoryStore, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smdist.workers.upload.manifest_spans._CLOSE_S", 0.01)

    async def scenario() -> int:
        said: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: said.append(what))
        store, summary = Slow(error), summary_of(built)
        rolling = Rolling(store, summary)
        for manifest in manifests(built, 64):
            summary.note(manifest)
            rolling.stored(manifest)
            for _ in range(10):  # time for a put that fails at once
                await asyncio.sleep(0)
        await rolling.close()
        del rolling
        gc.collect()
        await asyncio.sleep(0)
        assert said == [], "nobody complains of it"
        return store.tried

    assert asyncio.run(scenario()) == (1 if error is None else 4)


def test_the_last_manifest_gets_a_summary_and_no_span(built: MemoryStore) -> None:
    async def scenario(too_long: bool) -> list[str]:
        store, summary = MemoryStore(), summary_of(built)
        rolling = Rolling(store, summary)
        told = manifests(built, 16)
        if too_long:
            summary.note(told[0])
            summary.forget()
        told[-1] = msgspec.structs.replace(told[-1], state="ended")
        for manifest in told:
            summary.note(manifest)
            rolling.stored(manifest)
        await rolling.close()
        return sorted(store.objects)

    assert asyncio.run(scenario(too_long=False)) == []
    assert asyncio.run(scenario(too_long=True)) == [key(0, 16)]


def said_nothing(store: MemoryStore) -> set[str]:
    spans = {k: v for k, v in store.objects.items() if k.startswith("spans/")}
    return {k for k, v in spans.items() if not decode(v, RankSpan, k).manifests}


def test_spans_beyond_the_last_manifest_are_taken_back(built: MemoryStore) -> None:
    store = copy(built)
    sync.run(take_back(store, "worker_0", 0, 271))
    emptied = said_nothing(store)
    assert emptied == {key(256, 272), key(272, 288)}
    sync.run(take_back(store, "worker_0", 0, 100))
    assert said_nothing(store) == emptied | {
        key(0, 256), *(key(n, n + 16) for n in range(96, 240, 16))
    }  # fmt: skip
