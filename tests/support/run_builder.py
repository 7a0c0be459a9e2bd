"""Writes runs for tests as an uploader does: journal records, folded and composed by the real code.

run = RunBuilder(LocalStore(path))
rank = run.rank(0, world=2)
rank.step(TRAIN, 0, {"w": array})          # journalled
rank.flush()                               # committed
rank.end()
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smdist.format.dtypes import dtype_code
from smdist.format.fold import fold
from smdist.format.inline_segment import can_embed, embed_segment
from smdist.format.journal_records import (
    Close,
    Declare,
    Drop,
    Inline,
    Piece,
    Record,
    TensorSpec,
    Trouble,
)
from smdist.format.manifest import (
    RUN_KEY,
    CollectionInfo,
    Collections,
    Heartbeat,
    RankManifest,
    RankState,
    Run,
    Session,
    collections_key,
    heartbeat_key,
    layout_key,
    manifest_key,
    segment_key,
    session_key,
)
from smdist.format.segment import compose, mark_continued
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys, worker_name
from smdist.kernel.tensor_stats import columns_for, measure
from smdist.storage import loop_thread as sync
from smdist.storage.store import Store

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Saved:
    """How a tensor is saved; a bare array stands for `Saved(array)`."""

    array: Array
    raw: bool = True
    reductions: Sequence[str] | None = None  # () is enough for the base statistics
    collections: tuple[str, ...] = ("default",)


def _part(tensors: Mapping[str, Saved]) -> tuple[Declare, bytes]:
    measured = [saved for saved in tensors.values() if saved.reductions is not None]
    columns = columns_for(sorted({r for saved in measured for r in saved.reductions or ()}))
    data = b"".join(measure(saved.array, columns).tobytes() for saved in measured)
    specs, row = [], 0
    for name, saved in tensors.items():
        array = np.ascontiguousarray(saved.array)
        offset = len(data) if saved.raw else -1
        specs.append(
            TensorSpec(
                name=name,
                dtype=dtype_code(array.dtype),
                shape=saved.array.shape,
                nbytes=array.nbytes,
                offset=offset,
                row=row if saved.reductions is not None else -1,
                collections=saved.collections,
            )
        )
        row += saved.reductions is not None
        if saved.raw:
            data += array.tobytes() + bytes(-array.nbytes % 8)
    return Declare(0, columns if measured else (), tuple(specs), len(data)), data


@dataclass
class RankWriter:
    store: Store
    session: Session
    now: float
    seq: int = 0
    ordinal: int = 0
    counters: dict[ModeKeys, int] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    attach_bytes: int = 0
    begun: set[tuple[int, int]] = field(default_factory=set)
    described: bool = False

    @property
    def worker(self) -> str:
        return worker_name(self.session.rank)

    def _add(self, record: Record, kind: Declare | None = None) -> None:
        self.pieces.append(Piece(self.ordinal, record, kind))
        self.ordinal += 1

    def step(
        self,
        mode: ModeKeys,
        mode_step: int,
        tensors: Mapping[str, Array | Saved],
        *,
        step: int | None = None,
        close: bool = True,
        planned: bool = True,
    ) -> RankWriter:
        """A step, or a part of it; `step` is its global number when that differs."""
        number = mode_step if step is None else step
        where = (mode.value, mode_step, number, self.now)
        if tensors:
            kind, data = _part(
                {n: t if isinstance(t, Saved) else Saved(t) for n, t in tensors.items()}
            )
            self._add(Inline(*where, 0, data), kind)
        if close:
            self._add(Close(*where, planned))
        return self

    def drop(self, mode: ModeKeys, mode_step: int, *names: str) -> RankWriter:
        self._add(Drop(mode.value, mode_step, mode_step, self.now, names, 4, "buffer full"))
        return self

    def trouble(self, message: str) -> RankWriter:
        self._add(Trouble(message, -1, self.now))
        return self

    def flush(self, state: RankState = "active", reason: str = "") -> RankWriter:
        """Commit what was journalled since the last time."""
        if not self.described:
            self.describe()
        first, pieces = self.ordinal - len(self.pieces), self.pieces
        news = fold(pieces) if pieces else None
        segment = compose(
            news.blocks if news else (),
            _no_arena,
            key=segment_key(self.worker, self.session.attempt, self.seq, "0"),
            run_id=self.session.run_id,
            session=self.session,
            seq=self.seq,
        )
        segment = mark_continued(segment, self.begun)
        for digest, layout in segment.layouts.items():
            self._put(layout_key(digest), layout.to_json())
        apart = not can_embed(segment, self.attach_bytes)
        if segment.key and apart:
            sync.run(self.store.put(segment.key, segment.chunks))
        manifest = RankManifest(
            session=self.session.session,
            rank=self.session.rank,
            world_size=self.session.world_size,
            attempt=self.session.attempt,
            include_workers=self.session.include_workers,
            seq=self.seq,
            first=first,
            upto=self.ordinal,
            state=state,
            time=self.now,
            steps=segment.entries,
            dropped=news.dropped if news else (),
            troubles=news.troubles if news else (),
            reason=reason,
        )
        self._tell(
            manifest_key(self.worker, self.session.attempt, self.seq),
            manifest if apart else embed_segment(manifest, segment),
        )
        self.seq += 1
        self.pieces = []
        return self

    def end(self) -> RankWriter:
        return self.flush("ended")

    def lose(self) -> RankWriter:
        return self.flush("lost", "SIGKILL")

    def beat(self, at: float) -> None:
        session = self.session
        beat = Heartbeat(session.session, session.rank, session.attempt, at, 5.0, -1, 0)
        self._tell(heartbeat_key(self.worker, session.attempt), beat)

    def describe(self, *collections: CollectionInfo) -> RankWriter:
        self._tell(collections_key(self.worker), Collections(self.worker, collections))
        self.described = True
        return self

    def _tell(self, key: str, value: object) -> None:
        self._put(key, encode(value, key))

    def _put(self, key: str, data: bytes) -> None:
        sync.run(self.store.put(key, [data]))


def _no_arena(arena: int, offset: int, nbytes: int) -> memoryview:
    raise AssertionError("everything is inline here")


class RunBuilder:
    def __init__(self, store: Store, *, now: float | None = None, run_id: str = "run") -> None:
        self.store, self.run_id = store, run_id
        self.now = time.time() if now is None else now
        run = Run(run_id, self.now, "pytorch")
        sync.run(store.put(RUN_KEY, [encode(run, RUN_KEY)]))

    def rank(
        self,
        rank: int,
        world: int = 1,
        *,
        attempt: int = 0,
        include_workers: str | tuple[int, ...] = "all",
        now: float | None = None,
    ) -> RankWriter:
        at = self.now if now is None else now
        session = Session(
            session=f"{attempt}.{rank}"
            if self.run_id == "run"
            else f"{self.run_id}.{attempt}.{rank}",
            rank=rank,
            world_size=world,
            attempt=attempt,
            include_workers=include_workers,
            started=at,
            host="host",
            pid=1,
            launch="",
            run_id=self.run_id,
        )
        key = session_key(worker_name(rank), attempt)
        sync.run(self.store.put(key, [encode(session, key)]))
        return RankWriter(self.store, session, at)
