"""Read the manifests and heartbeats of one rank after the other.

Manifests of a rank are numbered without gaps, so the next one is read by its key: one small request,
mostly "not found" when nothing is new. A backlog is listed once and read by spans. Called by
`StorePoller` on its event loop, for several ranks at a time but once per rank.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from typing import TypeVar

from smdist.concurrency import bounded_gather
from smdist.coordination.service.poll_schedule import PollIntervals, RankTrack, WatchPolicy
from smdist.coordination.view.run_view import Fact
from smdist.coordination.view.span_reader import read_in_order
from smdist.errors import CorruptObject, ObjectNotFound, SmdistError, StoreForbidden
from smdist.format.inline_segment import extract_segment
from smdist.format.manifest import RankManifest, heartbeat_key
from smdist.format.manifest_spans import ManifestSpan, covering_spans
from smdist.format.session_checks import session_stand_in
from smdist.storage.run_objects import RunObjects, SpanRequest
from smdist.storage.store import Store

__all__ = ["ObjectReader", "PollCounts", "RankReader"]

A = TypeVar("A")
T = TypeVar("T")

_SEQ = re.compile(r"(\d+)\.json")
_MAX_WINDOW = 16  # manifests of a rank requested at once
_MAX_PER_RANK = 64  # manifests of a rank in one poll: snapshots go on while a backlog is read
_MAX_BY_SPANS = 4096  # likewise, where one request is for many manifests
_MAX_PER_POLL = 8192  # of all ranks; those without a turn come first in the next poll
_MAX_GAP_CHECK_S = 3600.0
_MAX_ERRORS = 8  # in a row: the store is down


class ObjectReader:
    """Reads objects although some cannot be read: `troubles` says by key what cannot, and why.

    After several errors in a row the store counts as down, and `for_each` skips the rest.
    """

    def __init__(self, store: Store, concurrency: int) -> None:
        self.store, self.objects = store, RunObjects(store)
        self.troubles: dict[str, str] = {}
        self.errors = 0  # in a row, without a success
        self._concurrency = concurrency
        self._unanswered: set[str] = set()

    async def get(self, reading: Awaitable[T]) -> T | None:
        """Await a read; None if the object is not there."""
        try:
            value = await reading
        except ObjectNotFound:
            self.errors = 0
            return None
        except CorruptObject:  # the store has answered
            self.errors = 0
            raise
        except (SmdistError, OSError):
            self.errors += 1
            raise
        self.errors = 0
        return value

    async def try_get(self, key: str, reading: Awaitable[T]) -> T | None:
        """Await the read of `key`; None if it is not there or cannot be read, which is noted."""
        self._unanswered.discard(key)
        try:
            value = await self.get(reading)
        except (SmdistError, OSError) as error:
            self.troubles[key] = f"{key} cannot be read: {error}"
            if not isinstance(error, CorruptObject):
                self._unanswered.add(key)
            return None
        self.troubles.pop(key, None)
        return value

    def was_answered(self, key: str) -> bool:
        """Return whether the store answered when `key` was last tried."""
        return key not in self._unanswered

    async def list_keys(self, prefix: str, after: str) -> Sequence[str]:
        try:
            return await self.store.list(prefix, after=after)
        except (SmdistError, OSError):
            self.errors += 1
            raise

    async def for_each(self, call: Callable[[A], Awaitable[None]], items: Iterable[A]) -> None:
        """Call for every item, several at a time; skip the rest when the store is down."""

        async def call_if_up(item: A) -> None:
            if self.errors < _MAX_ERRORS:
                await call(item)

        await bounded_gather(call_if_up, items, self._concurrency)


@dataclass
class PollCounts:
    """How many facts of each kind one poll has found."""

    manifests: int = 0
    sessions: int = 0
    heartbeats: int = 0
    layouts: int = 0

    @property
    def facts(self) -> int:
        return self.manifests + self.sessions + self.layouts


@dataclass
class RankReader:
    """Hands each new manifest and heartbeat to `on_fact` once, the layouts it names to `on_layouts`."""

    reader: ObjectReader
    on_fact: Callable[[Fact], None]
    on_layouts: Callable[[Iterable[str]], None]
    now: Callable[[], float]
    intervals: PollIntervals
    policy: WatchPolicy

    async def read(self, track: RankTrack, counts: PollCounts) -> None:
        """Read the manifests of a rank that are new. Errors become troubles; they are retried later."""
        if counts.manifests >= _MAX_PER_POLL:
            return
        first, more = track.seq, True
        try:
            while more and track.seq - first < _MAX_PER_RANK:
                backlog = track.has_backlog(self.now(), _MAX_WINDOW)
                more = await (self._read_backlog if backlog else self._read_next)(track, counts)
                if track.final:
                    break
        except (SmdistError, OSError) as error:
            self.reader.troubles[track.prefix] = f"{track.worker} cannot be read: {error}"
            track.after_failure(self.now(), self.intervals)
            return
        self.reader.troubles.pop(track.prefix, None)

    def accept(self, track: RankTrack, manifest: RankManifest, counts: PollCounts) -> None:
        """Hand on a manifest and move the track behind it."""
        manifest, _ = extract_segment(track.key(manifest.seq), manifest)
        if not track.session:
            track.session = manifest.session
            self.on_fact(session_stand_in(manifest, foreign=track.foreign))
        self.on_fact(manifest)
        self.on_layouts(entry.layout for entry in manifest.steps)
        track.accept(manifest, self.now())
        counts.manifests += 1

    async def _read_next(self, track: RankTrack, counts: PollCounts) -> bool:
        """Read the next manifests; return whether more of them are expected right away."""
        first, schedule = track.seq, track.schedule
        window = max(schedule.window, min(track.hinted - first + 1, _MAX_WINDOW))
        seqs = range(first, first + window)
        for manifest in await bounded_gather(partial(self._manifest, track), seqs, window):
            # A manifest behind a gap may have been written meanwhile: it is read again.
            if manifest is None or track.ended:
                break
            self.accept(track, manifest, counts)
        now = self.now()
        if track.seq == first:
            track.hinted = -1
            track.after_miss(now, self.intervals)
            return False
        track.after_success(now, self.intervals)
        expected_at = track.expected_at(now, self.intervals.max_expected_s)
        more = track.seq == first + window and (track.hinted >= track.seq or expected_at <= now)
        schedule.window = min(2 * window, _MAX_WINDOW) if more else 1
        return more

    async def _read_backlog(self, track: RankTrack, counts: PollCounts) -> bool:
        """List what is waiting and read it in few requests; return whether all of it was read."""
        first, limit = track.seq, track.seq + _MAX_BY_SPANS

        def take(manifests: Sequence[RankManifest]) -> bool:
            for manifest in manifests:
                self.accept(track, manifest, counts)
            return track.seq < limit and counts.manifests < _MAX_PER_POLL and not track.final

        after = track.key(first - 1) if first else ""
        keys = set(await self.reader.list_keys(track.prefix, after=after))
        there = list(takewhile(lambda seq: track.key(seq) in keys, count(first)))
        await read_in_order(covering_spans(there), partial(self._span, track), take)
        track.schedule.listed = True
        if track.seq == first:
            track.hinted = -1
        else:
            track.after_success(self.now(), self.intervals)
        whole = track.seq - first >= len(there) or track.next_unreadable
        track.schedule.window = 1 if whole else _MAX_WINDOW
        return whole

    async def _span(self, track: RankTrack, span: ManifestSpan) -> Sequence[RankManifest] | None:
        if span.length == 1:
            manifest = await self._manifest(track, span.first)
            return None if manifest is None else (manifest,)
        request = SpanRequest(track.attempt, track.rank, track.session, span)
        try:
            return await self.reader.get(self.reader.objects.span(request))
        except StoreForbidden:
            return None  # shorter spans and manifests hold the same
        except CorruptObject as error:
            self.reader.troubles[request.key] = f"{request.key} was skipped: {error}"
            return None

    async def _manifest(self, track: RankTrack, seq: int) -> RankManifest | None:
        key, reader = track.key(seq), self.reader
        try:
            manifest = await reader.get(reader.objects.manifest(track.owner, seq, track.session))
        except CorruptObject as error:
            # A power cut may have emptied it. Its writer, if alive, writes it again.
            reader.troubles[key] = f"{key} is damaged: {error}"
            track.next_unreadable = True
            return None
        if manifest is not None:
            reader.troubles.pop(key, None)
        return manifest

    # -- heartbeats ------------------------------------------------------------------------------

    def heartbeat_due(self, track: RankTrack) -> bool:
        now = self.now()
        if now < track.schedule.heartbeat_due_at or track.final_heartbeat_read:
            return False
        if track.final:
            return self.policy.reads_final_heartbeats
        silent = now - track.alive_at >= self.intervals.heartbeat_s
        return silent or not self.policy.waits_for_silence

    async def read_heartbeat(self, track: RankTrack, counts: PollCounts) -> None:
        key = heartbeat_key(track.worker, track.attempt)
        now, intervals, reader = self.now(), self.intervals, self.reader
        wait_s = max(intervals.heartbeat_s, intervals.silent_wait_s(now - track.alive_at))
        track.schedule.heartbeat_due_at = now + wait_s
        reading = reader.objects.heartbeat(track.owner, track.session)
        heartbeat = await reader.try_get(key, reading)
        track.final_heartbeat_read = track.final and reader.was_answered(key)
        if heartbeat is not None and heartbeat.time > track.heartbeat_at:
            track.heartbeat_at = heartbeat.time
            track.reported_at = max(heartbeat.time, track.reported_at)
            track.alive_at = self.now()
            counts.heartbeats += 1
            self.on_fact(heartbeat)

    # -- gaps ------------------------------------------------------------------------------------

    def has_gap(self, track: RankTrack) -> bool:
        """Return whether a manifest may be missing for good: reading the next one never gets past it."""
        now, schedule = self.now(), track.schedule
        if track.final:
            return False
        if not self.policy.waits_for_silence:
            return schedule.gap_check_s == 0.0 or now >= schedule.gap_check_at
        usual_s = 2 * max(track.gaps, default=0.0)
        silent = now - track.read_at >= max(self.intervals.gap_check_s, usual_s)
        return now >= schedule.gap_check_at and (track.next_unreadable or silent)

    async def skip_gap(self, track: RankTrack, counts: PollCounts) -> None:
        """Skip a manifest that is missing or damaged if there are later ones."""
        schedule, first_s = track.schedule, self.intervals.gap_check_s
        schedule.gap_check_s = min(max(2 * schedule.gap_check_s, first_s), _MAX_GAP_CHECK_S)
        schedule.gap_check_at = self.now() + schedule.gap_check_s
        after = track.key(track.seq - 1) if track.seq else ""
        try:
            keys = await self.reader.list_keys(track.prefix, after=after)
        except (SmdistError, OSError):
            return
        names = (_SEQ.fullmatch(key.removeprefix(track.prefix)) for key in keys)
        seqs = [int(name[1]) for name in names if name and int(name[1]) >= track.seq]
        if seqs and seqs[0] == track.seq:
            if not track.next_unreadable:  # it was written a moment ago
                await self.read(track, counts)
                return
            seqs = seqs[1:]
        if not seqs:
            return
        key, more = track.key(track.seq), seqs[0] - track.seq - 1
        them = f" and {more} after it were" if more else " was"
        self.reader.troubles[key] = f"{key}{them} skipped: missing or damaged"
        track.seq, track.next_unreadable, schedule.gap_check_s = seqs[0], False, 0.0
        await self.read(track, counts)
