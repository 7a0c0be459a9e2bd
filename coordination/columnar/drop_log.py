"""What ranks had to drop, in immutable batches.

Drops only ever become more, so old ones are not rewritten: a batch holds some of all ranks, and a
view of a job that drops much has many. Which steps they are about is known without their content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from smdist.coordination.columnar.blocks import StepKey
from smdist.format.intervals import Intervals, RankIntervals, check_intervals, to_intervals
from smdist.format.manifest import FORMAT, Dropped
from smdist.format.stored_json import encode
from smdist.limits import Bytes, MergedKey, Mode, Number, Rank, Stride, check_progression

__all__ = [
    "NO_DROPS",
    "Drop",
    "DropBatch",
    "DropLog",
    "DropRef",
    "DropRow",
    "DropsByRank",
    "StoredDrops",
    "TextTable",
    "decode_drops",
    "drop_of_row",
    "drop_row",
    "make_batch",
]

Drop = tuple[int, int, Dropped]
"""In which manifest, at which place, what."""

DropsByRank = Mapping[int, tuple[Drop, ...]]
"""By rank."""


class DropRow(msgspec.Struct, frozen=True, array_like=True):
    """`names` and `reason` count in a list of texts, as they are the same again and again."""

    seq: Number
    place: Number
    mode: Mode
    mode_step: Number
    step: Number
    names: Number
    nbytes: Bytes
    reason: Number


class TextTable(dict[tuple[str, ...], int]):
    """A number for each, in order of the first time that it was asked for."""

    def __missing__(self, text: tuple[str, ...]) -> int:
        number = self[text] = len(self)
        return number


def drop_row(drop: Drop, texts: TextTable) -> DropRow:
    seq, place, what = drop
    return DropRow(
        seq,
        place,
        what.mode,
        what.mode_step,
        what.step,
        texts[what.names],
        what.nbytes,
        texts[(what.reason,)],
    )


def check_texts(rows: Iterable[DropRow], texts: Sequence[tuple[str, ...]]) -> None:
    """Raise ValueError if a row refers to a missing text."""
    for row in rows:
        if max(row.names, row.reason) >= len(texts) or len(texts[row.reason]) != 1:
            raise ValueError(f"a drop of step {row.step} has no text {row.names} or {row.reason}")


def drop_of_row(row: DropRow, texts: Sequence[tuple[str, ...]]) -> Drop:
    names, (reason,) = texts[row.names], texts[row.reason]
    what = Dropped(row.mode, row.mode_step, row.step, names, row.nbytes, reason)
    return (row.seq, row.place, what)


class DropRun(msgspec.Struct, frozen=True, array_like=True):
    """`count` steps of which the same ranks dropped something; their numbers grow by the strides."""

    mode: Mode
    mode_step: Number
    mode_stride: Number
    step: Number
    step_stride: Stride
    count: Number
    ranks: RankIntervals

    def check(self) -> None:
        """Raise ValueError if smdist cannot have written this."""
        check_progression(self.mode_step, self.mode_stride, self.count)
        check_progression(self.step, self.step_stride, self.count)
        check_intervals(self.ranks)

    def steps(self) -> Iterator[tuple[StepKey, int]]:
        for i in range(self.count):
            key = (self.mode, self.mode_step + i * self.mode_stride)
            yield key, self.step + i * self.step_stride


class DropRef(msgspec.Struct, frozen=True, array_like=True):
    key: MergedKey
    nbytes: Bytes
    runs: tuple[DropRun, ...]

    def check(self) -> None:
        """Raise ValueError if smdist cannot have written this."""
        for run in self.runs:
            run.check()


class DropBatch:
    def __init__(
        self,
        ref: DropRef,
        content: DropsByRank | None,
        fetch: Callable[[DropBatch], DropsByRank] | None = None,
    ) -> None:
        self.ref = ref
        self._content, self._fetch = content, fetch

    @property
    def stored(self) -> bool:
        """Return whether it was read from a store."""
        return self._fetch is not None

    @property
    def content(self) -> DropsByRank:
        if self._content is not None:
            return self._content
        if self._fetch is None:
            raise LookupError(f"{self.ref.key} was not loaded")
        return self._fetch(self)


class DropLog:
    """The batches of one attempt, in order of key. A drop may be in several: it is one."""

    def __init__(self, batches: Iterable[DropBatch] = ()) -> None:
        by_key = {batch.ref.key: batch for batch in batches}
        self.batches = tuple(by_key[key] for key in sorted(by_key))

    @cached_property
    def steps(self) -> dict[StepKey, list[tuple[int, Intervals]]]:
        """Return, by step, its global numbers and the ranks that dropped some of it."""
        found: dict[StepKey, list[tuple[int, Intervals]]] = {}
        for batch in self.batches:
            for run in batch.ref.runs:
                for key, number in run.steps():
                    found.setdefault(key, []).append((number, run.ranks))
        return found

    def of_rank(self, rank: int) -> Iterator[Drop]:
        for batch in self.batches:
            yield from batch.content.get(rank, ())

    def without(self, other: DropLog) -> list[DropBatch]:
        known = {batch.ref.key for batch in other.batches}
        return [batch for batch in self.batches if batch.ref.key not in known]


NO_DROPS = DropLog()


class StoredDrops(msgspec.Struct, frozen=True):
    attempt: Number
    texts: tuple[tuple[str, ...], ...]
    ranks: tuple[tuple[Rank, tuple[DropRow, ...]], ...]
    format: Number = FORMAT

    def __post_init__(self) -> None:
        for _, rows in self.ranks:
            check_texts(rows, self.texts)


def make_batch(attempt: int, content: DropsByRank, prefix: str) -> tuple[DropBatch, bytes]:
    texts = TextTable()
    content = {
        rank: tuple(sorted(drops, key=msgspec.msgpack.encode))
        for rank, drops in sorted(content.items())
    }
    rows = tuple(
        (rank, tuple(drop_row(drop, texts) for drop in drops)) for rank, drops in content.items()
    )
    stored = StoredDrops(attempt, tuple(texts), rows)
    digest = hashlib.blake2b(msgspec.json.encode(stored), digest_size=8).hexdigest()
    key = f"{prefix}-{attempt:06d}-{digest}.json"
    data = encode(stored, key)
    ref = DropRef(key, len(data), tuple(_runs(content)))
    return DropBatch(ref, content), data


def decode_drops(stored: StoredDrops) -> DropsByRank:
    return {
        rank: tuple(drop_of_row(row, stored.texts) for row in rows) for rank, rows in stored.ranks
    }


def _runs(content: DropsByRank) -> Iterator[DropRun]:
    numbers: dict[StepKey, dict[int, int]] = {}
    for rank, drops in content.items():
        for _, _, what in drops:
            of_step = numbers.setdefault((what.mode, what.mode_step), {})
            of_step[rank] = min(of_step.get(rank, what.step), what.step)
    steps = [
        (mode, mode_step, number, to_intervals(r for r, n in ranks.items() if n == number))
        for (mode, mode_step), ranks in sorted(numbers.items())
        for number in sorted(set(ranks.values()))
    ]
    begin = 0
    while begin < len(steps):
        mode, mode_step, number, ranks = steps[begin]
        end, strides = begin + 1, (0, 0)
        while end < len(steps) and (steps[end][0], steps[end][3]) == (mode, ranks):
            found = (steps[end][1] - steps[end - 1][1], steps[end][2] - steps[end - 1][2])
            if end > begin + 1 and found != strides:
                break
            strides = found
            end += 1
        yield DropRun(mode, mode_step, strides[0], number, strides[1], end - begin, ranks)
        begin = end
