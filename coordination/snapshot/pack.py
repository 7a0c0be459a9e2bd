"""A view as objects of a store, so that a reader of a thousand ranks needs a handful of requests.

    merged/current.json                            Pointer   overwritten: which snapshot is the newest
    merged/heads/<epoch>-<number>-<writer>.json    SnapshotHead      ranks, steps, which chunks; immutable
    merged/steps/<...>-<digest>.safetensors        a range of steps of all ranks; immutable
    merged/layouts/<digest>.json                   layouts that the head has no room for; immutable
    merged/drops/<...>-<digest>.json               drops that the head has no room for; immutable

`pack` is pure. Who writes puts the objects, then the head, then the pointer; `previous` is the last
`PackedSnapshot` of which all that was put. Its `view` holds the facts of the view it was given, and is to
be added to from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smdist.coordination.columnar.blocks import Blocks, StepKey
from smdist.coordination.columnar.chunk_file import encode_columns
from smdist.coordination.columnar.chunks import NO_CHUNKS, ChunkSet, seal
from smdist.coordination.columnar.drop_log import (
    NO_DROPS,
    Drop,
    DropLog,
    TextTable,
    make_batch,
)
from smdist.coordination.snapshot.head import (
    POINTER_KEY,
    AttemptRow,
    Pointer,
    SnapshotHead,
    head_key,
    rank_row,
)
from smdist.coordination.snapshot.layout_packs import pack_layouts
from smdist.coordination.snapshot.load import LoadedSnapshot, load_view
from smdist.coordination.view.run_view import RankView, View
from smdist.format.layout import Layout
from smdist.format.stored_json import encode

if TYPE_CHECKING:
    from smdist.storage.store import Buffer

__all__ = [
    "POINTER_KEY",
    "LoadedSnapshot",
    "PackedSnapshot",
    "Pointer",
    "SnapshotHead",
    "compact_view",
    "head_key",
    "load_view",
    "pack",
]

_MOST_DROPS = 4096  # in a head


@dataclass(frozen=True)
class PackedSnapshot:
    """`objects` are to be put before the head, the pointer after it."""

    objects: tuple[tuple[str, Buffer], ...]
    head_key: str
    head: bytes
    pointer: Pointer
    view: View
    chunks: frozenset[str] = frozenset()  # keys of all chunks that the head names
    replaced: tuple[str, ...] = ()  # keys of chunks that the one before names and this one does not
    layout_packs: tuple[str, ...] = ()
    layout_texts: Mapping[str, bytes] = field(default_factory=dict)
    drops: frozenset[str] = frozenset()  # keys of the batches of drops


def pack(
    view: View,
    previous: PackedSnapshot | None,
    *,
    run_id: str,
    epoch: int,
    number: int,
    writer: str,
    now: float,
    interval_s: float,
    final: bool,
    layouts: Mapping[str, Layout],
) -> PackedSnapshot:
    """Build the snapshot `(epoch, number)` of `view`, at the cost of what is new since `previous`."""
    stored = previous.chunks if previous is not None else frozenset()
    name = _name(epoch, number, writer)
    whole, made = _sealed(view, f"merged/steps/{name}")
    batches = _log_drops(whole, f"merged/drops/{name}")
    described = pack_layouts(
        layouts,
        previous.layout_texts if previous is not None else {},
        previous.layout_packs if previous is not None else (),
    )
    texts = TextTable()
    rows = tuple(
        AttemptRow(
            attempt,
            tuple(rank_row(rank, known, texts) for rank, known in sorted(ranks.items())),
            tuple(chunk.ref for chunk in whole.sealed.get(attempt, NO_CHUNKS).chunks),
            tuple(batch.ref for batch in whole.drop_logs.get(attempt, NO_DROPS).batches),
        )
        for attempt, ranks in sorted(whole.attempts.items())
    )
    head = SnapshotHead(
        run_id,
        epoch,
        number,
        writer,
        now,
        interval_s,
        final,
        rows,
        tuple(texts),
        described.inline,
        described.keys,
    )
    chunks = frozenset(ref.key for row in rows for ref in row.chunks)
    key = head_key(epoch, number, writer)
    return PackedSnapshot(
        (
            *described.objects,
            *_unlogged(whole, batches, previous.drops if previous is not None else frozenset()),
            *_unstored(whole, made, stored),
        ),
        key,
        encode(head, key),
        Pointer(epoch, number, key, now, interval_s, final),
        whole,
        chunks,
        tuple(sorted(stored - chunks)),
        described.keys,
        described.texts,
        frozenset(ref.key for row in rows for ref in row.drops),
    )


def compact_view(view: View, *, epoch: int, number: int, writer: str) -> View:
    """Return the same facts with steps in columns, to save memory before the next snapshot.

    A tenth of the memory. The chunks are put with the next snapshot, whichever number that has.
    """
    name = _name(epoch, number, writer)
    whole, _ = _sealed(view, f"merged/steps/{name}")
    _log_drops(whole, f"merged/drops/{name}")
    return whole


def _name(epoch: int, number: int, writer: str) -> str:
    return f"{epoch:06d}-{number:010d}-{writer}"


def _sealed(view: View, prefix: str) -> tuple[View, dict[str, bytes]]:
    """Return `view` with its steps in chunks, and the chunks that were made for it."""
    attempts: dict[int, dict[int, RankView]] = {}
    sealed: dict[int, ChunkSet] = {}
    made: dict[str, bytes] = {}
    for attempt, ranks in view.attempts.items():
        recent: dict[StepKey, dict[int, Blocks]] = {}
        attempts[attempt] = {rank: known.without_steps() for rank, known in ranks.items()}
        for rank, known in ranks.items():
            for key, blocks in known.steps.items():
                recent.setdefault(key, {})[rank] = blocks
        done = seal(attempt, view.sealed.get(attempt, NO_CHUNKS), recent, prefix)
        sealed[attempt] = done.sealed
        made |= {chunk.ref.key: data for chunk, data in done.made}
    return View(attempts, sealed, dict(view.drop_logs)), made


def _log_drops(view: View, prefix: str) -> dict[str, bytes]:
    """Move the drops of the ranks into the log of `view`, our own, if they are many."""
    made: dict[str, bytes] = {}
    for attempt, ranks in view.attempts.items():
        if sum(len(known.drops) for known in ranks.values()) <= _MOST_DROPS:
            continue
        content: dict[int, tuple[Drop, ...]] = {}
        for rank, known in ranks.items():
            if known.drops:
                content[rank] = tuple(d for drops in known.drops.values() for d in drops)
                known.drops = {}
        batch, data = make_batch(attempt, content, prefix)
        made[batch.ref.key] = data
        log = view.drop_logs.get(attempt, NO_DROPS)
        view.drop_logs[attempt] = DropLog((*log.batches, batch))
    return made


def _unlogged(
    view: View, made: Mapping[str, bytes], stored: frozenset[str]
) -> Iterator[tuple[str, Buffer]]:
    for attempt, log in view.drop_logs.items():
        for batch in log.batches:
            key = batch.ref.key
            if key in made:
                yield key, made[key]
            elif key not in stored and not batch.stored:
                prefix = key[: key.rindex(f"-{attempt:06d}-")]
                yield key, make_batch(attempt, batch.content, prefix)[1]


def _unstored(
    view: View, made: Mapping[str, bytes], stored: frozenset[str]
) -> Iterator[tuple[str, Buffer]]:
    """Yield chunks that are in no stored snapshot yet."""
    for sealed in view.sealed.values():
        for chunk in sealed.chunks:
            key = chunk.ref.key
            if key in made:
                yield key, made[key]
            elif key not in stored and not chunk.stored:
                yield key, encode_columns(chunk.columns)
