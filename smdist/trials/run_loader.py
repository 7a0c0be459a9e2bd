"""Reads what is new in a run's store: facts of the ranks, layouts, collections.

Runs on the event loop that owns the store; one `poll` at a time. What is immutable is read once:
sessions and manifests by their keys (a rank's manifests are listed after the last one read),
layouts by digest. A rank whose last manifest says "ended" is not asked again. A rank that has ended
before we came has left a summary: one request instead of its session and all its manifests. Of one
that runs, what has piled up is read by spans (`smdist.format.manifest_spans`).

Where a coordinator has merged the run, its newest snapshot is read instead, and that is all while
the coordinator is at work (`trust` says how that is seen). Once it has said its last word, sessions are listed, in case the job was
started again without it, and each rank that did not end is asked for its next manifest, in case its
buffer was recovered; `thorough` looks closer. Of a coordinator that has gone silent, the rest is read
from the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple, TypeVar

from smdist.concurrency import bounded_gather
from smdist.coordination.view.membership import expected_ranks
from smdist.coordination.view.run_view import UnreadableManifest, View, add
from smdist.errors import (
    CorruptObject,
    NoSuchRun,
    ObjectNotFound,
    RunReplaced,
    SmdistError,
    StoreForbidden,
)
from smdist.format.inline_segment import extract_segment
from smdist.format.intervals import Members, subtract, to_intervals
from smdist.format.layout import Layout
from smdist.format.manifest import (
    RUN_KEY,
    Collections,
    Owner,
    RankManifest,
    Run,
    SamplingChanges,
    collections_key,
    heartbeat_key,
    layout_key,
    manifest_key,
    parse_manifest_key,
    session_key,
    summary_key,
)
from smdist.format.manifest_spans import covering_spans
from smdist.format.session_checks import contradiction, session_stand_in
from smdist.identity import worker_name, worker_rank
from smdist.storage.run_objects import RunObjects, SpanRequest
from smdist.storage.store import Store
from smdist.trials.freshness import RefreshDepth, stale_after_s
from smdist.trials.progress import ReadCursor, cursor_of
from smdist.trials.snapshot_cache import Snapshot, SnapshotCache

__all__ = ["RunLoader", "RunUpdate"]

A = TypeVar("A")
T = TypeVar("T")

_MOST_ABSENT = 16  # manifests of a rank that are missing and asked for at once
_PAGE = 1000  # keys that a listing of a bucket gives at once
_JUST_NOW_S = 1.0  # no coordinator and no rank is expected to be faster
_CHECK_S = 5.0  # between two looks whether it is still the same run, if nothing new was read

RankQuestions = Literal["", "manifests", "all"]
"""What the ranks are asked for; heartbeats and collections too, or not."""


@dataclass
class RunUpdate:
    """What one poll found. `base` is a snapshot to go on from. `attached` are segments that came in
    a manifest, by its key; `troubles` are objects that could not be read and were passed over, `recovered` are
    such that now can be."""

    base: View | None = None
    facts: View = field(default_factory=View)
    layouts: dict[str, Layout] = field(default_factory=dict)
    collections: Collections | None = None
    attached: dict[str, bytes] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)
    recovered: set[str] = field(default_factory=set)

    def passed_over(self, key: str, error: SmdistError) -> None:
        self.troubles[key] = f"{key} was passed over: {error}"


class _NewManifest(NamedTuple):
    owner: Owner
    cursor: ReadCursor
    seq: int
    key: str
    listed: bool


class RunLoader:
    def __init__(
        self, store: Store, snapshots: SnapshotCache | None = None, concurrency: int = 32
    ) -> None:
        self._store, self._objects = store, RunObjects(store)
        self._snapshots = snapshots
        self._pinned: Snapshot | None = None
        self._unconfirmed = RunUpdate()
        self._run_id = ""
        self._concurrency = concurrency
        self._sessions: set[str] = set()
        self._cursors: dict[Owner, ReadCursor] = {}
        self._layouts: set[str] = set()
        self._wanted: set[str] = set()
        self._described = False
        self._asked_at = float("-inf")  # the ranks
        self._ahead = False  # they knew more than the snapshot
        self._checked_at, self._unchecked = time.monotonic(), False
        self.replaced: RunReplaced | None = None
        self._looked = False  # for ranks without a session
        self._unread: set[str] = set()  # manifests
        self.troubles: dict[str, str] = {}  # besides those of polls

    async def run(self) -> Run:
        """The run's head; NoSuchRun when there is none yet."""
        try:
            run = await self._objects.run()
        except ObjectNotFound:
            if not await self._store.list("sessions/"):
                raise NoSuchRun(self._store.url) from None
            run = await self._objects.run()  # it came between, or was removed
        self._run_id = run.run_id
        return run

    async def poll(self, depth: RefreshDepth = "opening") -> RunUpdate:
        """What is new. Nothing any more once another run is in the place of this one."""
        update = self._unconfirmed
        if self.replaced is not None:
            return update
        asked_for = await self._poll_snapshot(update, depth)
        if asked_for:
            await self._poll_ranks(update, hear=asked_for == "all")
            self._asked_at = time.monotonic()
            if not await self._is_same(update):
                update = self._unconfirmed = RunUpdate(troubles={RUN_KEY: str(self.replaced)})
        else:
            await self._each(partial(self._load_layout, update), sorted(self._wanted))
            if update.base is not None:
                await self._load_collections(update)
        return update

    def confirm(self) -> None:
        """What the last poll returned was taken in; until then, the next one returns it too."""
        self._unconfirmed = RunUpdate()

    @property
    def snapshot_may_be_stale(self) -> bool:
        """Whether the ranks may know better than the snapshot that was loaded last."""
        pinned = self._pinned
        return pinned is not None and not pinned.pointer.final and not self._asked_just_now

    @property
    def _asked_just_now(self) -> bool:
        return time.monotonic() - self._asked_at <= _JUST_NOW_S

    async def _poll_snapshot(self, update: RunUpdate, depth: RefreshDepth) -> RankQuestions:
        """Move on to the newest snapshot; what the ranks are to be asked for besides."""
        if self._snapshots is None:
            return "all"
        newest = await self._snapshots.newest(self._run_id)
        update.troubles.update(self._snapshots.troubles)
        if newest is None:
            return "all"
        before, self._pinned = self._pinned, newest
        if before is None or newest.view is not before.view:
            self._resume(newest, update)
        if newest.pointer.final:
            return "all" if depth != "opening" or await self._is_more(update) else ""
        writer = await self._snapshots.writer_state(newest)
        if writer == "gone" or depth == "sure" or (writer == "idle" and self._ahead):
            return "all"
        if depth == "close":
            return "" if self._asked_just_now else "manifests"
        asked_s = time.monotonic() - self._asked_at
        if writer == "live" or (depth == "following" and asked_s <= stale_after_s(newest.pointer)):
            return ""
        return "manifests"

    async def _is_same(self, update: RunUpdate) -> bool:
        """Whether what was read is of the run that was opened.

        A run claims its place before its ranks write there, so it is looked at afterwards.
        """
        due = time.monotonic() - self._checked_at >= _CHECK_S
        if not self._run_id or not (due or self._unchecked):
            return True
        try:
            found = (await self._objects.run()).run_id
        except (ObjectNotFound, CorruptObject) as error:
            update.troubles[RUN_KEY] = f"{RUN_KEY} of run {self._run_id} cannot be read: {error}"
            return True
        self._checked_at, self._unchecked = time.monotonic(), False
        if found != self._run_id:
            self.replaced = RunReplaced(self._store.url, self._run_id, found)
        return self.replaced is None

    async def _is_more(self, update: RunUpdate) -> bool:
        """Whether there is something that a snapshot said to be the last one does not know."""
        if any(key not in self._sessions for key in (await self._list_sessions(update)).values()):
            return True
        rest = [owner for owner, cursor in self._cursors.items() if not cursor.ended]
        if len(rest) > self._pages:
            # A whole job was lost: one listing takes fewer requests than one for each rank.
            return bool(self._lacking(await self._store.list("manifests/")))
        return any(await self._each(self._has_next, rest))

    @property
    def _pages(self) -> int:
        """Requests that a listing of all manifests takes."""
        return 1 + sum(cursor.next for cursor in self._cursors.values()) // _PAGE

    async def _has_next(self, owner: Owner) -> bool:
        attempt, rank = owner
        try:
            await self._store.get(
                manifest_key(worker_name(rank), attempt, self._cursors[owner].next)
            )
        except ObjectNotFound:
            return False
        return True

    def _resume(self, snapshot: Snapshot, update: RunUpdate) -> None:
        """Take over what the snapshot has read. What we have read beyond it stays read."""
        self._ahead = False
        update.base = snapshot.view
        for digest in snapshot.layouts.keys() - self._layouts:
            update.layouts[digest] = snapshot.layouts[digest]
            self._layouts.add(digest)
        for attempt, rank, known in snapshot.view.ranks():
            theirs, ours = cursor_of(known), self._cursors.get((attempt, rank))
            if ours is None or (ours.upto <= theirs.upto and not ours.gaps):
                self._cursors[attempt, rank] = theirs
            if known.session is not None and known.session.is_recorded:
                self._sessions.add(session_key(worker_name(rank), attempt))
        for sealed in snapshot.view.sealed.values():
            for chunk in sealed.chunks:
                for run in chunk.ref.runs:
                    self._wanted.update(run.layouts)
        for _, _, known in snapshot.view.ranks():
            for blocks in known.steps.values():
                self._wanted.update(entry.layout for entry in blocks if entry.layout)
        self._wanted -= self._layouts

    async def _poll_ranks(self, update: RunUpdate, *, hear: bool) -> None:
        known = len(self._sessions)
        await self._poll_sessions(update)
        live = [owner for owner, cursor in self._cursors.items() if not cursor.ended]
        fresh = await self._fresh(update, live, sparing=not hear)
        self._ahead = self._ahead or bool(fresh)
        if known and (fresh or len(self._sessions) > known):  # run.json was read before the first
            self._unchecked = True
        await self._load_manifests(update, fresh)
        if hear:
            await self._each(partial(self._poll_heartbeat, update), live)
        await self._each(partial(self._load_layout, update), sorted(self._wanted))
        if (live and hear) or not self._described:
            await self._load_collections(update)

    async def thinned(self) -> list[SamplingChanges]:
        """In order of attempt and rank; ranks without a budget have none."""
        update = RunUpdate(troubles=self.troubles)
        keys = await self._store.list("thinned/")
        found = [t for t in await self._each(partial(self._thinned, update), keys) if t is not None]
        return sorted(found, key=lambda one: (one.attempt, worker_rank(one.worker)))

    async def _list_sessions(self, update: RunUpdate) -> dict[Owner, str]:
        listed = await self._objects.list_sessions()
        for key in self._sessions.difference(listed.values()):
            update.troubles[key] = f"{key} is gone; what it said is known from elsewhere"
        return listed

    async def _each(self, call: Callable[[A], Awaitable[T]], items: Sequence[A]) -> list[T]:
        return await bounded_gather(call, items, self._concurrency)

    async def _thinned(self, update: RunUpdate, key: str) -> SamplingChanges | None:
        try:
            return await self._objects.sampling_changes(key)
        except (ObjectNotFound, CorruptObject) as error:
            update.passed_over(key, error)
            return None

    async def _poll_sessions(self, update: RunUpdate) -> None:
        listed = await self._list_sessions(update)
        fresh = {owner for owner, key in listed.items() if key not in self._sessions}
        first = not self._looked and self._pinned is None
        self._looked = True
        if fresh or first:
            found = await self._objects.list_summaries()
            fresh |= found.keys() - listed.keys() if first else set()
            unread = fresh.difference(self._cursors)
            summarised = [(owner, key) for owner, key in found.items() if owner in unread]
            await self._each(partial(self._load_summary, update), summarised)
        await self._each(partial(self._load_session, update, listed), sorted(fresh))
        if first:
            expected = (
                (attempt, rank)
                for attempt in sorted(update.facts.attempts)
                for rank in expected_ranks(update.facts, attempt)
            )
            orphans = await self._objects.find_orphans({*listed, *self._cursors}, expected)
            await self._each(partial(self._load_session, update, listed), sorted(orphans))

    async def _load_session(
        self, update: RunUpdate, listed: Mapping[Owner, str], owner: Owner
    ) -> None:
        """Read the session of `owner`, unless its summary was read.

        A session of another run is read again at the next poll: its uploader may correct it.
        """
        attempt, rank = owner
        key = session_key(worker_name(rank), attempt)
        cursor = self._cursors.get(owner, ReadCursor(foreign=True))
        if not cursor.foreign and owner in listed:
            self._sessions.add(key)
            return
        cursor.foreign = False
        try:
            session = await self._objects.session(owner)
        except (ObjectNotFound, CorruptObject) as error:
            update.passed_over(key, error)
        else:
            if why := contradiction(session, self._run_id, cursor.session):
                cursor.foreign = True
                update.troubles[key] = f"{key} is not believed: {why}"
            else:
                cursor.session = session.session
                add(update.facts, session)
                update.recovered |= {key, summary_key(worker_name(rank), attempt)}
        self._cursors[owner] = cursor
        if owner in listed and not cursor.foreign:
            self._sessions.add(key)

    async def _load_summary(self, update: RunUpdate, found: tuple[Owner, str]) -> None:
        owner, key = found
        try:
            summary = await self._objects.summary(owner, self._run_id)
        except ObjectNotFound:
            return
        except CorruptObject as error:
            update.passed_over(key, error)  # the manifests say the same
            return
        session = summary.session
        add(update.facts, session)
        cursor = self._cursors[owner] = ReadCursor(final=True, session=session.session)
        for manifest in summary.manifests:
            key = manifest_key(manifest.worker, manifest.attempt, manifest.seq)
            self._take(update, key, manifest)
            cursor.saw(manifest.seq)  # a summary has them from the first to the last

    async def _fresh(
        self, update: RunUpdate, live: Sequence[Owner], *, sparing: bool
    ) -> list[_NewManifest]:
        """Manifests that were not read yet."""
        keys = await self._list_manifests(live, sparing=sparing)
        some = {key.rpartition("-")[0]: key for key in keys}.values()  # one of each
        parsed = filter(None, map(parse_manifest_key, some))
        owners = {(one.attempt, one.rank) for one in parsed}
        # Of a rank that has just come, or whose session was removed.
        strangers = sorted(owners.difference(self._cursors))
        await self._each(partial(self._load_session, update, {}), strangers)
        return self._lacking(keys)

    async def _list_manifests(self, live: Sequence[Owner], *, sparing: bool) -> list[str]:
        if sparing and len(live) > self._pages:
            return [*await self._store.list("manifests/")]
        new = [owner for owner in live if not self._cursors[owner].upto]
        keys: list[str] = []
        if len(new) > 1 and 2 * len(new) > len(self._cursors):
            # Most of what there is: one listing of all takes fewer requests than one for each.
            keys += await self._store.list("manifests/")
            live = [owner for owner in live if self._cursors[owner].upto]
        for some in await self._each(self._list, live):
            keys += some
        return keys

    def _lacking(self, keys: Iterable[str]) -> list[_NewManifest]:
        found: dict[Owner, set[int]] = {}
        for key in keys:
            if (named := parse_manifest_key(key)) is not None:
                attempt, rank, seq = named
                cursor = self._cursors.get((attempt, rank))
                if cursor is not None and not cursor.ended:
                    found.setdefault((attempt, rank), set()).add(seq)
        fresh = []
        for owner, seqs in found.items():
            cursor, worker = self._cursors[owner], worker_name(owner[1])
            # What is not there though later ones are is asked for, too: it should be.
            absent = subtract(((cursor.upto, max(seqs)),), to_intervals(seqs))
            wanted = {*islice(Members(cursor.lacked(absent)), _MOST_ABSENT)}
            wanted.update(filter(cursor.lacks, seqs))
            fresh += [
                _NewManifest(owner, cursor, seq, manifest_key(worker, owner[0], seq), seq in seqs)
                for seq in sorted(wanted)
            ]
        return fresh

    async def _list(self, owner: Owner) -> Sequence[str]:
        attempt, rank = owner
        cursor, worker = self._cursors[owner], worker_name(rank)
        # A gap keeps the listing before it: a manifest that appears late is not overlooked.
        after = manifest_key(worker, attempt, cursor.upto - 1) if cursor.upto else ""
        newest = attempt == max(a for a, r in self._cursors if r == rank)
        prefix = f"manifests/{worker}/"  # with attempts that we do not know of
        if newest:
            return await self._store.list(prefix, after=after or f"{prefix}{attempt:06d}")
        return await self._store.list(f"{prefix}{attempt:06d}-", after=after)

    async def _load_manifests(self, update: RunUpdate, fresh: Sequence[_NewManifest]) -> None:
        """Those of which many follow each other by spans, where there are any; the rest one by one."""
        lacking = {(one.owner, one.seq): one for one in fresh}
        seqs: dict[Owner, list[int]] = {}
        for one in fresh:
            if one.listed:  # what was removed does not come back by a span
                seqs.setdefault(one.owner, []).append(one.seq)
        requests = [
            SpanRequest(*owner, self._cursors[owner].session, span)
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
        """What is to be asked for instead."""
        try:
            manifests = await self._objects.span(request)
        except (ObjectNotFound, StoreForbidden):
            manifests = None
        except CorruptObject as error:
            update.passed_over(request.key, error)
            manifests = None
        if manifests is None:
            return request.children()  # they say the same
        for manifest in manifests:
            fresh = lacking.pop(((manifest.attempt, manifest.rank), manifest.seq))
            self._took(update, fresh, manifest)
        return []

    async def _load_manifest(self, update: RunUpdate, fresh: _NewManifest) -> None:
        """One that cannot be read is asked for again the next time: its writer may put it anew."""
        try:
            manifest = await self._objects.manifest(fresh.owner, fresh.seq, fresh.cursor.session)
        except (ObjectNotFound, CorruptObject) as error:
            update.passed_over(fresh.key, error)
            add(update.facts, UnreadableManifest(*fresh.owner, fresh.seq))
            self._unread.add(fresh.key)
            return
        self._took(update, fresh, manifest)

    def _took(self, update: RunUpdate, fresh: _NewManifest, manifest: RankManifest) -> None:
        fresh.cursor.saw(fresh.seq)
        if fresh.key in self._unread:
            self._unread.remove(fresh.key)
            update.recovered.add(fresh.key)
            update.troubles.pop(fresh.key, None)
        if not fresh.cursor.session:
            fresh.cursor.session = manifest.session
            add(update.facts, session_stand_in(manifest, foreign=fresh.cursor.foreign))
        self._take(update, fresh.key, manifest)
        if manifest.state == "ended":
            fresh.cursor.final = True

    def _take(self, update: RunUpdate, key: str, manifest: RankManifest) -> None:
        manifest, data = extract_segment(key, manifest)
        if data:
            update.attached[key] = data
        add(update.facts, manifest)
        named = {entry.layout for entry in manifest.steps if entry.layout}
        self._wanted |= named - self._layouts

    async def _poll_heartbeat(self, update: RunUpdate, owner: Owner) -> None:
        attempt, rank = owner
        key = heartbeat_key(worker_name(rank), attempt)
        try:
            beat = await self._objects.heartbeat(owner, self._cursors[owner].session)
        except ObjectNotFound:
            return  # a young rank has none yet
        except CorruptObject as error:
            update.passed_over(key, error)
            return
        add(update.facts, beat)

    async def _load_layout(self, update: RunUpdate, digest: str) -> None:
        key = layout_key(digest)
        try:
            layout = await self._objects.layout(digest)
        except (ObjectNotFound, CorruptObject) as error:
            update.troubles[key] = f"{key} cannot be read: {error}"
            return
        update.layouts[digest] = layout
        self._layouts.add(digest)
        self._wanted.discard(digest)

    async def _load_collections(self, update: RunUpdate) -> None:
        """Those of the lowest rank that has any: ranks of a job share their configuration."""
        for rank in sorted({rank for _, rank in self._cursors})[:8]:
            key = collections_key(worker_name(rank))
            try:
                update.collections = await self._objects.collections(rank)
            except ObjectNotFound:
                continue
            except CorruptObject as error:
                update.passed_over(key, error)
                continue
            self._described = True
            return
