"""A view that was packed is the same view: whole or in parts, at once or bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smdist.coordination.columnar import chunks as sealed
from smdist.coordination.columnar.chunks import Chunk, ChunkRef, ChunkSet
from smdist.coordination.columnar.drop_log import TextTable
from smdist.coordination.columnar.step_rows import (
    StepRun,
    compress_rows,
    expand_runs,
    summarize_step,
)
from smdist.coordination.snapshot import pack as snapshot
from smdist.coordination.snapshot.head import AttemptRow, SnapshotHead, rank_row
from smdist.coordination.snapshot.pack import PackedSnapshot, compact_view, load_view, pack
from smdist.coordination.view.membership import (
    Disagreement,
    StepFacts,
    all_step_facts,
    expected_ranks,
)
from smdist.coordination.view.run_view import (
    Fact,
    RankView,
    StepKey,
    View,
    add,
    merge,
    view_of_facts,
)
from smdist.errors import CorruptObject
from smdist.format.intervals import Members, to_intervals
from smdist.format.manifest import Dropped, RankManifest, StepEntry, segment_key
from smdist.identity import ModeKeys
from smdist.limits import MAX_STEPS
from smdist.storage import MemoryStore
from smdist.storage import loop_thread as sync
from tests.support.view_facts import facts, many_steps


@pytest.fixture(scope="module", autouse=True)
def _few_drops_in_a_head() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "_MOST_DROPS", 1)
        yield


small_chunks = settings(
    max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of few steps, so that a few steps make several."""
    monkeypatch.setattr(sealed, "_LEAST_STEPS", 2)
    monkeypatch.setattr(sealed, "_MOST_STEPS", 4)


def put(store: MemoryStore, packed: PackedSnapshot) -> None:
    for key, data in packed.objects:
        assert key not in store.objects
        sync.run(store.put(key, [data]))
    assert packed.head_key not in store.objects
    sync.run(store.put(packed.head_key, [packed.head]))


def packed_of(
    view: View, previous: PackedSnapshot | None = None, number: int = 1
) -> PackedSnapshot:
    return pack(
        view,
        previous,
        run_id="run",
        epoch=1,
        number=number,
        writer="w",
        now=10.0,
        interval_s=2.0,
        final=False,
        layouts={},
    )


def loaded(store: MemoryStore, packed: PackedSnapshot) -> View:
    return sync.run(load_view(store, packed.pointer)).view


def sealed_view(some: list[Fact]) -> View:
    return packed_of(view_of_facts(some)).view


@given(facts)
def test_what_was_packed_is_loaded_as_it_was(some: list[Fact]) -> None:
    view = view_of_facts(some)
    before = view.canonical()
    packed = packed_of(view)
    store = MemoryStore()
    put(store, packed)
    assert view.canonical() == packed.view.canonical() == before
    assert loaded(store, packed).canonical() == before


@small_chunks
@given(many_steps, many_steps, many_steps)
def test_bit_by_bit_and_after_restarts_is_at_once(
    tiny: None, a: list[Fact], b: list[Fact], c: list[Fact]
) -> None:
    store = MemoryStore()
    view, previous = View(), None
    for number, bit in enumerate([a, b, c, c]):
        for fact in bit:
            add(view, fact)
        previous = packed_of(view, previous, number)
        put(store, previous)
        assert all(key in store.objects for key in previous.chunks)
        view = previous.view if number != 1 else loaded(store, previous)
    expected = view_of_facts([*a, *b, *c]).canonical()
    assert view.canonical() == expected
    assert previous is not None
    assert loaded(store, previous).canonical() == expected


@given(facts, facts)
def test_the_laws_hold_for_sealed_steps(some: list[Fact], others: list[Fact]) -> None:
    a, b = sealed_view(some), sealed_view(others)
    whole = view_of_facts([*some, *others]).canonical()
    before = a.canonical(), b.canonical()
    assert merge(a, b).canonical() == merge(b, a).canonical() == whole
    assert (
        merge(a, view_of_facts(others)).canonical()
        == merge(view_of_facts(some), b).canonical()
        == whole
    )
    assert merge(a, a).canonical() == a.canonical()
    assert packed_of(merge(a, b)).view.canonical() == whole
    assert (a.canonical(), b.canonical()) == before


@given(facts, facts, facts)
def test_grouping_does_not_matter_for_sealed_steps(
    a: list[Fact], b: list[Fact], c: list[Fact]
) -> None:
    va, vb, vc = sealed_view(a), sealed_view(b), sealed_view(c)
    whole = view_of_facts([*a, *b, *c]).canonical()
    assert merge(merge(va, vb), vc).canonical() == whole
    assert merge(va, merge(vb, vc)).canonical() == whole


