"""Turn journal records into a batch that is ready to be stored. Runs in a thread of the uploader."""

from __future__ import annotations

import contextlib
import mmap
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from smdist import kernel
from smdist.format.fold import Block, FoldedRecords, Source, fold
from smdist.format.journal_records import Drop, Inline, Part, Piece, Record, Trouble
from smdist.format.manifest import Dropped, Session, segment_key
from smdist.format.segment import Segment, compose
from smdist.identity import ModeKeys, worker_name
from smdist.workers.spool.journal import JournalReader
from smdist.workers.spool.spool import Spool

__all__ = ["Arenas", "Batch", "captured_bytes", "nothing", "prepare", "without"]

_FORGET_S = 1.0
_MODES = frozenset(mode.value for mode in ModeKeys)
_OVERWRITTEN = "overwritten in the capture buffer before being stored"


class Arenas:
    """The arenas of a spool, mapped for reading when first needed."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._maps: dict[int, mmap.mmap] = {}
        self._forgot = 0.0

    def read(self, arena: int, offset: int, nbytes: int) -> memoryview:
        """Return the bytes without copying; the training process reuses them once they are acknowledged."""
        mapped = self._maps.get(arena)
        if mapped is None:
            with self._spool.open_for_reading(f"arena-{arena}") as handle:
                mapped = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
            self._maps[arena] = mapped
        if not 0 <= offset <= offset + nbytes <= len(mapped):
            raise ValueError(f"arena {arena} has no bytes [{offset}, {offset + nbytes})")
        return memoryview(mapped)[offset : offset + nbytes]

    def holds(self, source: Source) -> bool:
        """Return whether a part still has the captured bytes; those in a journal are checked on reading."""
        if source.arena < 0:
            return True
        view = self.read(source.arena, source.offset, source.kind.nbytes)
        return source.kind.guard(kernel.address_of(view)) == source.guard

    def forget(self) -> None:
        """Release the pages, which count as this process's memory; their content stays.

        At most once per second: mapping them again is a sixth of what storing them costs.
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
    news: FoldedRecords
    segment: Segment


def prepare(
    pieces: Sequence[Piece],
    arenas: Arenas,
    run_id: str,
    session: Session,
    seq: int,
    life: str,
) -> Batch:
    """Fold, lay out, checksum. Raises whatever a record that makes no sense leads to.

    The guards are looked at after the checksums were computed: bytes that changed before that, or
    meanwhile, do not fit their guard any more. Bytes that change later do not fit the checksum that
    is stored, and readers say so. A page that a crash of the machine has torn is found here as well.
    """
    news = fold(pieces)
    key = segment_key(worker_name(session.rank), session.attempt, seq, life)
    while True:
        segment = compose(
            news.blocks, arenas.read, key=key, run_id=run_id, session=session, seq=seq
        )
        intact = _intact(news, arenas)
        if intact is news:
            return Batch(seq, news, segment)
        news = intact


def _intact(news: FoldedRecords, arenas: Arenas) -> FoldedRecords:
    """Without the parts that were overwritten, which are dropped; `news` itself if there are none."""
    blocks, dropped, troubles = [], list(news.dropped), list(news.troubles)
    for block in news.blocks:
        lost = [source for source in block.sources if not arenas.holds(source)]
        if not lost:
            blocks.append(block)
            continue
        kept = tuple(source for source in block.sources if source not in lost)
        if kept or block.closed:
            blocks.append(replace(block, sources=kept))
        dropped += [_overwritten(block, source) for source in lost]
        count = sum(len(source.tensors) for source in lost)
        troubles.append(
            f"step {block.ref.step}: {count} tensors left out, {_OVERWRITTEN}; unless the machine "
            "crashed, please report this"
        )
    if len(dropped) == len(news.dropped):
        return news
    told = {"dropped": tuple(dropped), "troubles": tuple(troubles)}
    return replace(news, blocks=tuple(blocks), **told)


def _overwritten(block: Block, source: Source) -> Dropped:
    mode, mode_step, step = block.ref
    names = tuple(spec.name for spec in source.tensors)
    return Dropped(mode.value, mode_step, step, names, source.kind.nbytes, _OVERWRITTEN)


def captured_bytes(spool: Spool, first: int, upto: int = sys.maxsize) -> int:
    """Of the records `[first, upto)`, as a Fold of them counts."""
    nbytes = 0
    with contextlib.closing(JournalReader(spool, first)) as journal:
        while pieces := journal.read(10_000):
            known = [p.kind.nbytes for p in pieces if p.kind is not None and p.ordinal < upto]
            nbytes += sum(known)
    return nbytes


def nothing(upto: int, seq: int) -> Batch:
    """Return a batch for a manifest that only says how the rank ended."""
    news = FoldedRecords(upto, upto, (), (), (), (), None, False, 0)
    return Batch(seq, news, Segment("", (), 0, (), {}))


def without(piece: Piece, error: Exception) -> Piece:
    """Return a record that reports `piece` as dropped because it cannot be stored."""
    record, kind = piece.record, piece.kind
    reason = f"journal record {piece.ordinal} cannot be stored: {error!r}"
    told: Record = Trouble(reason, -1, time.time())
    if isinstance(record, (Part, Inline)) and kind is not None and record.mode in _MODES:
        names = tuple(spec.name for spec in kind.tensors)
        told = Drop(
            record.mode, record.mode_step, record.step, record.time, names, kind.nbytes, reason
        )
    return Piece(piece.ordinal, told, None)
