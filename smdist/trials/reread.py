"""What a part of a snapshot said, from the manifests of the ranks: for when it cannot be read.

Slow, as every manifest of the ranks concerned is read, but each of them once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from smdist.concurrency import bounded_gather
from smdist.coordination.columnar.blocks import Blocks
from smdist.coordination.columnar.building import empty_columns, extend_columns
from smdist.coordination.columnar.chunks import Chunk
from smdist.coordination.columnar.columns import Columns
from smdist.coordination.columnar.drop_log import Drop, DropBatch, DropsByRank
from smdist.coordination.view.run_view import View, add
from smdist.errors import CorruptObject, ObjectNotFound
from smdist.format.inline_segment import extract_segment
from smdist.format.intervals import Members, merge_intervals
from smdist.format.manifest import RankManifest
from smdist.format.session_checks import check_session_id
from smdist.format.stored_json import read
from smdist.identity import worker_name
from smdist.storage.store import Store

__all__ = ["ManifestFallback"]


class ManifestFallback:
    """On the event loop that owns the store."""

    def __init__(
        self,
        store: Store,
        session: Callable[[int, int], str],
        troubles: dict[str, str],
        concurrency: int = 16,
    ) -> None:
        """`session` of an attempt and a rank; `troubles` is told of manifests that are damaged."""
        self._store, self._concurrency = store, concurrency
        self._session, self._troubles = session, troubles
        self._view = View()
        self._read: set[str] = set()
        self._lock = asyncio.Lock()

    async def columns(self, chunk: Chunk) -> Columns:
        """Those of a chunk, as far as there are manifests."""
        wanted = {step: Members(row.ranks) for step, row in chunk.rows.items()}
        spans = {span for ranks in wanted.values() for span in ranks.intervals}
        await self._load(chunk.attempt, Members(merge_intervals(spans)))
        news: dict[int, dict[int, Blocks]] = {}
        for mode_step, ranks in wanted.items():
            key = (chunk.ref.mode, mode_step)
            for rank in ranks:
                known = self._view.rank(chunk.attempt, rank)
                blocks = () if known is None else known.steps.get(key, ())
                if blocks:
                    news.setdefault(mode_step, {})[rank] = blocks
        return extend_columns(empty_columns(chunk.attempt, chunk.ref.mode), news)

    async def drops(self, batch: DropBatch) -> DropsByRank:
        attempt = int(batch.ref.key.rsplit("-", 2)[1])
        wanted = [
            (key, rank)
            for run in batch.ref.runs
            for key, _ in run.steps()
            for rank in Members(run.ranks)
        ]
        await self._load(attempt, {rank for _, rank in wanted})
        found: dict[int, set[Drop]] = {}
        for key, rank in wanted:
            known = self._view.rank(attempt, rank)
            if known is not None and key in known.drops:
                found.setdefault(rank, set()).update(known.drops[key])
        return {rank: tuple(drops) for rank, drops in found.items()}

    async def _load(self, attempt: int, ranks: Iterable[int]) -> None:
        prefixes = [f"manifests/{worker_name(rank)}/{attempt:06d}-" for rank in sorted(ranks)]
        async with self._lock:
            listed = await bounded_gather(self._store.list, prefixes, self._concurrency)
            fresh = [key for keys in listed for key in keys if key not in self._read]
            await bounded_gather(self._manifest, fresh, self._concurrency)

    async def _manifest(self, key: str) -> None:
        try:
            manifest = await read(self._store, key, RankManifest)
            session = self._session(manifest.attempt, manifest.rank)
            check_session_id(manifest, session, key, self._store.url)
        except (ObjectNotFound, CorruptObject) as error:
            self._troubles[key] = f"{key} was ignored: {error}"
            return
        add(self._view, extract_segment(key, manifest).manifest)
        self._read.add(key)