def by_definition(view: View, attempt: int, key: StepKey, expected: Iterable[int]) -> StepFacts:
    """Rank by rank, as it is said in the documents; of a view without sealed steps."""
    ranks: list[int] = []
    layouts: set[str] = set()
    numbers: dict[int, dict[int, None]] = {}
    dropped: list[int] = []
    whole: set[int] = set()
    due = False
    for rank, known in sorted(view.attempts[attempt].items()):
        blocks, drops = known.steps.get(key, ()), known.drops.get(key)
        closings = [entry.planned for entry in blocks if entry.closed]
        if blocks:
            ranks.append(rank)
            numbers.setdefault(blocks[0].step, {})[rank] = None
            layouts |= {entry.layout for entry in blocks if entry.layout}
            due = due or not closings or any(closings)
        if drops:
            numbers.setdefault(min(drop.step for _, _, drop in drops), {})[rank] = None
            due = True
            dropped.append(rank)
        elif closings:
            whole.add(rank)
    step = next(iter(numbers))
    lost = {
        rank
        for rank, known in view.attempts[attempt].items()
        if (known.head is not None and known.head.state == "lost")
        and known.passed.get(ModeKeys.GLOBAL.value, -1) < step
        and known.passed.get(key[0], -1) < key[1]
    }
    differ = Disagreement(attempt, *key, {n: tuple(of) for n, of in numbers.items()})
    return StepFacts(
        key,
        attempt,
        step,
        Members(to_intervals(ranks)),
        Members(to_intervals(r for r in expected if r not in whole and (due or r in lost))),
        frozenset(layouts),
        differ if len(numbers) > 1 else None,
        tuple(dropped),
        due,
    )


@given(facts, facts)
def test_sealed_steps_are_judged_like_others(some: list[Fact], late: list[Fact]) -> None:
    plain = view_of_facts([*some, *late])
    overlaid = sealed_view(some)
    for fact in late:
        add(overlaid, fact)
    again = packed_of(overlaid).view
    for attempt in plain.attempts:
        ranks = expected_ranks(plain, attempt)
        expected = all_step_facts(plain, attempt, ranks)
        for key, judged in expected.items():
            assert judged == by_definition(plain, attempt, key, ranks)
        assert all_step_facts(overlaid, attempt, ranks) == expected
        assert all_step_facts(again, attempt, ranks) == expected
        assert set(expected) >= plain.keys(attempt) == again.keys(attempt)


@given(many_steps)
def test_rows_of_columns_are_those_of_their_blocks(some: list[Fact]) -> None:
    for of_attempt in sealed_view(some).sealed.values():
        for chunk in of_attempt.chunks:
            columns = chunk.columns
            rows = [summarize_step(n, columns.step(n)) for n in columns.mode_steps.tolist()]
            assert columns.rows() == rows == list(expand_runs(compress_rows(rows)))
            for row in rows:
                for rank, blocks in columns.step(row.mode_step).items():
                    assert columns.blocks(row.mode_step, rank) == blocks


def manifest(rank: int, step: int, seq: int | None = None) -> RankManifest:
    number = step if seq is None else seq
    key = segment_key(f"worker_{rank}", 0, number, f"{rank:04x}")
    entry = StepEntry(1, step, step, step * 3, True, "l", key, 512, 1.0 * step, step + 0.5)
    name = f"0.{rank}"
    return RankManifest(
        name, rank, 8, 0, "all", number, step, step + 1, "active", 1.0 + step, (entry,)
    )


def contents(packed: PackedSnapshot) -> list[tuple[str, int, object]]:
    """Of all chunks: what their keys say besides who wrote them, the digest of the bytes among it."""
    return [
        (chunk.ref.key.partition("-w-")[2], chunk.ref.nbytes, chunk.ref.runs)
        for _, whole in sorted(packed.view.sealed.items())
        for chunk in whole.chunks
    ]


@given(many_steps, st.data())
@pytest.mark.slow
def test_a_chunk_depends_on_what_is_in_it_alone(
    some: list[RankManifest], data: st.DataObject
) -> None:
    """Whatever order it came in, at once or bit by bit."""
    expected = contents(packed_of(view_of_facts(some)))
    order = data.draw(st.permutations(some))
    view, previous = View(), None
    for number, fact in enumerate(order):
        add(view, fact)
        if data.draw(st.booleans()):
            view = (previous := packed_of(view, previous, number)).view
    assert contents(packed_of(view, previous, len(order))) == expected


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_live_run_has_the_chunks_of_a_fresh_merge(tiny: None, behind: int) -> None:
    """Rank 2 ends early, so that later chunks have no column for it."""
    view, previous, seen = View(), None, []
    for now in range(14 + behind):
        for rank in (3, 0, 2, 1):
            step = now - behind * (rank % 2)
            if 0 <= step < (5 if rank == 2 else 14):
                seen.append(manifest(rank, step))
                add(view, seen[-1])
        previous = packed_of(view, previous, now)
        view = previous.view
    assert previous is not None
    assert contents(previous) == contents(packed_of(view_of_facts(seen)))
    assert len(previous.chunks) == 4


def test_only_the_chunks_that_change_are_written_again(tiny: None) -> None:
    view, previous = View(), None
    for step in range(20):
        for rank in range(8):
            if (rank, step) != (5, 3):
                add(view, manifest(rank, step))
        packed = packed_of(view, previous, step)
        assert len(packed.objects) == 1
        assert len(packed.replaced) == (step % 4 != 0)
        view, previous = packed.view, packed
    assert previous is not None
    assert len(previous.chunks) == 5
    add(view, manifest(5, 3, seq=99))
    late = packed_of(view, previous, 21)
    assert (len(late.objects), len(late.chunks), len(late.replaced)) == (1, 5, 1)
    assert len(packed_of(late.view, late, 22).objects) == 0
    for key in sorted(late.view.keys(0)):
        assert list(late.view.step(0, key)) == list(range(8))
    assert all(not known.steps for _, _, known in late.view.ranks())


