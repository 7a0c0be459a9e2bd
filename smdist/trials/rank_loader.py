"""Read what is new of the ranks of a run: sessions, summaries, manifests and heartbeats.

Called by `RunLoader`, one poll at a time, on the event loop that owns the store. Immutable objects are
read once. A rank's manifests are listed from the last one read on; many that follow each other are read
by spans (`smdist.format.manifest_spans`). A rank that ended before the first poll has left a summary:
one request instead of its session and all its manifests. A rank that has ended is not read again.

Damaged and missing objects do not stop a poll: they become `RunUpdate.troubles`. Other errors of the
store are raised.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from smdist.concurrency import bounded_gather
from smdist.coordination.view.membership import expected_ranks
from smdist.coordination.view.read_cursor import ReadCursor
from smdist.coordination.view.run_view import RankView, UnreadableManifest, View, add
from smdist.errors import CorruptObject, ObjectNotFound, SmdistError, StoreForbidden
from smdist.format.inline_segment import extract_segment
from smdist.format.intervals import Members, subtract, to_intervals
from smdist.format.layout import Layout
from smdist.format.manifest import (
    Collections,
    Owner,
    RankManifest,
    heartbeat_key,
    manifest_key,
    parse_manifest_key,
    session_key,
    summary_key,
)
from smdist.format.manifest_spans import covering_spans
from smdist.format.session_checks import contradiction, session_stand_in
from smdist.identity import worker_name
from smdist.storage.run_objects import RunObjects, SpanRequest

__all__ = ["RankLoader", "RunUpdate"]

A = TypeVar("A")
T = TypeVar("T")

_MAX_ABSENT = 16  # missing manifests of a rank that are requested in one poll
_KEYS_PER_PAGE = 1000  # of a listing of a bucket
_MAX_CHECKED = 64  # ranks without manifests that are checked in one poll
_YOUNG_S = 60.0  # a younger rank may not have stored anything yet


@dataclass
class RunUpdate:
    """What one poll found.

    `base` is a snapshot that replaces everything before. `attached` are segments that came in a
    manifest, by its key. `named_layouts` are digests that new manifests name. `troubles` are objects
    that could not be read, by key; `recovered` are keys of such that were read now.
    """

    base: View | None = None
    facts: View = field(default_factory=View)
    layouts: dict[str, Layout] = field(default_factory=dict)
    collections: Collections | None = None
    attached: dict[str, bytes] = field(default_factory=dict)
    named_layouts: set[str] = field(default_factory=set)
    troubles: dict[str, str] = field(default_factory=dict)
    recovered: set[str] = field(default_factory=set)

    def report(self, key: str, error: SmdistError) -> None:
        self.troubles[key] = f"{key} was ignored: {error}"

    def ranks(self, owner: Owner) -> list[RankView]:
        """Return what this update knows of a rank: of the new facts and of the snapshot."""
        views = [self.facts] if self.base is None else [self.facts, self.base]
        return [known for view in views if (known := view.rank(*owner)) is not None]


class _NewManifest(NamedTuple):
    """A manifest to read. Not `listed`: it is missing although later ones are there."""

    owner: Owner
    seq: int
    listed: bool

    @property
    def key(self) -> str:
        return manifest_key(worker_name(self.owner[1]), self.owner[0], self.seq)


class RankNews(NamedTuple):
    """What a poll of the ranks met. `late`: something new although sessions were known before."""

    manifests: bool
    live: bool
    late: bool


class RankLoader:
    """Remembers how far each rank was read. `run_id` is set before the first poll."""

    def __init__(self, objects: RunObjects, concurrency: int) -> None:
        self.run_id = ""
        self.cursors: dict[Owner, ReadCursor] = {}
        self._objects, self._store = objects, objects.store
        self._concurrency = concurrency
        self._sessions: set[str] = set()  # keys that were read
        self._unreadable: set[str] = set()  # keys of manifests
        self._polled = False
        self._resumed = False

    def resume(self, view: View) -> None:
        """Continue behind what a snapshot holds. What was read beyond it stays read."""
        self._resumed = True
        for attempt, rank, known in view.ranks():
            theirs, ours = ReadCursor.of(known), self.cursors.get((attempt, rank))
            if ours is None or (ours.upto <= theirs.upto and not ours.has_gaps):
                self.cursors[attempt, rank] = theirs
            if known.session is not None and known.session.is_recorded:
                self._sessions.add(session_key(worker_name(rank), attempt))

    async def poll(self, update: RunUpdate, *, heartbeats: bool) -> RankNews:
        """Read what is new into `update`."""
        known = len(self._sessions)
        await self._poll_sessions(update)
        live = self.live()
        fresh = await self._find_new(update, live, prefer_one_listing=not heartbeats)
        await self._load_manifests(update, fresh)
        if heartbeats:
            await self._each(partial(self._load_heartbeat, update), live)
        grown = bool(fresh) or len(self._sessions) > known
        return RankNews(bool(fresh), bool(live), known > 0 and grown)

    def live(self) -> list[Owner]:
        return [owner for owner, cursor in self.cursors.items() if not cursor.ended]

    async def has_more(self, update: RunUpdate) -> bool:
        """Return whether there is anything that a snapshot which claims to be the last lacks."""
        if any(key not in self._sessions for key in (await self._list_sessions(update)).values()):
            return True
        rest = self.live()
        if len(rest) > self._listing_pages:
            # A whole job was lost: one listing takes fewer requests than one for each rank.
            return bool(self._not_read(await self._store.list("manifests/")))
        return any(await self._each(self._has_next, rest))

    async def report_lost_manifests(self, update: RunUpdate) -> None:
        """Find ranks that have committed something and of which no manifest is left.

        Without a manifest such a rank looks as if it was lost before its first step.
        """
        silent = (o for o, c in self.cursors.items() if not c.next and not c.final)
        some = [o for o in silent if _may_have_committed(update.ranks(o))]
        await self._each(partial(self._check_manifests, update), some[:_MAX_CHECKED])

    async def _check_manifests(self, update: RunUpdate, owner: Owner) -> None:
        beats = [known.heartbeat for known in update.ranks(owner)]
        beat = next((beat for beat in beats if beat is not None), None)
        evidence = await self._objects.find_commit_evidence(owner, beat)
        if evidence:
            first = _NewManifest(owner, 0, listed=False)
            text = f"{first.key} and all others of this rank are missing, although {evidence} shows"
            update.troubles[first.key] = f"{text} that some were stored"
            add(update.facts, UnreadableManifest(*owner, 0))
            self._unreadable.add(first.key)

    async def _each(self, call: Callable[[A], Awaitable[T]], items: Iterable[A]) -> list[T]:
        return await bounded_gather(call, items, self._concurrency)

    # -- sessions ----------------------------------------------------------------------------

    async def _list_sessions(self, update: RunUpdate) -> dict[Owner, str]:
        listed = await self._objects.list_sessions()
        for key in self._sessions.difference(listed.values()):
            update.troubles[key] = f"{key} is gone; its content is known from elsewhere"
        return listed

    async def _poll_sessions(self, update: RunUpdate) -> None:
        listed = await self._list_sessions(update)
        fresh = {owner for owner, key in listed.items() if key not in self._sessions}
        first = not self._polled and not self._resumed
        self._polled = True
        if fresh or first:
            found = await self._objects.list_summaries()
            fresh |= found.keys() - listed.keys() if first else set()
            unread = fresh.difference(self.cursors)
            await self._each(
                partial(self._load_summary, update), [owner for owner in found if owner in unread]
            )
        await self._each(partial(self._load_session, update, listed), sorted(fresh))
        if first:
            expected = (
                (attempt, rank)
                for attempt in sorted(update.facts.attempts)
                for rank in expected_ranks(update.facts, attempt)
            )
            orphans = await self._objects.find_orphans({*listed, *self.cursors}, expected)
            await self._each(partial(self._load_session, update, listed), sorted(orphans))

    async def _load_session(
        self, update: RunUpdate, listed: Mapping[Owner, str], owner: Owner
    ) -> None:
        """Read the session of `owner`, unless its summary was read.

        A session of another run is read again at the next poll: its uploader may correct it.
        """
        attempt, rank = owner
        key = session_key(worker_name(rank), attempt)
        cursor = self.cursors.get(owner, ReadCursor(foreign=True))
        if not cursor.foreign and owner in listed:
            self._sessions.add(key)
            return
        cursor.foreign = False
        try:
            session = await self._objects.session(owner)
        except (ObjectNotFound, CorruptObject) as error:
            update.report(key, error)
        else:
            if why := contradiction(session, self.run_id, cursor.session):
                cursor.foreign = True
                update.troubles[key] = f"{key} is not believed: {why}"
            else:
                cursor.session = session.session
                add(update.facts, session)
                update.recovered |= {key, summary_key(worker_name(rank), attempt)}
        self.cursors[owner] = cursor
        if owner in listed and not cursor.foreign:
            self._sessions.add(key)

    async def _load_summary(self, update: RunUpdate, owner: Owner) -> None:
        try:
            summary = await self._objects.summary(owner, self.run_id)
        except ObjectNotFound:
            return
        except CorruptObject as error:
            update.report(error.key, error)  # the manifests hold the same
            return
        session = summary.session
        add(update.facts, session)
        cursor = self.cursors[owner] = ReadCursor(final=True, session=session.session)
        for manifest in summary.manifests:
            _add_manifest(update, manifest)
            cursor.mark_read(manifest.seq)  # a summary holds them from the first to the last

    # -- manifests ---------------------------------------------------------------------------

    @property
    def _listing_pages(self) -> int:
        """Estimate the requests that a listing of all manifests takes."""
        return 1 + sum(cursor.next for cursor in self.cursors.values()) // _KEYS_PER_PAGE

    async def _has_next(self, owner: Owner) -> bool:
        attempt, rank = owner
        key = manifest_key(worker_name(rank), attempt, self.cursors[owner].next)
        try:
            await self._store.get(key)
        except ObjectNotFound:
            return False
        return True

    async def _find_new(
        self, update: RunUpdate, live: Sequence[Owner], *, prefer_one_listing: bool
    ) -> list[_NewManifest]:
        keys = await self._list_manifests(live, prefer_one_listing)
        one_of_each = {key.rpartition("-")[0]: key for key in keys}.values()
        parsed = filter(None, map(parse_manifest_key, one_of_each))
        # Ranks that have just come, or whose session object was removed.
        unknown = sorted({(one.attempt, one.rank) for one in parsed}.difference(self.cursors))
        await self._each(partial(self._load_session, update, {}), unknown)
        return self._not_read(keys)

    async def _list_manifests(self, live: Sequence[Owner], prefer_one_listing: bool) -> list[str]:
        if prefer_one_listing and len(live) > self._listing_pages:
            return [*await self._store.list("manifests/")]
        new = [owner for owner in live if not self.cursors[owner].upto]
        keys: list[str] = []
        if len(new) > 1 and 2 * len(new) > len(self.cursors):
            # Most of what there is: one listing of all takes fewer requests than one for each.
            keys += await self._store.list("manifests/")
            live = [owner for owner in live if self.cursors[owner].upto]
        for some in await self._each(self._list_rank, live):
            keys += some
        return keys

    async def _list_rank(self, owner: Owner) -> Sequence[str]:
        attempt, rank = owner
        cursor, worker = self.cursors[owner], worker_name(rank)
        # A gap keeps the listing before it: a manifest that appears late is not overlooked.
        after = manifest_key(worker, attempt, cursor.upto - 1) if cursor.upto else ""
        newest = attempt == max(a for a, r in self.cursors if r == rank)
        prefix = f"manifests/{worker}/"  # finds attempts that are not known yet
        if newest:
            return await self._store.list(prefix, after=after or f"{prefix}{attempt:06d}")
        return await self._store.list(f"{prefix}{attempt:06d}-", after=after)

    def _not_read(self, keys: Iterable[str]) -> list[_NewManifest]:
        """Return the manifests among `keys` that were not read, and those missing between them."""
        found: dict[Owner, set[int]] = {}
        for named in filter(None, map(parse_manifest_key, keys)):
            cursor = self.cursors.get((named.attempt, named.rank))
            if cursor is not None and not cursor.ended:
                found.setdefault((named.attempt, named.rank), set()).add(named.seq)
        fresh = []
        for owner, seqs in found.items():
            cursor = self.cursors[owner]
            absent = subtract(((cursor.upto, max(seqs)),), to_intervals(seqs))
            wanted = {*islice(Members(cursor.unread(absent)), _MAX_ABSENT)}
            wanted.update(filter(cursor.lacks, seqs))
            fresh += [_NewManifest(owner, seq, seq in seqs) for seq in sorted(wanted)]
        return fresh

    async def _load_manifests(self, update: RunUpdate, fresh: Sequence[_NewManifest]) -> None:
        """Read manifests by spans where many follow each other, the rest one by one."""
        lacking = {(one.owner, one.seq): one for one in fresh}
        seqs: dict[Owner, list[int]] = {}
        for one in fresh:
            if one.listed:  # a span must not bring back what was removed
                seqs.setdefault(one.owner, []).append(one.seq)
        requests = [
            SpanRequest(*owner, self.cursors[owner].session, span)
            for owner, some in seqs.items()
            for span in covering_spans(some)
        ]
        while requests := [r for r in requests if r.span.length > 1 and r.session]:
            left = await self._each(partial(self._load_span, update, lacking), requests)
            requests = [child for children in left for child in children]
        await self._each(partial(self._load_manifest, update), list(lacking.values()))

    async def _load_span(
        self,
        update: RunUpdate,
        lacking: dict[tuple[Owner, int], _NewManifest],
        request: SpanRequest,
    ) -> list[SpanRequest]:
        """Read a span and take its manifests out of `lacking`; return what to read instead."""
        try:
            manifests = await self._objects.span(request)
        except (ObjectNotFound, StoreForbidden):
            manifests = None
        except CorruptObject as error:
            update.report(request.key, error)
            manifests = None
        if manifests is None:
            return request.children()
        for manifest in manifests:
            fresh = lacking.pop(((manifest.attempt, manifest.rank), manifest.seq))
            self._accept(update, fresh, manifest)
        return []

    async def _load_manifest(self, update: RunUpdate, fresh: _NewManifest) -> None:
        """Read one manifest. A damaged one is read again at the next poll: it may be repaired."""
        session = self.cursors[fresh.owner].session
        try:
            manifest = await self._objects.manifest(fresh.owner, fresh.seq, session)
        except (ObjectNotFound, CorruptObject) as error:
            update.report(fresh.key, error)
            add(update.facts, UnreadableManifest(*fresh.owner, fresh.seq))
            self._unreadable.add(fresh.key)
            return
        self._accept(update, fresh, manifest)

    def _accept(self, update: RunUpdate, fresh: _NewManifest, manifest: RankManifest) -> None:
        cursor = self.cursors[fresh.owner]
        cursor.mark_read(fresh.seq)
        if fresh.key in self._unreadable:
            self._unreadable.remove(fresh.key)
            update.recovered.add(fresh.key)
            update.troubles.pop(fresh.key, None)
        if not cursor.session:
            cursor.session = manifest.session
            add(update.facts, session_stand_in(manifest, foreign=cursor.foreign))
        _add_manifest(update, manifest)
        if manifest.state == "ended":
            cursor.final = True

    async def _load_heartbeat(self, update: RunUpdate, owner: Owner) -> None:
        try:
            beat = await self._objects.heartbeat(owner, self.cursors[owner].session)
        except ObjectNotFound:
            return  # a young rank has none yet
        except CorruptObject as error:
            update.report(heartbeat_key(worker_name(owner[1]), owner[0]), error)
            return
        add(update.facts, beat)


def _add_manifest(update: RunUpdate, manifest: RankManifest) -> None:
    key = manifest_key(manifest.worker, manifest.attempt, manifest.seq)
    manifest, data = extract_segment(key, manifest)
    if data:
        update.attached[key] = data
    add(update.facts, manifest)
    update.named_layouts |= {entry.layout for entry in manifest.steps if entry.layout}


def _may_have_committed(known: Sequence[RankView]) -> bool:
    """Return whether a rank without manifests is worth a request: it is old, or has seen a step."""
    beats = [rank.heartbeat for rank in known if rank.heartbeat is not None]
    started = [rank.session.started for rank in known if rank.session is not None]
    if beats:
        return max(beat.step for beat in beats) >= 0
    return bool(started) and time.time() - max(started) > _YOUNG_S
