"""One view of all ranks, folded from what each rank committed.

A `View` is a join of facts: rank manifests, sessions, heartbeats. `merge` is commutative,
associative and idempotent, so whoever folds the same facts, in whatever order, grouping or
repetition, gets the same view (`canonical()` gives equal bytes). Nothing here reads a clock or a
store.

Facts of one key never differ in a healthy run. When they do (an object was replaced between two
reads), the greater one wins in an order that only looks at the facts, which keeps the laws.

Steps lie in two places: `RankView.steps` holds those that were folded of late, `View.sealed` older
ones in columns (`smdist.coordination.columnar.chunks`), and a step may have blocks in both. So do drops, in
`RankView.drops` and `View.drop_logs`. So ask the view: `blocks`, `step`, `keys`, `drops`.

`merge` copies what it changes and shares the rest. `add` folds into a view that the caller made and
has not merged or handed out yet, at a cost that depends on the new fact alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Union

import msgspec

from smdist.coordination.columnar.blocks import (
    Blocks,
    StepKey,
    join_blocks,
    step_number,
    with_entry,
)
from smdist.coordination.columnar.chunks import NO_CHUNKS, ChunkSet
from smdist.coordination.columnar.drop_log import NO_DROPS, Drop, DropLog
from smdist.format.intervals import (
    Intervals,
    Members,
    add_interval,
    add_member,
    find_gaps,
    merge_intervals,
    subtract,
)
from smdist.format.manifest import (
    Heartbeat,
    RankManifest,
    RankState,
    Session,
    StepEntry,
    expected_ranks,
)
from smdist.identity import ModeKeys
from smdist.limits import IncludeWorkers, Number, Time, WorldSize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "Fact",
    "RankHead",
    "RankView",
    "StepKey",
    "UnreadableManifest",
    "View",
    "World",
    "add",
    "merge",
    "view_of_facts",
]


class UnreadableManifest(NamedTuple):
    """A manifest that was there, by its place or its successors, and cannot be read."""

    attempt: int
    rank: int
    seq: int


Fact = Union[RankManifest, Session, Heartbeat, UnreadableManifest]  # noqa: UP007 (3.10)

_GLOBAL = ModeKeys.GLOBAL.value
_STATES: dict[str, int] = {"active": 0, "lost": 1, "ended": 2}


class World(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says about its attempt."""

    world_size: WorldSize
    include_workers: IncludeWorkers | tuple[Number, ...]

    def expected_ranks(self) -> Intervals:
        return expected_ranks(self.world_size, self.include_workers)


class RankHead(msgspec.Struct, frozen=True, array_like=True):
    """How a rank stood as of its manifest of the highest `seq`."""

    seq: Number
    upto: Number
    state: RankState
    time: Time
    reason: str


def _bytes(fact: object) -> bytes:
    return msgspec.msgpack.encode(fact)


def _head_order(head: RankHead) -> tuple[int, int, int, float, str]:
    return (head.seq, head.upto, _STATES[head.state], head.time, head.reason)


def _greater_head(a: RankHead | None, b: RankHead | None) -> RankHead | None:
    if a is None or b is None:
        return a or b
    return b if _head_order(b) > _head_order(a) else a


def _greater_session(a: Session | None, b: Session | None) -> Session | None:
    if a is None or b is None or a == b:
        return a or b
    return max(a, b, key=lambda session: (session.started, _bytes(session)))


def _greater_heartbeat(a: Heartbeat | None, b: Heartbeat | None) -> Heartbeat | None:
    if a is None or b is None or a == b:
        return a or b
    return max(a, b, key=lambda beat: (beat.time, _bytes(beat)))


def _least(a: tuple[int, float] | None, b: tuple[int, float] | None) -> tuple[int, float] | None:
    return min(a, b) if a is not None and b is not None else a or b


