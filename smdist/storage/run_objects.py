"""Read the objects of a run as typed values: one reader for trials, coordinator, CLI and uploaders.

Each method is one request. It raises ObjectNotFound if the object is not there, CorruptObject if it is
damaged or belongs elsewhere, and the store's other errors as they come. What to do about them is for
the caller to decide: a trial reports and goes on, the coordinator retries, an uploader gives up.

Runs on the event loop that owns the store; any number of calls at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple, TypeVar

from smdist.errors import CorruptObject, UnsupportedFormat
from smdist.format.layout import Layout
from smdist.format.manifest import (
    FORMAT,
    RUN_KEY,
    Collections,
    Heartbeat,
    Owner,
    RankManifest,
    RankSpan,
    RankSummary,
    Run,
    SamplingChanges,
    Session,
    collections_key,
    heartbeat_key,
    layout_key,
    manifest_key,
    parse_manifest_key,
    parse_session_key,
    parse_summary_key,
    segment_key,
    session_key,
    span_key,
    summary_key,
)
from smdist.format.manifest_spans import ManifestSpan
from smdist.format.session_checks import check_session_id, check_session_owner, check_summary
from smdist.format.stored_json import read
from smdist.identity import worker_name
from smdist.limits import MAX_UNCOMMITTED_SEGMENTS
from smdist.storage.store import Store

__all__ = ["RunObjects", "SpanRequest"]

T = TypeVar("T")

_MAX_SINGLE_LISTINGS = 16  # beyond that many ranks, one listing of all manifests is cheaper


class SpanRequest(NamedTuple):
    """The manifests `span` of one session of a rank, to be read as one object."""

    attempt: int
    rank: int
    session: str
    span: ManifestSpan

    @property
    def key(self) -> str:
        return span_key(worker_name(self.rank), self.attempt, *self.span)

    def children(self) -> list[SpanRequest]:
        """Return requests for the shorter spans that hold the same manifests."""
        return [self._replace(span=part) for part in self.span.children()]


class RunObjects:
    """Typed reads of one run's store. Holds no state but the store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def run(self) -> Run:
        """Read `run.json`. Raise UnsupportedFormat if a newer smdist wrote it."""
        run = await self._read(RUN_KEY, Run)
        if run.format > FORMAT:
            raise UnsupportedFormat(self.store.url, run.format, FORMAT)
        return run

    async def session(self, owner: Owner) -> Session:
        key = session_key(worker_name(owner[1]), owner[0])
        session = await self._read(key, Session)
        check_session_owner(session, owner, key, self.store.url)
        return session

    async def summary(self, owner: Owner, run_id: str) -> RankSummary:
        """Read the summary of a rank, if it holds every manifest of a session of run `run_id`."""
        key = summary_key(worker_name(owner[1]), owner[0])
        summary = await self._read(key, RankSummary)
        check_summary(summary, run_id, key, self.store.url)
        check_session_owner(summary.session, owner, key, self.store.url)
        return summary

    async def manifest(self, owner: Owner, seq: int, session: str) -> RankManifest:
        """Read one manifest. An empty `session` means that the rank's session is not known."""
        key = manifest_key(worker_name(owner[1]), owner[0], seq)
        manifest = await self._read(key, RankManifest)
        check_session_id(manifest, session, key, self.store.url)
        return manifest

    async def span(self, request: SpanRequest) -> tuple[RankManifest, ...] | None:
        """Read the manifests of a span; None if its writer has withdrawn it."""
        manifests = (await self._read(request.key, RankSpan)).manifests
        for one in manifests:
            check_session_id(one, request.session, request.key, self.store.url)
        named = [(request.attempt, request.rank, seq) for seq in range(*request.span)]
        if manifests and [(m.attempt, m.rank, m.seq) for m in manifests] != named:
            detail = "it does not hold the manifests that its name promises"
            raise CorruptObject(self.store.url, request.key, "read", detail)
        return manifests or None

    async def heartbeat(self, owner: Owner, session: str) -> Heartbeat:
        key = heartbeat_key(worker_name(owner[1]), owner[0])
        heartbeat = await self._read(key, Heartbeat)
        check_session_id(heartbeat, session, key, self.store.url)
        return heartbeat

    async def layout(self, digest: str) -> Layout:
        key = layout_key(digest)
        return Layout.from_json(await self.store.get(key), digest, key, self.store.url)

    async def collections(self, rank: int) -> Collections:
        return await self._read(collections_key(worker_name(rank)), Collections)

    async def sampling_changes(self, key: str) -> SamplingChanges:
        return await self._read(key, SamplingChanges)

    async def list_sessions(self) -> dict[Owner, str]:
        """List the keys of all sessions by attempt and rank."""
        keys = await self.store.list("sessions/")
        return {owner: key for key in keys if (owner := parse_session_key(key)) is not None}

    async def list_summaries(self) -> dict[Owner, str]:
        """List the keys of all summaries by attempt and rank."""
        keys = await self.store.list("summaries/")
        return {owner: key for key in keys if (owner := parse_summary_key(key)) is not None}

    async def find_orphans(self, known: Collection[Owner], expected: Iterable[Owner]) -> set[Owner]:
        """Find ranks that have manifests and whose session object is gone.

        Looks for the `expected` ranks that are not `known`; for any rank if none is known. Costs few
        requests: a rank that has not started yet has no manifests.
        """
        # Only as many as are needed to decide: the world size in a session may be any number.
        missing = (owner for owner in expected if owner not in known)
        absent = [*islice(missing, _MAX_SINGLE_LISTINGS + 1)]
        if not known or len(absent) > _MAX_SINGLE_LISTINGS:
            keys = [*await self.store.list("manifests/")]
        else:
            keys = []
            for attempt, rank in absent:
                keys += await self.store.list(f"manifests/{worker_name(rank)}/{attempt:06d}-")
        parsed = map(parse_manifest_key, keys)
        return {(one.attempt, one.rank) for one in parsed if one is not None}.difference(known)

    async def find_commit_evidence(self, owner: Owner, heartbeat: Heartbeat | None) -> str:
        """Return an object that proves that a rank without manifests had committed some, or "".

        The collections are the first record of a session. So a heartbeat that has seen a step and
        has no bytes pending was written after the first commit. Of segments, only a few are stored
        before their manifest.
        """
        attempt, worker = owner[0], worker_name(owner[1])
        if heartbeat is not None and heartbeat.step >= 0 and not heartbeat.pending_bytes:
            found = heartbeat_key(worker, attempt)
        else:
            after = segment_key(worker, attempt, MAX_UNCOMMITTED_SEGMENTS, "")
            keys = await self.store.list(f"segments/{worker}/{attempt:06d}-", after=after)
            found = keys[0] if keys else ""
        # The first manifest may have been stored while the others were read.
        if found and await self.store.list(f"manifests/{worker}/{attempt:06d}-"):
            return ""
        return found

    async def _read(self, key: str, kind: type[T]) -> T:
        return await read(self.store, key, kind)
