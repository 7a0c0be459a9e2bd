"""From records of the journal to a batch that is ready to be put. Runs off the uploader's loop."""

from __future__ import annotations

import contextlib
import mmap
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from smdist.identity import ModeKeys, worker_name
from smdist.manifest import Session, segment_key
from smdist.pipeline.fold import Fold, fold
from smdist.pipeline.segment import Segment, compose
from smdist.record import Drop, Inline, Part, Piece, Record, Trouble
from smdist.workers.journal import JournalReader
from smdist.workers.spool import Spool

__all__ = ["Arenas", "Batch", "captured_bytes", "nothing", "prepare", "without"]

_FORGET_S = 1.0
_MODES = frozenset(mode.value for mode in ModeKeys)


class Arenas:
    """The arenas of a spool, mapped for reading when first needed."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._maps: dict[int, mmap.mmap] = {}
        self._forgot = 0.0

    def read(self, arena: int, offset: int, nbytes: int) -> memoryview:
        """Those bytes, not copied; the training process reuses them once they are acknowledged."""
        mapped = self._maps.get(arena)
        if mapped is None:
            with self._spool.find(f"arena-{arena}").open("rb") as handle:
                mapped = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
            self._maps[arena] = mapped
        if not 0 <= offset <= offset + nbytes <= len(mapped):
            raise ValueError(f"arena {arena} has no bytes [{offset}, {offset + nbytes})")
        return memoryview(mapped)[offset : offset + nbytes]

    def forget(self) -> None:
        """Let go of the pages, not of their content: they count as this process's memory.

        Now and then: to map them again is a sixth of what storing them costs.
        """
        now = time.monotonic()
        if now - self._forgot >= _FORGET_S:
            self._forgot = now
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # a put that was given up holds a view
                mapped.close()
        self._maps.clear()


class Batch(NamedTuple):
    seq: int
    news: Fold
    segment: Segment


def prepare(
    pieces: Sequence[Piece], arenas: Arenas, session: Session, seq: int, life: str
) -> Batch:
    """Fold, lay out, checksum. Raises whatever a record that makes no sense leads to."""
    worker = worker_name(session.rank)
    news = fold(pieces)
    key = segment_key(worker, session.attempt, seq, life)
    segment = compose(
        news.blocks, arenas.read, key=key, worker=worker, attempt=session.attempt, seq=seq
    )
    return Batch(seq, news, segment)


def captured_bytes(spool: Spool, first: int, upto: int = sys.maxsize) -> int:
    """Of the records `[first, upto)`, as a Fold of them counts."""
    journal = JournalReader(spool, first)
    nbytes = 0
    try:
        while pieces := journal.read(10_000):
            known = [p.kind.nbytes for p in pieces if p.kind is not None and p.ordinal < upto]
            nbytes += sum(known)
    finally:
        journal.close()
    return nbytes


def nothing(upto: int, seq: int) -> Batch:
    """A batch for a manifest that only says how the rank ended."""
    news = Fold(upto, upto, (), (), (), (), None, False, 0)
    return Batch(seq, news, Segment("", (), 0, (), {}))


def without(piece: Piece, error: Exception) -> Piece:
    """What stands in the place of a record that cannot be stored: the news of that."""
    record, kind = piece.record, piece.kind
    reason = f"journal record {piece.ordinal} cannot be stored: {error!r}"
    told: Record = Trouble(reason, -1, time.time())
    if isinstance(record, (Part, Inline)) and kind is not None and record.mode in _MODES:
        names = tuple(spec.name for spec in kind.tensors)
        told = Drop(
            record.mode, record.mode_step, record.step, record.time, names, kind.nbytes, reason
        )
    return Piece(piece.ordinal, told, None)
