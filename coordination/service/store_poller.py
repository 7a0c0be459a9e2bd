"""Poll the store of a run for new facts, rank by rank.

A rank is read when its next manifest is expected, from how often it wrote so far. A silent rank is
read less and less often, also one that was lost, because its buffer may be recovered. A rank that has
ended is not read again. `sessions/` is listed now and then to find new ranks. `hint` makes a rank due
at once.

Runs on one event loop, one `poll` at a time. Each fact is handed to `on_fact` once. Errors of a store
never end a poller: they are in `troubles`, and the reads are retried later and later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from smdist.coordination.service.poll_schedule import (
    LIVE,
    PollIntervals,
    RankTrack,
    WatchPolicy,
    resume_track,
)
from smdist.coordination.service.rank_reader import ObjectReader, PollCounts, RankReader
from smdist.coordination.view.membership import LastContact
from smdist.coordination.view.run_view import Fact, View, World
from smdist.errors import SmdistError
from smdist.format.intervals import Members
from smdist.format.layout import Layout
from smdist.format.manifest import RUN_KEY, Owner, Session, layout_key, session_key, summary_key
from smdist.format.session_checks import contradiction
from smdist.identity import worker_name, worker_rank
from smdist.storage.store import Store

__all__ = ["PollCounts", "RunPoller", "StorePoller"]

_CONCURRENCY = 64


class RunPoller(Protocol):
    """What a follower needs of a poller. `layouts` and `tracks` grow, `troubles` come and go."""

    layouts: dict[str, Layout]
    tracks: dict[Owner, RankTrack]
    hints: int

    @property
    def troubles(self) -> Mapping[str, str]: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def is_failing(self) -> bool: ...
    @property
    def quiet_s(self) -> float: ...
    def resume_from(
        self,
        view: View,
        layouts: Mapping[str, Layout],
        named: Iterable[str],
        reread: frozenset[int],
    ) -> None: ...
    def hint(self, worker: str, attempt: int, seq: int) -> None: ...
    def next_due(self) -> float: ...
    def last_contacts(self) -> dict[Owner, LastContact]: ...
    async def poll(self) -> PollCounts: ...
    async def check_for_more(self) -> PollCounts: ...


class StorePoller:
    """Reads a run itself. `shard`: index and number; only ranks with that remainder are read."""

    def __init__(
        self,
        store: Store,
        on_fact: Callable[[Fact], None],
        now: Callable[[], float],
        intervals: PollIntervals | None = None,
        policy: WatchPolicy = LIVE,
        *,
        concurrency: int = _CONCURRENCY,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self.layouts: dict[str, Layout] = {}
        self.tracks: dict[Owner, RankTrack] = {}
        self.hints = 0
        self.wanted: dict[str, float] = {}  # layouts by digest, and when to read them
        self._on_fact, self._now, self._policy, self._shard = on_fact, now, policy, shard
        self._intervals = intervals or PollIntervals()
        self._reader = ObjectReader(store, concurrency)
        self._ranks = RankReader(
            self._reader, on_fact, self.want_layouts, now, self._intervals, policy
        )
        self._discover_at = 0.0
        self._ranks_changed_at = 0.0
        self._reads_summaries = True  # at the first listing: later ranks are alive
        self._listed_since_end = False  # sessions were listed since the last rank became final
        self._run_id = ""
        self._worlds: set[tuple[int, World]] = set()  # with their attempt

    # -- state -----------------------------------------------------------------------------------

    @property
    def troubles(self) -> dict[str, str]:
        """Return what cannot be read, by key."""
        return self._reader.troubles

    @property
    def is_complete(self) -> bool:
        """Return whether every rank is final, all that they named was read, and no rank came since."""
        tracks = self.tracks.values()
        some = bool(tracks) or self._shard[1] > 1
        needs_heartbeat = self._policy.reads_final_heartbeats
        done = all(t.final and (t.final_heartbeat_read or not needs_heartbeat) for t in tracks)
        return some and done and self._listed_since_end and not self.wanted

    @property
    def is_failing(self) -> bool:
        """Return whether the store gave no answer at the end of the last poll."""
        return self._reader.errors > 0

    @property
    def quiet_s(self) -> float:
        """Return how long a job that is silent and has not ended should be left alone."""
        live = [track.alive_at for track in self.tracks.values() if not track.final]
        return self._intervals.silent_wait_s(self._now() - max(live)) if live else 0.0

    def next_due(self) -> float:
        """Return when the next read is due, by the clock."""
        due = [self._discover_at, *self.wanted.values()]
        due += [track.schedule.due_at for track in self.tracks.values() if not track.ended]
        due += [
            track.schedule.heartbeat_due_at
            for track in self.tracks.values()
            if track.final and not track.final_heartbeat_read
        ]
        return min(due)

    def last_contacts(self) -> dict[Owner, LastContact]:
        """Return the last contacts with each rank, by our clock."""
        return {
            o: LastContact(t.first_seen_at, t.read_at, t.alive_at) for o, t in self.tracks.items()
        }

    def resume_from(
        self,
        view: View,
        layouts: Mapping[str, Layout],
        named: Iterable[str],
        reread: frozenset[int] = frozenset(),
    ) -> None:
        """Continue behind what `view` knows, but read the attempts `reread` from their beginning.

        `named` are the digests of the layouts that the view names.
        """
        now = self._now()
        self.layouts.update(layouts)
        self.want_layouts(named)
        for attempt, rank, known in view.ranks():
            if attempt not in reread:
                self.tracks[attempt, rank] = resume_track(attempt, rank, known, now)

    def want_layouts(self, digests: Iterable[str]) -> None:
        """Read these layouts with the next poll, unless they are known."""
        for digest in digests:
            if digest and digest not in self.layouts:
                self.wanted.setdefault(digest, 0.0)

    def hint(self, worker: str, attempt: int, seq: int) -> None:
        """Make a rank due: its manifest `seq` was reported as stored. Ignore what is known or invalid."""
        try:
            owner = (attempt, worker_rank(worker))
        except ValueError:
            return
        self.hints += 1
        track = self.tracks.get(owner)
        if track is None:
            self._discover_at = 0.0
        elif not track.ended and seq >= track.seq:
            track.hinted, track.schedule.due_at = max(track.hinted, seq), 0.0

    # -- polling ---------------------------------------------------------------------------------

    async def poll(self) -> PollCounts:
        """Read everything that is due."""
        counts, reader, ranks = PollCounts(), self._reader, self._ranks
        reader.errors = 0
        if self._now() >= self._discover_at:
            await self._discover(counts)
        now = self._now()
        live = [track for track in self.tracks.values() if not track.final]
        due = [t for t in self.tracks.values() if not t.ended and t.schedule.due_at <= now]
        due.sort(key=lambda track: track.schedule.due_at)
        await reader.for_each(lambda track: self._read_rank(track, counts), due)
        silent = [track for track in self.tracks.values() if ranks.heartbeat_due(track)]
        await reader.for_each(lambda track: ranks.read_heartbeat(track, counts), silent)
        stuck = [track for track in live if ranks.has_gap(track)]
        await reader.for_each(lambda track: self._skip_gap(track, counts), stuck)
        wanted = [digest for digest, due_at in self.wanted.items() if due_at <= now]
        await reader.for_each(lambda digest: self._read_layout(digest, counts), wanted)
        return counts

    async def check_for_more(self) -> PollCounts:
        """Look once for new ranks, and for more of ranks that did not end."""
        counts = PollCounts()
        await self._discover(counts)
        rest = [track for track in self.tracks.values() if not track.ended]
        await self._reader.for_each(lambda track: self._read_rank(track, counts), rest)
        return counts

    async def _read_rank(self, track: RankTrack, counts: PollCounts) -> None:
        first = track.seq
        await self._ranks.read(track, counts)
        self._list_if_ended(track, first)

    async def _skip_gap(self, track: RankTrack, counts: PollCounts) -> None:
        first = track.seq
        await self._ranks.skip_gap(track, counts)
        self._list_if_ended(track, first)

    def _list_if_ended(self, track: RankTrack, first: int) -> None:
        """List sessions soon after a rank has ended: a job that restarts does so at once."""
        if track.final and track.seq > first:
            self._ranks_changed_at = self._now()
            self._discover_at, self._listed_since_end = 0.0, False

    async def _read_layout(self, digest: str, counts: PollCounts) -> None:
        key = layout_key(digest)
        self.wanted[digest] = self._now() + self._intervals.discover_s
        layout = await self._reader.try_get(key, self._reader.objects.layout(digest))
        if layout is not None:
            self.layouts[digest] = layout
            del self.wanted[digest]
            counts.layouts += 1
        elif key not in self.troubles:  # a layout is stored before the manifests that name it
            self.troubles[key] = f"{key} is missing: the values that it describes cannot be read"

    # -- discovery -------------------------------------------------------------------------------

    async def _discover(self, counts: PollCounts) -> None:
        """List sessions and start to read ranks that are new."""
        now, intervals, reader = self._now(), self._intervals, self._reader
        try:
            owners = self._own_ranks(await reader.objects.list_sessions())
            due = {owner: key for owner, key in owners.items() if self._session_due(owner)}
            new = not due.keys() <= self.tracks.keys()
            if due and not self._run_id:
                run = await reader.try_get(RUN_KEY, reader.objects.run())
                self._run_id = run.run_id if run is not None else ""
            if self._reads_summaries:
                await self._read_summaries(owners, counts)
        except (SmdistError, OSError) as error:
            self.troubles["sessions/"] = f"sessions cannot be listed: {error}"
            self._discover_at = now + intervals.discover_s
            return
        self._listed_since_end = True
        first, self._reads_summaries = self._reads_summaries, False
        self.troubles.pop("sessions/", None)
        if new:
            self._ranks_changed_at = now
        rest = [item for item in due.items() if self._session_due(item[0])]
        await reader.for_each(lambda item: self._read_session(*item, counts), rest)
        if first and not self.is_failing:
            await self._read_orphans(counts)
        starting = now - self._ranks_changed_at < intervals.startup_s
        wait_s = intervals.interval_s if starting else max(intervals.discover_s, self.quiet_s)
        # A listing of many sessions is several requests.
        self._discover_at = now + max(wait_s, len(owners) / 2000)

    def _own_ranks(self, keys: Mapping[Owner, str]) -> dict[Owner, str]:
        index, number = self._shard
        return {owner: key for owner, key in keys.items() if owner[1] % number == index}

    def _session_due(self, owner: Owner) -> bool:
        """Return whether the session was not read, or has to be corrected by its uploader."""
        track = self.tracks.get(owner)
        return track is None or track.foreign

    async def _read_session(self, owner: Owner, key: str, counts: PollCounts) -> None:
        session = await self._reader.try_get(key, self._reader.objects.session(owner))
        track = self.tracks.get(owner)
        known = track.session if track is not None else ""
        if session is None:
            if key in self.troubles and self._reader.was_answered(key):
                self._add_unknown_rank(owner)
        elif why := contradiction(session, self._run_id, known):
            self.troubles[key] = f"{key} is not believed: {why}"
            self.tracks.setdefault(owner, RankTrack(*owner, read_at=self._now(), foreign=True))
        elif track is not None:
            self._accept_session(session, counts)
            track.session, track.foreign = session.session, False
            self.troubles.pop(summary_key(track.worker, track.attempt), None)
        else:
            self._add_rank(session, counts)

    def _accept_session(self, session: Session, counts: PollCounts) -> None:
        self._on_fact(session)
        self._worlds.add((session.attempt, World(session.world_size, session.include_workers)))
        counts.sessions += 1

    def _add_rank(self, session: Session, counts: PollCounts) -> RankTrack:
        self._accept_session(session, counts)
        owner, started = (session.attempt, session.rank), session.started
        track = RankTrack(*owner, read_at=self._now(), reported_at=started, session=session.session)
        self.tracks[owner] = track
        return track

    def _add_unknown_rank(self, owner: Owner) -> None:
        """Read a rank whose session is gone or damaged: its manifests say what is needed."""
        track = self.tracks.setdefault(owner, RankTrack(*owner, read_at=self._now()))
        track.foreign = False

    async def _read_orphans(self, counts: PollCounts) -> None:
        """Find ranks that have stored something and whose session was removed."""
        index, number = self._shard
        expected = (
            (attempt, rank)
            for attempt, world in self._worlds
            for rank in Members(world.expected_ranks())
            if rank % number == index
        )
        try:
            orphans = await self._reader.objects.find_orphans(self.tracks, expected)
        except (SmdistError, OSError) as error:
            self.troubles["manifests/"] = f"manifests cannot be listed: {error}"
            return
        for owner in sorted(owner for owner in orphans if owner[1] % number == index):
            key = session_key(worker_name(owner[1]), owner[0])
            await self._read_session(owner, key, counts)
            if owner not in self.tracks and self._reader.was_answered(key):
                self.troubles[key] = f"{key} is missing, though there are manifests"
                self._add_unknown_rank(owner)

    async def _read_summaries(self, sessions: Mapping[Owner, str], counts: PollCounts) -> None:
        """Read ranks that ended before this poller started, with one request each."""
        listed = self._own_ranks(await self._reader.objects.list_summaries())
        new = {owner: key for owner, key in listed.items() if owner not in self.tracks}
        await self._reader.for_each(lambda item: self._read_summary(*item, counts), new.items())
        for attempt, rank in new.keys() - sessions.keys():
            key = session_key(worker_name(rank), attempt)
            self.troubles[key] = f"{key} is missing, though there is a summary"

    async def _read_summary(self, owner: Owner, key: str, counts: PollCounts) -> None:
        reading = self._reader.objects.summary(owner, self._run_id)
        summary = await self._reader.try_get(key, reading)
        if summary is not None:  # else the manifests are read
            track = self._add_rank(summary.session, counts)
            for manifest in summary.manifests:
                self._ranks.accept(track, manifest, counts)