@dataclass(slots=True)
class RankView:
    """All that is known of one rank in one attempt, but for its sealed steps and drops.

    `passed` holds, for each mode, the greatest mode step that the rank has closed, and under
    GLOBAL the greatest global step. `drops` and `troubles` are keyed by manifest and place in it,
    so a repeated manifest repeats nothing. `seen` are the numbers of its manifests that were folded,
    `records` the journal records that these cover, `unreadable` are numbers of manifests that are known to have
    been there and cannot be read. `first` is the least global step that it has closed, and when.
    """

    session: Session | None = None
    heartbeat: Heartbeat | None = None
    head: RankHead | None = None
    worlds: frozenset[World] = frozenset()
    steps: dict[StepKey, Blocks] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)
    closed_at: float = 0.0
    drops: dict[StepKey, frozenset[Drop]] = field(default_factory=dict)
    troubles: frozenset[tuple[int, int, str]] = frozenset()
    seen: Intervals = ()
    first: tuple[int, float] | None = None
    records: Intervals = ()
    unreadable: Intervals = ()

    @property
    def missing_manifests(self) -> Members:
        """Return the numbers of manifests that are missing or damaged."""
        return Members(
            subtract(merge_intervals((*find_gaps(self.seen), *self.unreadable)), self.seen)
        )

    def copy(self) -> RankView:
        return RankView(
            self.session,
            self.heartbeat,
            self.head,
            self.worlds,
            dict(self.steps),
            dict(self.passed),
            self.closed_at,
            dict(self.drops),
            self.troubles,
            self.seen,
            self.first,
            self.records,
            self.unreadable,
        )

    def without_steps(self) -> RankView:
        """Return a copy without the recent steps, after these were put into chunks."""
        bare = self.copy()
        bare.steps = {}
        return bare

    def _insert(self, entry: StepEntry) -> None:
        key = (entry.mode, entry.mode_step)
        self.steps[key] = with_entry(self.steps.get(key, ()), entry)
        if entry.closed:
            passed = self.passed
            passed[entry.mode] = max(passed.get(entry.mode, -1), step_number(entry))
            passed[_GLOBAL] = max(passed.get(_GLOBAL, -1), entry.step)
            self.closed_at = max(self.closed_at, entry.time)
            self.first = _least(self.first, (entry.step, entry.time))

    def _add_manifest(self, manifest: RankManifest) -> None:
        seq = manifest.seq
        self.seen = add_member(self.seen, seq)
        self.records = add_interval(self.records, manifest.first, manifest.upto)
        self.head = _greater_head(
            self.head, RankHead(seq, manifest.upto, manifest.state, manifest.time, manifest.reason)
        )
        self.worlds |= {World(manifest.world_size, manifest.include_workers)}
        for entry in manifest.steps:
            self._insert(entry)
        for place, drop in enumerate(manifest.dropped):
            key = (drop.mode, drop.mode_step)
            self.drops[key] = self.drops.get(key, frozenset()) | {(seq, place, drop)}
        if manifest.troubles:
            self.troubles |= {(seq, place, text) for place, text in enumerate(manifest.troubles)}

    def _join(self, other: RankView) -> None:
        self.session = _greater_session(self.session, other.session)
        self.heartbeat = _greater_heartbeat(self.heartbeat, other.heartbeat)
        self.head = _greater_head(self.head, other.head)
        self.seen = merge_intervals((*self.seen, *other.seen))
        self.records = merge_intervals((*self.records, *other.records))
        self.unreadable = merge_intervals((*self.unreadable, *other.unreadable))
        self.worlds |= other.worlds
        for blocks in other.steps.values():
            for entry in blocks:
                self._insert(entry)
        # Beyond what the entries say: an entry that lost against a greater one still counted.
        for mode, number in other.passed.items():
            self.passed[mode] = max(self.passed.get(mode, -1), number)
        self.closed_at = max(self.closed_at, other.closed_at)
        self.first = _least(self.first, other.first)
        for key, drops in other.drops.items():
            self.drops[key] = self.drops.get(key, frozenset()) | drops
        self.troubles |= other.troubles

    def _canonical(
        self, steps: Iterable[Blocks], drops: Mapping[StepKey, frozenset[Drop]]
    ) -> object:
        return (
            self.session,
            self.heartbeat,
            self.head,
            sorted(map(_bytes, self.worlds)),
            list(steps),
            sorted(self.passed.items()),
            self.closed_at,
            [(key, sorted(map(_bytes, some))) for key, some in sorted(drops.items())],
            sorted(self.troubles),
            self.seen,
            self.first,
            self.records,
        )


