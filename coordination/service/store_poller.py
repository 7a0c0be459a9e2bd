"""Reads what is new in a run from its store, rank by rank, without listing manifests.

A rank's manifests are numbered without gaps, so the next one is asked for by its key: one small
request, "not found" most of the time when nothing is new. A rank is asked when its next manifest is
to be expected, by how often it wrote so far; one that is silent is asked less and less often, also
one that was lost, since its buffer may be recovered; one that has ended never again. What has piled up
is listed, and read by spans (`rolling.py`). Who takes part is in the listing of `sessions/`, now and
then. `hint` makes a rank due at once.

Runs on one event loop; one `poll` at a time. What is found is handed to `take`, one fact at a
time, and never again. No answer of a store ends it: what fails is tried again, later and later, and
`troubles` says so.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import TypeVar

from smdist.concurrency import bounded_gather
from smdist.coordination.service.poll_schedule import PollIntervals, RankTrack, resume_track
from smdist.coordination.view.membership import LastContact
from smdist.coordination.view.run_view import Fact, View, World
from smdist.coordination.view.span_reader import read_in_order
from smdist.errors import CorruptObject, ObjectNotFound, SmdistError, StoreForbidden
from smdist.format.inline_segment import extract_segment
from smdist.format.intervals import Members
from smdist.format.layout import Layout
from smdist.format.manifest import (
    RUN_KEY,
    Owner,
    RankManifest,
    Session,
    heartbeat_key,
    layout_key,
    session_key,
    summary_key,
)
from smdist.format.manifest_spans import ManifestSpan, covering_spans
from smdist.format.session_checks import contradiction, session_stand_in
from smdist.identity import worker_name, worker_rank
from smdist.storage.run_objects import RunObjects, SpanRequest
from smdist.storage.store import Store

__all__ = ["PollCounts", "PollIntervals", "RankTrack", "StorePoller"]

A = TypeVar("A")
T = TypeVar("T")

_SEQ = re.compile(r"(\d+)\.json")
_MOST_WINDOW = 16  # manifests of a rank asked for at once, when it has a backlog
_MOST_AT_ONCE = 64  # manifests of a rank in one poll: snapshots go on while a backlog is read
_MOST_BY_SPANS = 4096  # likewise, where one request is for many
_MOST_IN_POLL = 8192  # and of all; who got no turn is first in the next
_MOST_SEEK_S = 3600.0
_MOST_ERRORS = 8  # in a poll, without a success: the store is down, the rest need not try


@dataclass
class PollCounts:
    """What one poll handed on."""

    manifests: int = 0
    sessions: int = 0
    beats: int = 0
    layouts: int = 0

    @property
    def facts(self) -> int:
        return self.manifests + self.sessions + self.layouts


@dataclass
class StorePoller:
    store: Store
    take: Callable[[Fact], None]
    now: Callable[[], float]
    rhythm: PollIntervals = field(default_factory=PollIntervals)
    concurrency: int = 64
    share: tuple[int, int] = (0, 1)  # index and number: only ranks with that remainder
    layouts: dict[str, Layout] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)  # by key: what cannot be read
    tracks: dict[Owner, RankTrack] = field(default_factory=dict)
    hints: int = 0
    _wanted: dict[str, float] = field(default_factory=dict)  # layouts, and when to ask for them
    _discover_at: float = 0.0
    _changed_at: float = 0.0
    _summaries: bool = True
    _errors: int = 0
    _looked: bool = False  # for more ranks, since the last one has said its last word
    _run_id: str = ""
    _worlds: set[tuple[int, World]] = field(default_factory=set)  # by attempt
    _unanswered: set[str] = field(default_factory=set)  # keys of which the store said nothing

    def __post_init__(self) -> None:
        self._objects = RunObjects(self.store)

    # -- where it stands -------------------------------------------------------------------------

    def adopt(self, view: View, layouts: Mapping[str, Layout], named: Iterable[str]) -> None:
        """Go on behind what `view` knows; `named` are the layouts that it names."""
        now = self.now()
        self.layouts.update(layouts)
        self.want(named)
        for attempt, rank, known in view.ranks():
            self.tracks[attempt, rank] = resume_track(attempt, rank, known, now)

    def want(self, digests: Iterable[str]) -> None:
        for digest in digests:
            if digest and digest not in self.layouts:
                self._wanted.setdefault(digest, 0.0)

    def hint(self, worker: str, attempt: int, seq: int) -> None:
        """That manifest is there. What is known already, or makes no sense, changes nothing."""
        try:
            owner = (attempt, worker_rank(worker))
        except ValueError:
            return
        self.hints += 1
        track = self.tracks.get(owner)
        if track is None:
            self._discover_at = 0.0
        elif not track.ended and seq >= track.seq:
            track.hinted, track.due_at = max(track.hinted, seq), 0.0

    @property
    def settled(self) -> bool:
        """Every rank has said its last word, all that they named was read, and none came since."""
        tracks = self.tracks.values()
        some = bool(tracks) or self.share[1] > 1
        done = some and all(t.final and t.farewell for t in tracks)
        return done and self._looked and not self._wanted

    @property
    def failing(self) -> bool:
        """The store gave no answer at the end of the last poll."""
        return self._errors > 0

    def next_due(self) -> float:
        """When there is something to ask for, by the clock."""
        due = [self._discover_at, *self._wanted.values()]
        due += [track.due_at for track in self.tracks.values() if not track.ended]
        due += [t.beat_due_at for t in self.tracks.values() if t.final and not t.farewell]
        return min(due)

    def hearing(self) -> dict[Owner, LastContact]:
        """When each rank was heard of, by our clock."""
        return {o: LastContact(t.met_at, t.heard_at, t.alive_at) for o, t in self.tracks.items()}

    # -- asking ----------------------------------------------------------------------------------

    async def poll(self) -> PollCounts:
        found, self._errors = PollCounts(), 0
        if self.now() >= self._discover_at:
            await self.discover(found)
        now = self.now()
        live = [track for track in self.tracks.values() if not track.final]
        asked = (track for track in self.tracks.values() if not track.ended)
        due = sorted((t for t in asked if t.due_at <= now), key=lambda track: track.due_at)
        await self._each(lambda track: self._read(track, found), due)
        beating = [track for track in self.tracks.values() if self._beat_due(track, now)]
        await self._each(lambda track: self._beat(track, found), beating)
        stuck = [track for track in live if self._stuck(track)]
        await self._each(lambda track: self._seek(track, found), stuck)
        wanted = [digest for digest, at in self._wanted.items() if at <= now]
        await self._each(lambda digest: self._layout(digest, found), wanted)
        return found

    async def _each(self, call: Callable[[A], Awaitable[None]], items: Iterable[A]) -> None:
        gate = asyncio.Semaphore(self.concurrency)

        async def guarded(item: A) -> None:
            async with gate:
                if self._errors < _MOST_ERRORS:
                    await call(item)

        tasks = [asyncio.ensure_future(guarded(item)) for item in items]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _counted(self, reading: Awaitable[T]) -> T | None:
        """Await a read, None if the object is not there, and count errors of the store in a row."""
        try:
            value = await reading
        except ObjectNotFound:
            self._errors = 0
            return None
        except CorruptObject:  # the store has answered
            self._errors = 0
            raise
        except (SmdistError, OSError):
            self._errors += 1
            raise
        self._errors = 0
        return value

    async def _list(self, prefix: str, after: str) -> Sequence[str]:
        try:
            return await self.store.list(prefix, after=after)
        except (SmdistError, OSError):
            self._errors += 1
            raise

    # -- who takes part --------------------------------------------------------------------------

    async def discover(self, found: PollCounts) -> None:
        now, rhythm, share = self.now(), self.rhythm, self.share
        try:
            listed = await self._objects.list_sessions()
            owners = {o: key for o, key in listed.items() if o[1] % share[1] == share[0]}
            fresh = {owner: key for owner, key in owners.items() if self._session_due(owner)}
            new = not fresh.keys() <= self.tracks.keys()
            if fresh and not self._run_id:
                run = await self._bearing(RUN_KEY, self._objects.run())
                self._run_id = run.run_id if run is not None else ""
            if self._summaries:
                await self._load_summaries(owners, found)
        except (SmdistError, OSError) as error:
            self.troubles["sessions/"] = f"sessions cannot be listed: {error}"
            self._discover_at = now + rhythm.discover_s
            return
        self._looked = True
        first, self._summaries = self._summaries, False  # who comes from now on is alive
        self.troubles.pop("sessions/", None)
        if new:
            self._changed_at = now
        rest = [(owner, key) for owner, key in fresh.items() if self._session_due(owner)]
        await self._each(lambda item: self._session(*item, found), rest)
        if first and not self.failing:
            await self._adopt_orphans(found)
        young = now - self._changed_at < rhythm.young_s
        # A listing of many is several requests.
        every_s = rhythm.interval_s if young else max(rhythm.discover_s, self.quiet_s)
        self._discover_at = now + max(every_s, len(owners) / 2000)

    @property
    def quiet_s(self) -> float:
        """How long to leave a job alone of which nothing is heard, and which has not ended."""
        live = [track.alive_at for track in self.tracks.values() if not track.final]
        return self.rhythm.silence(self.now() - max(live)) if live else 0.0

    async def look_again(self, found: PollCounts) -> None:
        """For ranks, and for more of those that did not end: once, in a run that is not followed."""
        await self.discover(found)
        rest = [track for track in self.tracks.values() if not track.ended]
        await self._each(lambda track: self._read(track, found), rest)

    def _session_due(self, owner: Owner) -> bool:
        """Return whether the session was not read, or has to be corrected by its uploader."""
        track = self.tracks.get(owner)
        return track is None or track.foreign

    async def _session(self, owner: Owner, key: str, found: PollCounts) -> None:
        session = await self._bearing(key, self._objects.session(owner))
        track = self.tracks.get(owner)
        own = track.session if track is not None else ""
        if session is not None and (why := contradiction(session, self._run_id, own)):
            self.troubles[key] = f"{key} is not believed: {why}"
            self.tracks.setdefault(owner, RankTrack(*owner, heard_at=self.now(), foreign=True))
        elif session is not None and track is not None:
            self._take_session(session, found)
            track.session, track.foreign = session.session, False
            self.troubles.pop(summary_key(track.worker, track.attempt), None)
        elif session is not None:
            self._begin(session, found)
        elif key in self.troubles and key not in self._unanswered:
            # The manifests say what is needed.
            self.tracks.setdefault(owner, RankTrack(*owner, heard_at=self.now())).foreign = False

    def _take_session(self, session: Session, found: PollCounts) -> None:
        self.take(session)
        self._worlds.add((session.attempt, World(session.world_size, session.include_workers)))
        found.sessions += 1

    def _begin(self, session: Session, found: PollCounts) -> RankTrack:
        self._take_session(session, found)
        owner, now = (session.attempt, session.rank), self.now()
        track = RankTrack(*owner, heard_at=now, seen_at=session.started, session=session.session)
        self.tracks[owner] = track
        return track

    async def _adopt_orphans(self, found: PollCounts) -> None:
        """Once: ranks that have stored something, and whose session was removed."""
        index, number = self.share
        expected = (
            (attempt, rank)
            for attempt, world in self._worlds
            for rank in Members(world.expected_ranks())
            if rank % number == index
        )
        try:
            orphans = await self._objects.find_orphans(self.tracks, expected)
        except (SmdistError, OSError) as error:
            self.troubles["manifests/"] = f"manifests cannot be listed: {error}"
            return
        for owner in sorted(owner for owner in orphans if owner[1] % number == index):
            key = session_key(worker_name(owner[1]), owner[0])
            await self._session(owner, key, found)
            if owner not in self.tracks and key not in self._unanswered:
                self.troubles[key] = f"{key} is missing, though there are manifests"
                self.tracks[owner] = RankTrack(*owner, heard_at=self.now())

    async def _load_summaries(self, sessions: Mapping[Owner, str], found: PollCounts) -> None:
        """One request for each rank that had ended before we came."""
        index, number = self.share
        listed = await self._objects.list_summaries()
        fresh = {o: k for o, k in listed.items() if o[1] % number == index and o not in self.tracks}
        await self._each(lambda item: self._summary(*item, found), fresh.items())
        for attempt, rank in fresh.keys() - sessions.keys():
            key = session_key(worker_name(rank), attempt)
            self.troubles[key] = f"{key} is missing, though there is a summary"

    async def _summary(self, owner: Owner, key: str, found: PollCounts) -> None:
        summary = await self._bearing(key, self._objects.summary(owner, self._run_id))
        if summary is None:
            return  # the manifests say the same
        track = self._begin(summary.session, found)
        for manifest in summary.manifests:
            self._took(track, manifest, found)

    # -- one rank --------------------------------------------------------------------------------

    async def _read(self, track: RankTrack, found: PollCounts) -> None:
        if found.manifests >= _MOST_IN_POLL:
            return
        first = track.seq
        try:
            more = True
            while more and track.seq - first < _MOST_AT_ONCE:
                behind = track.behind(self.now(), _MOST_WINDOW)
                more = await (self._pile if behind else self._window)(track, found)
                if track.final:
                    break
        except (SmdistError, OSError) as error:
            self.troubles[track.prefix] = f"{track.worker} cannot be read: {error}"
            track.after_failure(self.now(), self.rhythm)
            return
        self.troubles.pop(track.prefix, None)
        if track.final and track.seq > first:
            self._changed_at = self.now()  # a job that restarts does it soon
            self._discover_at, self._looked = 0.0, False

    async def _window(self, track: RankTrack, found: PollCounts) -> bool:
        """Ask for the next manifests; whether more of them are to be expected right away."""
        first = track.seq
        window = max(track.window, min(track.hinted - first + 1, _MOST_WINDOW))
        if window == 1:
            read = [await self._manifest(track, first)]
        else:
            seqs = range(first, first + window)
            read = await bounded_gather(partial(self._manifest, track), seqs, window)
        for manifest in read:
            # Behind a gap there may be one that was written while we asked: it is asked for again.
            if manifest is None or track.ended:
                break
            self._took(track, manifest, found)
        now = self.now()
        if track.seq == first:
            track.hinted = -1
            track.after_miss(now, self.rhythm)
            return False
        track.after_success(now, self.rhythm)
        expected_at = track.expected_at(now, self.rhythm.expect_s)
        more = track.seq == first + window and (track.hinted >= track.seq or expected_at <= now)
        track.window = min(2 * window, _MOST_WINDOW) if more else 1
        return more

    async def _pile(self, track: RankTrack, found: PollCounts) -> bool:
        """Read what has piled up, in few requests; whether that is all of it."""
        first, most = track.seq, track.seq + _MOST_BY_SPANS

        def take(manifests: Sequence[RankManifest]) -> bool:
            for manifest in manifests:
                self._took(track, manifest, found)
            return track.seq < most and found.manifests < _MOST_IN_POLL and not track.final

        keys = set(await self._list(track.prefix, after=track.key(first - 1) if first else ""))
        there = list(takewhile(lambda seq: track.key(seq) in keys, count(first)))
        await read_in_order(covering_spans(there), partial(self._of_span, track), take)
        track.listed = True
        if track.seq == first:
            track.hinted = -1
        else:
            track.after_success(self.now(), self.rhythm)
        whole = track.seq - first >= len(there) or track.torn
        track.window = 1 if whole else _MOST_WINDOW
        return whole

    async def _of_span(self, track: RankTrack, span: ManifestSpan) -> Sequence[RankManifest] | None:
        if span.length == 1:
            manifest = await self._manifest(track, span.first)
            return None if manifest is None else (manifest,)
        request = SpanRequest(track.attempt, track.rank, track.session, span)
        try:
            return await self._counted(self._objects.span(request))
        except StoreForbidden:
            return None  # its parts say the same
        except CorruptObject as error:
            self.troubles[request.key] = f"{request.key} was passed over: {error}"
            return None

    async def _manifest(self, track: RankTrack, seq: int) -> RankManifest | None:
        key = track.key(seq)
        try:
            owner = (track.attempt, track.rank)
            manifest = await self._counted(self._objects.manifest(owner, seq, track.session))
        except CorruptObject as error:
            # A power cut emptied it; its writer, if it lives, writes it once more.
            self.troubles[key] = f"{key} makes no sense: {error}"
            track.torn = True
            return None
        if manifest is not None:
            self.troubles.pop(key, None)
        return manifest

    def _took(self, track: RankTrack, manifest: RankManifest, found: PollCounts) -> None:
        manifest, _ = extract_segment(track.key(manifest.seq), manifest)
        if not track.session:
            track.session = manifest.session
            self.take(session_stand_in(manifest, foreign=track.foreign))
        self.take(manifest)
        self.want(entry.layout for entry in manifest.steps)
        track.took(manifest, self.now())
        found.manifests += 1

    def _beat_due(self, track: RankTrack, now: float) -> bool:
        if now < track.beat_due_at or track.farewell:
            return False
        return track.final or now - track.alive_at >= self.rhythm.beat_s

    async def _beat(self, track: RankTrack, found: PollCounts) -> None:
        key = heartbeat_key(track.worker, track.attempt)
        now, rhythm = self.now(), self.rhythm
        track.beat_due_at = now + max(rhythm.beat_s, rhythm.silence(now - track.alive_at))
        beat = await self._bearing(
            key, self._objects.heartbeat((track.attempt, track.rank), track.session)
        )
        track.farewell = track.final and key not in self._unanswered
        if beat is None:
            return  # a young rank has none yet
        if beat.time > track.beaten_at:
            track.beaten_at, track.seen_at = beat.time, max(beat.time, track.seen_at)
            track.alive_at = self.now()
            found.beats += 1
            self.take(beat)

    def _stuck(self, track: RankTrack) -> bool:
        """Whether its manifests may have a gap, which asking for the next one never passes."""
        now = self.now()
        usual_s = 2 * max(track.gaps, default=0.0)
        silent = now - track.heard_at >= max(self.rhythm.seek_s, usual_s)
        return not track.final and now >= track.seek_due_at and (track.torn or silent)

    async def _seek(self, track: RankTrack, found: PollCounts) -> None:
        """Pass over a manifest that is not there or makes no sense, if there are later ones."""
        track.seek_s = min(max(2 * track.seek_s, self.rhythm.seek_s), _MOST_SEEK_S)
        track.seek_due_at = self.now() + track.seek_s
        before = track.key(track.seq - 1) if track.seq else ""
        try:
            keys = await self._list(track.prefix, after=before)
        except (SmdistError, OSError):
            return
        names = (_SEQ.fullmatch(key.removeprefix(track.prefix)) for key in keys)
        seqs = [int(name[1]) for name in names if name and int(name[1]) >= track.seq]
        if seqs and seqs[0] == track.seq:
            if not track.torn:  # it was written a moment ago
                await self._read(track, found)
                return
            seqs = seqs[1:]
        if not seqs:
            return
        seq = seqs[0]
        more = seq - track.seq - 1
        them = f"and {more} after it were" if more else "was"
        self.troubles[track.key(track.seq)] = f"{track.key(track.seq)} {them} passed over"
        track.seq, track.torn, track.seek_s = seq, False, 0.0
        await self._read(track, found)

    # -- what they name --------------------------------------------------------------------------

    async def _layout(self, digest: str, found: PollCounts) -> None:
        key = layout_key(digest)
        self._wanted[digest] = self.now() + self.rhythm.discover_s
        layout = await self._bearing(key, self._objects.layout(digest))
        if layout is not None:
            self.layouts[digest] = layout
            del self._wanted[digest]
            found.layouts += 1

    async def _bearing(self, key: str, reading: Awaitable[T]) -> T | None:
        """What is there; None, and a note if it is strange, when nothing can be read."""
        self._unanswered.discard(key)
        try:
            value = await self._counted(reading)
        except (SmdistError, OSError) as error:
            self.troubles[key] = f"{key} cannot be read: {error}"
            if not isinstance(error, CorruptObject):
                self._unanswered.add(key)
            return None
        self.troubles.pop(key, None)
        return value
