"""Steps of an attempt in immutable chunks, each a range of steps of one mode over all ranks.

What each step is over all ranks is known without its chunk (`ChunkRef.runs`); the columns are in
memory, or fetched through a source when an entry is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from smdist.coordination.columnar.blocks import Blocks, StepKey
from smdist.coordination.columnar.building import empty_columns, extend_columns, split_columns
from smdist.coordination.columnar.chunk_file import content_digest, encode_columns
from smdist.coordination.columnar.step_rows import StepRow, StepRun, compress_rows, expand_runs
from smdist.limits import MAX_CELLS, Bytes, MergedKey, Mode, check_total

if TYPE_CHECKING:
    from smdist.coordination.columnar.columns import Columns

__all__ = ["NO_CHUNKS", "Chunk", "ChunkRef", "ChunkSet", "Fetch", "Recent", "SealResult", "seal"]

# Of a chunk: a megabyte or two for many ranks, and not too many chunks for few.
_CELLS = 1 << 16
_LEAST_STEPS, _MOST_STEPS = 16, 4096

Recent = Mapping[StepKey, Mapping[int, Blocks]]
"""Step -> rank -> blocks."""


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    key: MergedKey
    nbytes: Bytes
    mode: Mode
    runs: tuple[StepRun, ...]

    def check(self) -> None:
        """Raise ValueError if smdist cannot have written this."""
        check_total("cells in a chunk", (run.cells for run in self.runs), MAX_CELLS)
        last = -1
        for run in self.runs:
            run.check()
            if run.mode_step <= last or (run.count > 1 and run.mode_stride < 1):
                raise ValueError(f"{self.key}: its steps are not in order behind {last}")
            last = run.last
        if last < 0:
            raise ValueError(f"{self.key}: a chunk without steps")


Fetch = Callable[["Chunk"], "Columns"]
"""The columns of a chunk, from wherever they are kept. Raises what reading raises."""


class Chunk:
    """`columns`, or the `fetch` that gets them each time: it is for that to remember them."""

    def __init__(
        self, attempt: int, ref: ChunkRef, columns: Columns | None, fetch: Fetch | None = None
    ) -> None:
        self.attempt, self.ref = attempt, ref
        self._columns, self._fetch = columns, fetch

    @property
    def stored(self) -> bool:
        """Return whether it was read from a store."""
        return self._fetch is not None

    @property
    def columns(self) -> Columns:
        if self._columns is not None:
            return self._columns
        if self._fetch is None:
            raise LookupError(f"{self.ref.key} was not loaded")
        return self._fetch(self)

    @cached_property
    def rows(self) -> dict[int, StepRow]:
        """Return the rows by mode step, in order."""
        return {row.mode_step: row for row in expand_runs(self.ref.runs)}

    def row(self, mode_step: int) -> StepRow | None:
        place = bisect_right(self._run_starts, mode_step) - 1
        run = self.ref.runs[place] if place >= 0 else None
        return run.row(mode_step) if run is not None and mode_step in run.mode_steps() else None

    @cached_property
    def _run_starts(self) -> list[int]:
        return [run.mode_step for run in self.ref.runs]

    @property
    def first(self) -> StepKey:
        return (self.ref.mode, self.ref.runs[0].mode_step)

    @cached_property
    def last(self) -> StepKey:
        return (self.ref.mode, self.ref.runs[-1].last)

    @cached_property
    def steps(self) -> int:
        return sum(run.count for run in self.ref.runs)


class ChunkSet:
    """Chunks of one attempt; their ranges do not overlap."""

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self.chunks = tuple(sorted(chunks, key=lambda chunk: chunk.first))
        self._firsts = [chunk.first for chunk in self.chunks]

    def __bool__(self) -> bool:
        return bool(self.chunks)

    def chunk(self, key: StepKey) -> Chunk | None:
        """Return the chunk that has the step `key`."""
        place = bisect_right(self._firsts, key) - 1
        if place < 0:
            return None
        chunk = self.chunks[place]
        return chunk if chunk.ref.mode == key[0] and chunk.row(key[1]) is not None else None

    def row(self, key: StepKey) -> StepRow | None:
        chunk = self.chunk(key)
        return None if chunk is None else chunk.row(key[1])

    def keys(self) -> Iterator[StepKey]:
        for chunk in self.chunks:
            for run in chunk.ref.runs:
                for mode_step in run.mode_steps():
                    yield (chunk.ref.mode, mode_step)

    def blocks(self, key: StepKey, rank: int) -> Blocks:
        chunk = self.chunk(key)
        return () if chunk is None else chunk.columns.blocks(key[1], rank)

    def step(self, key: StepKey) -> dict[int, Blocks]:
        chunk = self.chunk(key)
        return {} if chunk is None else chunk.columns.step(key[1])

    def of_rank(self, rank: int) -> Iterator[Blocks]:
        for chunk in self.chunks:
            yield from chunk.columns.of_rank(rank)

    def without(self, others: ChunkSet) -> list[Chunk]:
        """Return the chunks that `others` does not have."""
        known = {chunk.ref.key for chunk in others.chunks}
        return [chunk for chunk in self.chunks if chunk.ref.key not in known]


NO_CHUNKS = ChunkSet()


class SealResult(NamedTuple):
    sealed: ChunkSet
    made: tuple[tuple[Chunk, bytes], ...]


def seal(attempt: int, sealed: ChunkSet, recent: Recent, prefix: str) -> SealResult:
    """Return `sealed` with the blocks of `recent`. Chunks that do not change are kept.

    `prefix` begins the keys of new chunks. The rest of a key says what is in it, by content too.
    """
    targets: dict[Chunk | int, dict[int, Mapping[int, Blocks]]] = {}
    for key, blocks in sorted(recent.items()):
        targets.setdefault(_target(sealed, key), {})[key[1]] = blocks
    kept = dict.fromkeys(sealed.chunks)
    made: list[tuple[Chunk, bytes]] = []
    for target, news in targets.items():
        if isinstance(target, Chunk):
            old = target.columns
            new = extend_columns(old, news)
            if new is old:
                continue
            del kept[target]
            tail = _is_tail(sealed, target)
        else:
            new, tail = extend_columns(empty_columns(attempt, target), news), True
        most = _most_steps(len(new.ranks))
        split = len(new.mode_steps) > (most if tail else 2 * most)
        made += [_made(part, prefix) for part in (split_columns(new, most) if split else [new])]
    return SealResult(ChunkSet([*kept, *(chunk for chunk, _ in made)]), tuple(made))


def _most_steps(ranks: int) -> int:
    return max(_LEAST_STEPS, min(_MOST_STEPS, _CELLS // max(1, ranks)))


def _target(sealed: ChunkSet, key: StepKey) -> Chunk | int:
    """Return the chunk into which a step goes, or its mode if it begins a new chunk."""
    mode = key[0]
    place = bisect_right(sealed._firsts, key) - 1
    if place < 0 or sealed.chunks[place].ref.mode != mode:
        place += 1  # before the first chunk of its mode
        if place == len(sealed.chunks) or sealed.chunks[place].ref.mode != mode:
            return mode
    chunk = sealed.chunks[place]
    if key > chunk.last and _is_tail(sealed, chunk):
        ranks = chunk.ref.runs[-1].ranks
        if chunk.steps >= _most_steps(sum(stop - start for start, stop in ranks)):
            return mode
    return chunk


def _is_tail(sealed: ChunkSet, chunk: Chunk) -> bool:
    place = bisect_right(sealed._firsts, chunk.first)
    return place == len(sealed.chunks) or sealed.chunks[place].ref.mode != chunk.ref.mode


def _made(columns: Columns, prefix: str) -> tuple[Chunk, bytes]:
    data = encode_columns(columns)
    digest = content_digest(data)
    first = int(columns.mode_steps[0])
    key = f"{prefix}-{columns.attempt:06d}-{columns.mode}-{first:010d}-{digest}.safetensors"
    ref = ChunkRef(key, len(data), columns.mode, compress_rows(columns.rows()))
    return Chunk(columns.attempt, ref, columns), data