def test_a_head_of_regular_steps_does_not_grow_with_them() -> None:
    sizes = []
    for steps in (10, 1000):
        view = view_of_facts(manifest(rank, step) for rank in range(4) for step in range(steps))
        sizes.append(len(packed_of(view).head))
    assert sizes[1] < sizes[0] + 200


def test_what_was_never_put_is_packed_again() -> None:
    view = view_of_facts(manifest(rank, 0) for rank in range(3))
    lost = packed_of(view)
    again = packed_of(lost.view, None, 2)
    assert dict(again.objects) == dict(lost.objects)


@pytest.mark.parametrize("at", [0, 100, -1])
def test_a_damaged_chunk_is_refused(at: int) -> None:
    store = MemoryStore()
    packed = packed_of(view_of_facts([manifest(0, 0), manifest(1, 0)]))
    put(store, packed)
    (key,) = packed.chunks
    data = bytearray(store.objects[key])
    data[at] ^= 0x5A
    store.objects[key] = bytes(data)
    with pytest.raises(CorruptObject, match="steps"):
        loaded(store, packed)


def test_a_head_that_is_none_is_refused() -> None:
    store = MemoryStore()
    packed = packed_of(view_of_facts([manifest(0, 0)]))
    store.objects[packed.head_key] = b"{}"
    with pytest.raises(CorruptObject, match="heads"):
        loaded(store, packed)


def test_chunks_open_with_the_official_reader() -> None:
    from safetensors.numpy import load

    view = view_of_facts(manifest(rank, step) for rank in range(3) for step in range(5))
    ((_, data),) = packed_of(view).objects
    arrays = load(bytes(data))
    assert arrays["ranks"].tolist() == [0, 1, 2]
    assert arrays["mode_steps"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["cells.time"].shape == (5, 3)


def test_drops_are_written_once_and_a_head_of_many_stays_small() -> None:
    names = tuple(f"layer.{i}.weight" for i in range(20))
    view, previous, sizes = View(), None, []
    for step in range(50):
        for rank in range(8):
            drop = Dropped(1, step, step, names, 4, "buffer full")
            more = msgspec.structs.replace(manifest(rank, step), dropped=(drop,))
            add(view, more)
        packed = packed_of(view, previous, step)
        assert [key.split("/")[1] for key, _ in packed.objects] == ["drops", "steps"]
        view, previous = packed.view, packed
        sizes.append(len(packed.head))
    assert max(sizes) - sizes[0] < 50 * 150
    assert not any(known.drops for _, _, known in view.ranks())
    assert len(view.drops(0, 3)) == 50
    assert all_step_facts(view, 0, expected_ranks(view, 0))[1, 7].dropped == tuple(range(8))


@small_chunks
@given(many_steps, many_steps, many_steps)
@pytest.mark.slow
def test_what_was_compacted_is_put_with_the_next_snapshot(
    tiny: None, a: list[Fact], b: list[Fact], c: list[Fact]
) -> None:
    store = MemoryStore()
    first = packed_of(view_of_facts(a), None, 1)
    put(store, first)
    view = first.view
    for number, bit in enumerate([b, c]):
        for fact in bit:
            add(view, fact)
        view = compact_view(view, epoch=1, number=2 + number, writer="w")
        assert not any(known.steps for _, _, known in view.ranks())
    packed = packed_of(view, first, 9)
    put(store, packed)
    assert loaded(store, packed).canonical() == view_of_facts([*a, *b, *c]).canonical()


def test_a_snapshot_with_more_steps_than_are_read_is_refused() -> None:
    run = StepRun(0, 1, 0, 1, MAX_STEPS // 2 + 1, ((0, 1),), ())
    refs = tuple(
        ChunkRef(
            f"merged/steps/{i}", 1, 1, (msgspec.structs.replace(run, mode_step=i * MAX_STEPS),)
        )
        for i in range(2)
    )
    row = rank_row(0, RankView(), TextTable())
    head = SnapshotHead("r", 1, 1, "w", 0.0, 1.0, True, (AttemptRow(0, (row,), refs),), (), {}, ())
    with pytest.raises(ValueError, match=str(MAX_STEPS)):
        head.check()


def test_runs_of_steps_are_found_by_number_without_their_rows() -> None:
    runs = (StepRun(0, 5, 0, 10, 3, ((0, 2),), ("a",)), StepRun(20, 0, 7, 0, 1, ((0, 1),), ()))
    chunk = Chunk(0, ChunkRef("merged/steps/x", 1, 1, runs), None)
    assert {n: chunk.row(n) for n in range(25) if chunk.row(n) is not None} == chunk.rows
    assert list(ChunkSet([chunk]).keys()) == [(1, n) for n in chunk.rows]
