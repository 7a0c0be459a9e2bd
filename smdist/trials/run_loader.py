"""Reads what is new in a run's store: facts of the ranks, layouts, collections.

Runs on the event loop that owns the store; one `poll` at a time. What is immutable is read once:
sessions and manifests by their keys (a rank's manifests are listed after the last one read),
layouts by digest. A rank whose last manifest says "ended" is not asked again. A rank that has ended
before we came has left a summary: one request instead of its session and all its manifests. Of one
that runs, what has piled up is read by spans (`smdist.coordination.rolling`).

Where a coordinator has merged the run, its newest snapshot is read instead, and that is all while
the coordinator is at work (`trust` says how that is seen). Once it has said its last word, sessions are listed, in case the job was
started again without it, and each rank that did not end is asked for its next manifest, in case its
buffer was recovered; `thorough` looks closer. Of a coordinator that has gone silent, the rest is read
from the ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import msgspec

from smdist.coordination.backlog import Stretch
from smdist.coordination.loading import together
from smdist.coordination.merge import View, add
from smdist.coordination.rolling import cover
from smdist.errors import NoSuchRun, ObjectNotFound, RunReplaced, StoreForbidden, TrialError
from smdist.identity import worker_name, worker_rank
from smdist.layout import Layout
from smdist.manifest import (
    FORMAT,
    RUN_KEY,
    Collections,
    Heartbeat,
    RankManifest,
    RankSpan,
    RankSummary,
    Run,
    Session,
    Thinned,
    collections_key,
    heartbeat_key,
    layout_key,
    manifest_key,
    session_key,
)
from smdist.pipeline.attached import settle
from smdist.storage.base import Store
from smdist.trials.progress import Progress, progress_of
from smdist.trials.snapshots import Snapshot, Snapshots
from smdist.trials.trust import Care, most_age_s

__all__ = ["Loader", "News", "owner_of"]

A = TypeVar("A")
T = TypeVar("T")

_SESSION = re.compile(r"sessions/worker_(\d+)/(\d+)\.json")
_SUMMARY = re.compile(r"summaries/worker_(\d+)/(\d+)\.json")
_MANIFEST = re.compile(r"manifests/worker_(\d+)/(\d+)-(\d+)\.json")

_PAGE = 1000  # keys that a listing of a bucket gives at once
_JUST_NOW_S = 1.0  # no coordinator and no rank is expected to be faster
_CHECK_S = 5.0  # between two looks whether it is still the same run, if nothing new was read

Depth = Literal["", "manifests", "all"]
"""What the ranks are asked for; heartbeats and collections too, or not."""

Owner = tuple[int, int]
"""Attempt and rank."""


@dataclass
class News:
    """What one poll found. `base` is a snapshot to go on from. `attached` are segments that came in
    a manifest, by its key; `troubles` are objects that could not be read and were passed over."""

    base: View | None = None
    facts: View = field(default_factory=View)
    layouts: dict[str, Layout] = field(default_factory=dict)
    collections: Collections | None = None
    attached: dict[str, bytes] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)


class _Fresh(NamedTuple):
    owner: Owner
    progress: Progress
    seq: int
    key: str


def owner_of(key: str) -> Owner | None:
    """Whose manifest it is."""
    match = _MANIFEST.fullmatch(key)
    return (int(match[2]), int(match[1])) if match else None


class Loader:
    def __init__(
        self, store: Store, snapshots: Snapshots | None = None, concurrency: int = 32
    ) -> None:
        self._store = store
        self._snapshots = snapshots
        self._pinned: Snapshot | None = None
        self._untold = News()
        self._run_id = ""
        self._concurrency = concurrency
        self._sessions: set[str] = set()
        self._progress: dict[Owner, Progress] = {}
        self._layouts: set[str] = set()
        self._wanted: set[str] = set()
        self._described = False
        self._asked_at = float("-inf")  # the ranks
        self._ahead = False  # they knew more than the snapshot
        self._checked_at, self._unchecked = time.monotonic(), False
        self.replaced: RunReplaced | None = None

    async def run(self) -> Run:
        """The run's head; NoSuchRun when there is none yet."""
        try:
            data = await self._store.get(RUN_KEY)
        except ObjectNotFound:
            raise NoSuchRun(self._store.url) from None
        try:
            run = msgspec.json.decode(data, type=Run)
        except msgspec.DecodeError as error:
            raise TrialError(f"{self._store.url}: run.json is not a run's: {error}") from error
        if run.format > FORMAT:
            raise TrialError(
                f"{self._store.url} was written in format {run.format}; this smdist reads up to "
                f"{FORMAT}: install a newer one"
            )
        self._run_id = run.run_id
        return run

    async def poll(self, care: Care = "opening") -> News:
        """What is new. Nothing any more once another run is in the place of this one."""
        news = self._untold
        if self.replaced is not None:
            return news
        depth = await self._poll_snapshot(news, care)
        if depth:
            await self._poll_ranks(news, hear=depth == "all")
            self._asked_at = time.monotonic()
            if not await self._is_same(news):
                news = self._untold = News(troubles={RUN_KEY: str(self.replaced)})
        else:
            await self._each(partial(self._load_layout, news), sorted(self._wanted))
            if news.base is not None:
                await self._load_collections(news)
        return news

    def told(self) -> None:
        """What the last poll returned was taken in; until then, the next one returns it too."""
        self._untold = News()

    @property
    def unsure(self) -> bool:
        """Whether the ranks may know better than the snapshot that was loaded last."""
        pinned = self._pinned
        return pinned is not None and not pinned.pointer.final and not self._asked_just_now

    @property
    def _asked_just_now(self) -> bool:
        return time.monotonic() - self._asked_at <= _JUST_NOW_S

    async def _poll_snapshot(self, news: News, care: Care) -> Depth:
        """Move on to the newest snapshot; what the ranks are to be asked for besides."""
        if self._snapshots is None:
            return "all"
        newest = await self._snapshots.newest(self._run_id)
        news.troubles.update(self._snapshots.troubles)
        if newest is None:
            return "all"
        before, self._pinned = self._pinned, newest
        if before is None or newest.view is not before.view:
            self._resume(newest, news)
        if newest.pointer.final:
            return "all" if care != "opening" or await self._is_more() else ""
        trust = await self._snapshots.trust(newest)
        if trust == "gone" or care == "sure" or (trust == "held" and self._ahead):
            return "all"
        if care == "close":
            return "" if self._asked_just_now else "manifests"
        asked_s = time.monotonic() - self._asked_at
        if trust == "fresh" or (care == "following" and asked_s <= most_age_s(newest.pointer)):
            return ""
        return "manifests"

    async def _is_same(self, news: News) -> bool:
        """Whether what was read is of the run that was opened.

        A run claims its place before its ranks write there, so it is looked at afterwards.
        """
        due = time.monotonic() - self._checked_at >= _CHECK_S
        if not self._run_id or not (due or self._unchecked):
            return True
        try:
            found = msgspec.json.decode(await self._store.get(RUN_KEY), type=Run).run_id
        except (ObjectNotFound, msgspec.DecodeError) as error:
            news.troubles[RUN_KEY] = f"{RUN_KEY} of run {self._run_id} cannot be read: {error}"
            return True
        self._checked_at, self._unchecked = time.monotonic(), False
        if found != self._run_id:
            self.replaced = RunReplaced(self._store.url, self._run_id, found)
        return self.replaced is None

    async def _is_more(self) -> bool:
        """Whether there is something that a snapshot said to be the last one does not know."""
        if any(key not in self._sessions for key in await self._list_sessions()):
            return True
        rest = [owner for owner, progress in self._progress.items() if not progress.ended]
        if len(rest) > self._pages:
            # A whole job was lost: one listing takes fewer requests than one for each rank.
            return bool(self._lacking(await self._store.list("manifests/")))
        return any(await self._each(self._has_next, rest))

    @property
    def _pages(self) -> int:
        """Requests that a listing of all manifests takes."""
        return 1 + sum(progress.next for progress in self._progress.values()) // _PAGE

    async def _has_next(self, owner: Owner) -> bool:
        attempt, rank = owner
        try:
            await self._store.get(
                manifest_key(worker_name(rank), attempt, self._progress[owner].next)
            )
        except ObjectNotFound:
            return False
        return True

    def _resume(self, snapshot: Snapshot, news: News) -> None:
        """Take over what the snapshot has read. What we have read beyond it stays read."""
        self._ahead = False
        news.base = snapshot.view
        for digest in snapshot.layouts.keys() - self._layouts:
            news.layouts[digest] = snapshot.layouts[digest]
            self._layouts.add(digest)
        for attempt, rank, known in snapshot.view.ranks():
            theirs, ours = progress_of(known), self._progress.get((attempt, rank))
            if ours is None or (ours.upto <= theirs.upto and not ours.beyond):
                self._progress[attempt, rank] = theirs
            if known.session is not None:
                self._sessions.add(session_key(worker_name(rank), attempt))
        for sealed in snapshot.view.sealed.values():
            for chunk in sealed.chunks:
                for run in chunk.ref.runs:
                    self._wanted.update(run.layouts)
        for _, _, known in snapshot.view.ranks():
            for blocks in known.steps.values():
                self._wanted.update(entry.layout for entry in blocks if entry.layout)
        self._wanted -= self._layouts

    async def _poll_ranks(self, news: News, *, hear: bool) -> None:
        known = len(self._sessions)
        await self._poll_sessions(news)
        live = [owner for owner, progress in self._progress.items() if not progress.ended]
        fresh = await self._fresh(live, sparing=not hear)
        self._ahead = self._ahead or bool(fresh)
        if known and (fresh or len(self._sessions) > known):  # run.json was read before the first
            self._unchecked = True
        await self._load_manifests(news, fresh)
        if hear:
            await self._each(partial(self._poll_heartbeat, news), live)
        await self._each(partial(self._load_layout, news), sorted(self._wanted))
        if (live and hear) or not self._described:
            await self._load_collections(news)

    async def thinned(self) -> list[Thinned]:
        """In order of attempt and rank; ranks without a budget have none."""
        news = News()
        keys = await self._store.list("thinned/")
        read = await self._each(partial(self._decode, news, Thinned), keys)
        found = [one for one in read if one is not None]
        return sorted(found, key=lambda one: (one.attempt, worker_rank(one.worker)))

    async def _list_sessions(self) -> list[str]:
        return [key for key in await self._store.list("sessions/") if _SESSION.fullmatch(key)]

    async def _each(self, call: Callable[[A], Awaitable[T]], items: Sequence[A]) -> list[T]:
        return await together(call, items, self._concurrency)

    async def _decode(self, news: News, kind: type[T], key: str) -> T | None:
        try:
            return msgspec.json.decode(await self._store.get(key), type=kind)
        except (ObjectNotFound, msgspec.DecodeError) as error:
            news.troubles[key] = f"{key} was passed over: {error}"
            return None

    async def _poll_sessions(self, news: News) -> None:
        found = [(key, _SESSION.fullmatch(key)) for key in await self._list_sessions()]
        fresh = {
            (int(match[2]), int(match[1])): key
            for key, match in found
            if match and key not in self._sessions
        }
        if not fresh:
            return
        summarised = [
            (owner, key)
            for key in await self._store.list("summaries/")
            if (match := _SUMMARY.fullmatch(key))
            and (owner := (int(match[2]), int(match[1]))) in fresh
        ]
        await self._each(partial(self._load_summary, news), summarised)
        rest = [key for owner, key in fresh.items() if owner not in self._progress]
        read = await self._each(partial(self._decode, news, Session), rest)
        for owner in fresh:
            self._progress.setdefault(owner, Progress())
        for session in read:
            if session is not None:
                add(news.facts, session)
                if progress := self._progress.get((session.attempt, session.rank)):
                    progress.session = session.session
        self._sessions.update(fresh.values())

    async def _load_summary(self, news: News, found: tuple[Owner, str]) -> None:
        owner, key = found
        try:
            summary = msgspec.json.decode(await self._store.get(key), type=RankSummary)
        except (ObjectNotFound, msgspec.DecodeError):
            return  # the manifests say the same
        session = summary.session
        if not summary.whole or (session.attempt, session.rank) != owner:
            return
        add(news.facts, session)
        progress = self._progress[owner] = Progress(final=True)
        for manifest in summary.manifests:
            key = manifest_key(manifest.worker, manifest.attempt, manifest.seq)
            self._take(news, key, manifest)
            progress.saw(manifest.seq)

    async def _fresh(self, live: Sequence[Owner], *, sparing: bool) -> list[_Fresh]:
        """Manifests that were not read yet."""
        if sparing and len(live) > self._pages:
            return self._lacking(await self._store.list("manifests/"))
        new = [owner for owner in live if not self._progress[owner].upto]
        keys: list[str] = []
        if len(new) > 1 and 2 * len(new) > len(self._progress):
            # Most of what there is: one listing of all takes fewer requests than one for each.
            keys += await self._store.list("manifests/")
            live = [owner for owner in live if self._progress[owner].upto]
        for some in await self._each(self._list, live):
            keys += some
        return self._lacking(keys)

    def _lacking(self, keys: Iterable[str]) -> list[_Fresh]:
        found = []
        for key in keys:
            if match := _MANIFEST.fullmatch(key):
                rank, attempt, seq = map(int, match.groups())
                progress = self._progress.get((attempt, rank))
                if progress is not None and not progress.ended and progress.lacks(seq):
                    found.append(_Fresh((attempt, rank), progress, seq, key))
        return found

    async def _list(self, owner: Owner) -> Sequence[str]:
        attempt, rank = owner
        progress, worker = self._progress[owner], worker_name(rank)
        # A gap keeps the listing before it: a manifest that appears late is not overlooked.
        after = manifest_key(worker, attempt, progress.upto - 1) if progress.upto else ""
        return await self._store.list(f"manifests/{worker}/{attempt:06d}-", after=after)

    async def _load_manifests(self, news: News, fresh: Sequence[_Fresh]) -> None:
        """Those of which many follow each other by spans, where there are any; the rest one by one."""
        lacking = {(one.owner, one.seq): one for one in fresh}
        seqs: dict[Owner, list[int]] = {}
        for one in fresh:
            seqs.setdefault(one.owner, []).append(one.seq)
        stretches = [
            Stretch(*owner, self._progress[owner].session, span)
            for owner, some in seqs.items()
            for span in cover(some)
        ]
        while stretches := [s for s in stretches if s.span.length > 1 and s.session]:
            left = await self._each(partial(self._load_span, news, lacking), stretches)
            stretches = [part for parts in left for part in parts]
        await self._each(partial(self._load_manifest, news), list(lacking.values()))

    async def _load_span(
        self, news: News, lacking: dict[tuple[Owner, int], _Fresh], stretch: Stretch
    ) -> list[Stretch]:
        """What is to be asked for instead."""
        try:
            made = msgspec.json.decode(await self._store.get(stretch.key), type=RankSpan)
        except (ObjectNotFound, StoreForbidden, msgspec.DecodeError):
            return stretch.parts()  # they say the same
        manifests = stretch.found(made)
        if manifests is None:
            return stretch.parts()
        for manifest in manifests:
            fresh = lacking.pop(((manifest.attempt, manifest.rank), manifest.seq))
            self._took(news, fresh, manifest)
        return []

    async def _load_manifest(self, news: News, fresh: _Fresh) -> None:
        self._took(news, fresh, await self._decode(news, RankManifest, fresh.key))

    def _took(self, news: News, fresh: _Fresh, manifest: RankManifest | None) -> None:
        fresh.progress.saw(fresh.seq)
        if manifest is None:
            return
        self._take(news, fresh.key, manifest)
        if manifest.state == "ended":
            fresh.progress.final = True

    def _take(self, news: News, key: str, manifest: RankManifest) -> None:
        manifest, data = settle(key, manifest)
        if data:
            news.attached[key] = data
        add(news.facts, manifest)
        named = {entry.layout for entry in manifest.steps if entry.layout}
        self._wanted |= named - self._layouts

    async def _poll_heartbeat(self, news: News, owner: Owner) -> None:
        attempt, rank = owner
        key = heartbeat_key(worker_name(rank), attempt)
        try:
            beat = msgspec.json.decode(await self._store.get(key), type=Heartbeat)
        except ObjectNotFound:
            return  # a young rank has none yet
        except msgspec.DecodeError as error:
            news.troubles[key] = f"{key} was passed over: {error}"
            return
        add(news.facts, beat)

    async def _load_layout(self, news: News, digest: str) -> None:
        key = layout_key(digest)
        try:
            layout = Layout.from_json(await self._store.get(key), digest)
        except (ObjectNotFound, msgspec.DecodeError) as error:
            news.troubles[key] = f"{key} cannot be read: {error}"
            return
        news.layouts[digest] = layout
        self._layouts.add(digest)
        self._wanted.discard(digest)

    async def _load_collections(self, news: News) -> None:
        """Those of the lowest rank that has any: ranks of a job share their configuration."""
        for rank in sorted({rank for _, rank in self._progress})[:8]:
            key = collections_key(worker_name(rank))
            try:
                data = await self._store.get(key)
                news.collections = msgspec.json.decode(data, type=Collections)
            except ObjectNotFound:
                continue
            except msgspec.DecodeError as error:
                news.troubles[key] = f"{key} was passed over: {error}"
                continue
            self._described = True
            return