@dataclass(slots=True)
class View:
    """Attempt -> rank -> what is known of it. Treat it as a value unless you made it."""

    attempts: dict[int, dict[int, RankView]] = field(default_factory=dict)
    sealed: dict[int, ChunkSet] = field(default_factory=dict)
    drop_logs: dict[int, DropLog] = field(default_factory=dict)

    @staticmethod
    def of(*facts: Fact) -> View:
        return view_of_facts(facts)

    def rank(self, attempt: int, rank: int) -> RankView | None:
        return self.attempts.get(attempt, {}).get(rank)

    def session(self, attempt: int, rank: int) -> str:
        """Return the id of the session that wrote what there is; "" if it is not known."""
        known = self.rank(attempt, rank)
        return known.session.session if known is not None and known.session is not None else ""

    def ranks(self) -> Iterator[tuple[int, int, RankView]]:
        for attempt, ranks in sorted(self.attempts.items()):
            for rank, known in sorted(ranks.items()):
                yield attempt, rank, known

    def blocks(self, attempt: int, rank: int, key: StepKey) -> Blocks:
        """Return what `rank` has of the step `key`, in order of time."""
        known = self.rank(attempt, rank)
        recent = known.steps.get(key, ()) if known is not None else ()
        return join_blocks(self.sealed.get(attempt, NO_CHUNKS).blocks(key, rank), recent)

    def step(self, attempt: int, key: StepKey) -> dict[int, Blocks]:
        """Return, by rank, what each rank has of the step `key`."""
        found = self.sealed.get(attempt, NO_CHUNKS).step(key)
        for rank, known in self.attempts.get(attempt, {}).items():
            if key in known.steps:
                found[rank] = join_blocks(found.get(rank, ()), known.steps[key])
        return found

    def entries(self, attempt: int, rank: int) -> Iterator[StepEntry]:
        """Yield all entries of `rank`, in no order; recent ones that are in columns come twice."""
        known = self.rank(attempt, rank)
        for blocks in () if known is None else known.steps.values():
            yield from blocks
        for blocks in self.sealed.get(attempt, NO_CHUNKS).of_rank(rank):
            yield from blocks

    def keys(self, attempt: int) -> set[StepKey]:
        """Return the steps of which any rank has stored something."""
        recent = (known.steps for known in self.attempts.get(attempt, {}).values())
        return set(self.sealed.get(attempt, NO_CHUNKS).keys()).union(*recent)

    def drops(self, attempt: int, rank: int) -> dict[StepKey, frozenset[Drop]]:
        """Return what `rank` has dropped, by step."""
        known = self.rank(attempt, rank)
        found = dict(known.drops) if known is not None else {}
        for drop in self.drop_logs.get(attempt, NO_DROPS).of_rank(rank):
            key = (drop[2].mode, drop[2].mode_step)
            found[key] = found.get(key, frozenset()) | {drop}
        return found

    def canonical(self) -> bytes:
        """Return bytes that are equal for equal views, in whatever order facts were added."""
        return _bytes(
            [
                (
                    attempt,
                    rank,
                    known._canonical(self._steps(attempt, rank, known), self.drops(attempt, rank)),
                )
                for attempt, rank, known in self.ranks()
            ]
        )

    def _steps(self, attempt: int, rank: int, known: RankView) -> list[Blocks]:
        steps = dict(known.steps)
        for blocks in self.sealed.get(attempt, NO_CHUNKS).of_rank(rank):
            key = (blocks[0].mode, blocks[0].mode_step)
            steps[key] = join_blocks(blocks, steps.get(key, ()))
        return [blocks for _, blocks in sorted(steps.items())]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.canonical() == other.canonical()

    __hash__ = None  # type: ignore[assignment]


def add(view: View, fact: Fact) -> View:
    """Fold `fact` into `view` in place, for the view's owner; costs O(fact)."""
    known = view.attempts.setdefault(fact.attempt, {}).setdefault(fact.rank, RankView())
    if isinstance(fact, RankManifest):
        known._add_manifest(fact)
    elif isinstance(fact, Session):
        known.session = _greater_session(known.session, fact)
        known.worlds |= {World(fact.world_size, fact.include_workers)}
    elif isinstance(fact, UnreadableManifest):
        known.unreadable = add_member(known.unreadable, fact.seq)
    else:
        known.heartbeat = _greater_heartbeat(known.heartbeat, fact)
    return view


def view_of_facts(facts: Iterable[Fact]) -> View:
    view = View()
    for fact in facts:
        add(view, fact)
    return view


def merge(a: View, b: View) -> View:
    """Return a view of all facts of `a` and `b`; neither changes."""
    attempts = {attempt: dict(ranks) for attempt, ranks in a.attempts.items()}
    for attempt, ranks in b.attempts.items():
        mine = attempts.setdefault(attempt, {})
        for rank, known in ranks.items():
            old = mine.get(rank)
            if old is None:
                mine[rank] = known
            elif old is not known:
                mine[rank] = both = old.copy()
                both._join(known)
    logs = {
        attempt: DropLog(
            (
                *a.drop_logs.get(attempt, NO_DROPS).batches,
                *b.drop_logs.get(attempt, NO_DROPS).batches,
            )
        )
        for attempt in a.drop_logs.keys() | b.drop_logs.keys()
    }
    merged = View(attempts, {**b.sealed, **a.sealed}, logs)
    for attempt in a.sealed.keys() & b.sealed.keys():
        _join_sealed(merged, attempt, a.sealed[attempt], b.sealed[attempt])
    return merged


def _join_sealed(view: View, attempt: int, a: ChunkSet, b: ChunkSet) -> None:
    """Keep the chunks of one; what the other has in other chunks becomes recent again.

    Views that were packed one from the other share nearly all chunks; others are seldom merged.
    """
    ours, theirs = a.without(b), b.without(a)
    if sum(chunk.steps for chunk in ours) < sum(chunk.steps for chunk in theirs):
        a, ours, theirs = b, theirs, ours
    view.sealed[attempt] = a
    ranks = view.attempts[attempt]
    for chunk in theirs:
        for rank in chunk.columns.ranks.tolist():
            ranks[rank] = known = ranks[rank].copy()
            for blocks in chunk.columns.of_rank(rank):
                for entry in blocks:
                    known._insert(entry)
