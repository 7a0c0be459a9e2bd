"""Reads a row of statistics of every stored tensor, over steps and ranks, block by block.

Rows that were saved are taken as they are. Raw tensors are measured here, where they lie in the bytes
of their segment. What is wanted of a layout is planned once, as layouts repeat from block to block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from smdist import kernel
from smdist.errors import CorruptObject
from smdist.format.block import (
    ByteRange,
    ObjectLocation,
    checksum_seed,
    read_statistics,
    read_tensor,
    statistics_ranges,
)
from smdist.identity import ModeKeys
from smdist.kernel.tensor_stats import COLUMNS, DTYPES
from smdist.tables.block_rows import BlockRows, Measured, SpanTensor
from smdist.tables.row_builder import RowBuilder, RowPlace
from smdist.trials.segment_reader import GAP, ObjectRange, SegmentReader, batches, plan_reads

if TYPE_CHECKING:
    from smdist.config.collection import Collection
    from smdist.coordination.view.membership import StepFacts
    from smdist.format.layout import Layout, TensorEntry
    from smdist.format.manifest import StepEntry
    from smdist.tables.rows import Rows
    from smdist.trials.catalogue import Catalogue

__all__ = ["AskedTrial", "read_rows"]

Array = np.ndarray[Any, np.dtype[Any]]
_BASE = len(COLUMNS)


class AskedTrial(Protocol):
    """What is asked of a trial here."""

    catalogue: Catalogue
    reader: SegmentReader

    def tensor_names(
        self, *, regex: Sequence[str] | None = None, collection: str | Collection | None = None
    ) -> list[str]: ...
    def rank_of(self, worker: str | int) -> int: ...
    def prepare(self, catalogue: Catalogue, facts: Iterable[StepFacts]) -> None: ...


class _LayoutPlan(NamedTuple):
    """What to read of every block with this layout, and the columns that are known beforehand."""

    layout: Layout
    tensor: Array
    dtype: Array
    order: Array
    saved: Array  # places among the rows
    rows: Array  # of the saved statistics
    raw: tuple[tuple[TensorEntry, SpanTensor], ...]
    ranges: tuple[ByteRange, ...]  # statistics, checksums, then spans of raw tensors
    nbytes: int


class _PlannedBlock(NamedTuple):
    place: RowPlace
    entry: StepEntry
    seed: int
    before: int  # tensors that the rank captured earlier in the step
    plan: _LayoutPlan


def read_rows(
    trial: AskedTrial,
    tensors: str | re.Pattern[str] | None = None,
    collection: str | Collection | None = None,
    mode: ModeKeys = ModeKeys.GLOBAL,
    attempt: int | None = None,
    steps: Iterable[int] | None = None,
    ranks: Iterable[int | str] | None = None,
    show_incomplete_steps: bool = True,
) -> Rows:
    """Return a row of statistics for every stored tensor, of the newest attempt of each step.

    `tensors` is searched in the names. `steps` are numbers of `mode`; with GLOBAL, global
    numbers. Objects that are damaged are left out and told by `trial.troubles()`. Complex
    tensors have no statistics, so no rows.
    """
    names: set[str] | None = None
    if tensors is not None:
        names = set(trial.tensor_names(regex=[tensors]))  # type: ignore[list-item]  # compiled too
    if collection is not None:
        members = set(trial.tensor_names(collection=collection))
        names = members if names is None else names & members
    wanted = None if steps is None else set(steps)
    of_ranks = (
        None
        if ranks is None
        else {trial.rank_of(r if isinstance(r, str) else int(r)) for r in ranks}
    )
    catalogue, builder = trial.catalogue, RowBuilder()
    chosen = [
        facts
        for facts in catalogue.steps.values()
        if (facts.complete or show_incomplete_steps)
        and attempt in (None, facts.attempt)
        and _in_steps(facts, mode, wanted)
    ]
    trial.prepare(catalogue, chosen)
    planner = _Planner(catalogue, builder, names)
    blocks = (block for facts in chosen for block in planner.blocks(facts, of_ranks))
    for batch in batches(blocks, lambda block: block.plan.nbytes):
        _read(trial.reader, batch, builder)
    return builder.build(catalogue.members)


def _in_steps(facts: StepFacts, mode: ModeKeys, steps: set[int] | None) -> bool:
    if mode is ModeKeys.GLOBAL:
        return steps is None or facts.step in steps
    return facts.key[0] == mode.value and (steps is None or facts.key[1] in steps)


class _Planner:
    """Finds the blocks of steps, and plans each layout once."""

    def __init__(self, catalogue: Catalogue, builder: RowBuilder, names: set[str] | None) -> None:
        self._view, self._layouts = catalogue.view, catalogue.layouts
        self._builder, self._names = builder, names
        self._plans: dict[tuple[str, frozenset[str]], _LayoutPlan] = {}

    def blocks(self, facts: StepFacts, ranks: set[int] | None) -> Iterator[_PlannedBlock]:
        for rank, entries in sorted(self._view.step(facts.attempt, facts.key).items()):
            if ranks is not None and rank not in ranks:
                continue
            place = RowPlace(facts.attempt, *facts.key, facts.step, rank)
            session, before = self._view.session(facts.attempt, rank), 0
            known = [entry for entry in entries if entry.layout in self._layouts]
            for at, entry in enumerate(known):
                plan = self._plan(entry.layout, known[at + 1 :])
                if len(plan.tensor) and entry.segment:
                    yield _PlannedBlock(place, entry, checksum_seed(session, entry), before, plan)
                before += len(plan.layout.tensors)

    def _plan(self, digest: str, later: Sequence[StepEntry]) -> _LayoutPlan:
        # Of a tensor that was saved twice in a step the newest counts.
        names = self._layouts[digest].positions.keys()
        newer = (self._layouts[entry.layout].positions.keys() for entry in later)
        key = (digest, frozenset[str]().union(*(names & some for some in newer)))
        if key not in self._plans:
            left = names - key[1] if self._names is None else (names - key[1]) & self._names
            self._plans[key] = _plan(self._layouts[digest].layout, left, self._builder)
        return self._plans[key]


def _plan(layout: Layout, names: set[str], builder: RowBuilder) -> _LayoutPlan:
    measured = layout.columns[:_BASE] == COLUMNS

    def has_row(entry: TensorEntry) -> bool:
        return measured and entry.row >= 0 and not set(COLUMNS).intersection(entry.unmeasured)

    def is_raw(entry: TensorEntry) -> bool:
        return entry.offset >= 0 and entry.dtype in DTYPES

    used = [e for e in layout.tensors if e.name in names and (has_row(e) or is_raw(e))]
    saved = [place for place, entry in enumerate(used) if has_row(entry)]
    statistics = statistics_ranges(layout) if saved else None
    table = max(layout.checksums_offset, 0)
    ranges = [
        ByteRange(0, 0) if statistics is None else statistics.data,
        ByteRange(table, table + layout.checksums_nbytes),
    ]
    raw = [(place, entry) for place, entry in enumerate(used) if is_raw(entry)]
    found = []
    spans = plan_reads([ObjectRange("", e.offset, e.offset + e.nbytes) for _, e in raw], GAP)
    for number, ((_, start, stop), members) in enumerate(spans):
        ranges.append(ByteRange(start, stop))
        for place, entry in (raw[member] for member in members):
            size, offset = prod(entry.shape), entry.offset - start
            found.append((entry, SpanTensor(place, entry.dtype, size, number, offset)))
    return _LayoutPlan(
        layout,
        builder.names([entry.name for entry in used]),
        builder.dtypes([kernel.ELEMENT_NAMES.get(entry.dtype, entry.dtype) for entry in used]),
        np.array([entry.order for entry in used], np.int32),
        np.array(saved, np.intp),
        np.array([used[place].row for place in saved], np.intp),
        tuple(found),
        tuple(ranges),
        sum(stop - start for start, stop in ranges),
    )


def _read(reader: SegmentReader, batch: list[_PlannedBlock], builder: RowBuilder) -> None:
    wanted = [
        ObjectRange(block.entry.segment, *span.shifted(block.entry.offset))
        for block in batch
        for span in block.plan.ranges
    ]
    data = iter(reader.pieces(wanted))
    for block in batch:
        part = _measured(reader, block, *(next(data) for _ in block.plan.ranges))
        builder.add(block.place, part)


def _measured(
    reader: SegmentReader,
    block: _PlannedBlock,
    statistics: bytes | None,
    table: bytes | None,
    *spans: bytes | None,
) -> Measured:
    """Return the rows whose bytes are there and match their checksums."""
    plan, rows = block.plan, BlockRows.empty(len(block.plan.tensor))
    location, tensors = ObjectLocation(reader.url, block.entry.segment), list[SpanTensor]()
    try:
        if statistics and table:
            found = read_statistics(plan.layout, statistics, table[-4:], location, block.seed)
            rows.put(plan.saved, found[plan.rows, :_BASE])
    except CorruptObject as error:
        reader.damaged(error)
    for entry, one in plan.raw:
        data = spans[one.span]
        try:
            if data is not None and table:
                piece = memoryview(data)[one.start : one.start + entry.nbytes]
                stored = table[4 * entry.order : 4 * entry.order + 4]
                read_tensor(entry, piece, stored, location, block.seed)
                tensors.append(one)
        except CorruptObject as error:
            reader.damaged(error)
    rows.measure(spans, tensors)
    return rows.measured(plan.tensor, plan.dtype, plan.order + block.before)
